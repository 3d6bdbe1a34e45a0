"""Remote code: what `trust_remote_code` loads past every finder.

`get_class_in_module` executes the main file of remote code itself, and again in place when the file has changed. It
is cold code that nothing compiles, so it gets a wrapt wrapper: put on when its module is loaded, which imports nothing
of torch, and entered into the ledger when the first activation begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import wrapt

from npu_autopatch.finder import REMOTE_CODE_LOADER
from npu_autopatch.ledger import Ledger

NAME = "get_class_in_module"


class Announcing(wrapt.FunctionWrapper):  # type: ignore[misc, type-arg]
    """`get_class_in_module`, with the module of each class it returns handed over for patching."""


def wrap(loader: ModuleType) -> None:
    """Put the wrapper on, right after `loader` was executed and before anybody else holds the function."""
    if (original := vars(loader).get(NAME)) is not None:
        setattr(loader, NAME, Announcing(original, _announce))


def unwrap() -> None:
    """Take it off again wherever it is, if no activation has begun."""
    for module, held in _holders():
        if isinstance(held, Announcing):
            setattr(module, NAME, held.__wrapped__)


def watch(ledger: Ledger, holder: object) -> None:
    """Have the wrapper wherever the function is held under its name, until `holder` is released."""
    current = vars(sys.modules[REMOTE_CODE_LOADER]).get(NAME)
    if current is None:
        return
    wrapper = current if isinstance(current, Announcing) else Announcing(current, _announce)
    original = wrapper.__wrapped__
    for module, held in _holders():
        if (slot := ledger.find(module, NAME)) is not None:
            slot.holders.add(holder)
        elif held is wrapper or held is original:
            setattr(module, NAME, original)
            ledger.apply(module, NAME, wrapper, "", holder)


def _holders() -> Iterator[tuple[ModuleType, Any]]:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and NAME in vars(module):
            yield module, vars(module)[NAME]


def _announce(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    from npu_autopatch.loader import loaded

    cls = wrapped(*args, **kwargs)
    module = sys.modules.get(getattr(cls, "__module__", ""))
    if module is not None:
        loaded(module)
    return cls
