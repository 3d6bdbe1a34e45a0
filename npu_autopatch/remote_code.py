"""Remote code: what `trust_remote_code` loads past every finder.

`get_class_in_module` executes the main file of remote code itself, and again in place when the file has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from npu_autopatch.ledger import Ledger

NAME = "get_class_in_module"


def watch(loader: ModuleType, ledger: Ledger, holder: object, loaded: Callable[[ModuleType], None]) -> None:
    """Have `loaded` called with each module that `loader.get_class_in_module` returns a class of.

    Cold code that nothing compiles: a wrapt wrapper, set wherever the function is already held under its name.
    """
    original = getattr(loader, NAME, None)
    if original is None:
        return
    if (slot := ledger.find(loader, NAME)) is not None:
        original, wrapper = slot.original, slot.replacement
    else:

        def announce(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
            cls = wrapped(*args, **kwargs)
            module = sys.modules.get(getattr(cls, "__module__", ""))
            if module is not None:
                loaded(module)
            return cls

        wrapper = wrapt.FunctionWrapper(original, announce)
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        if (slot := ledger.find(module, NAME)) is not None:
            slot.holders.add(holder)
        elif vars(module).get(NAME) is original:
            ledger.apply(module, NAME, wrapper, "", holder)
