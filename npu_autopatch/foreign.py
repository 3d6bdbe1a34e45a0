"""Who else has patched a class: another package's forward, a wrapper, an instance's own forward."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch
import wrapt

# Since wrapt 2.0 a FunctionWrapper is no ObjectProxy, and both have had BaseObjectProxy for a base.
_PROXY = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)


def of(owner: Any, attribute: str) -> str:
    """Who stands at a site that none of its own modules put there; empty if nobody."""
    if isinstance(owner, ModuleType):
        return function_of(owner, attribute)
    return _entry(owner.get(attribute)) if isinstance(owner, dict) else patched_by(owner)


def _entry(function: Any) -> str:
    """Which package the function in a registry comes from; empty if transformers, or if there is none."""
    home = "" if function is None else home_of(function)
    return "" if home.startswith("transformers.") else home


def patched_by(cls: type) -> str:
    """Who put a forward on `cls` that none of its own or its bases' modules defines; empty if nobody did."""
    forward: Any = next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)
    if forward is None:
        return ""
    if isinstance(forward, _PROXY):
        wrapper = getattr(forward, "_self_wrapper", None)
        return f"{_home(wrapper)} (a wrapt wrapper)"
    home = home_of(forward)
    homes = {base.__module__ for base in cls.__mro__}
    return "" if home in homes or home.startswith("transformers.") else home or type(forward).__name__


def function_of(module: ModuleType, name: str) -> str:
    """Which other package a function in the namespace of `module` comes from; empty if none.

    Not transformers and not remote code, from which modules import functions.
    """
    function: Any = vars(module)[name]
    if isinstance(function, _PROXY):
        return f"{_home(getattr(function, '_self_wrapper', None))} (a wrapt wrapper)"
    home = home_of(function)
    return "" if home == module.__name__ or home.startswith(("transformers", "npu_autopatch.")) else home


def replaced_classes(module: ModuleType) -> dict[str, type]:
    """Modules of other packages that stand in `module`, put there like Liger's or imported by it."""
    package = module.__name__.partition(".")[0]
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, torch.nn.Module)
        and value.__module__.partition(".")[0] not in (package, "torch", "transformers", "builtins")
    }


def instances_with_own_forward(classes: Iterable[type]) -> dict[type, Counter[str]]:
    """Of live modules of `classes`, those with a forward of their own, by the module that it comes from."""
    wanted = tuple(classes)
    found: dict[type, Counter[str]] = {}
    if wanted:
        # Not get_objects(): it shares out the tuples that other threads are building, which breaks them (bpo-15108).
        for thing in gc.get_referrers(*wanted):
            # type() and not isinstance(): that would wake lazy objects
            if type(thing) in wanted and "forward" in thing.__dict__:
                found.setdefault(type(thing), Counter())[_home(thing.__dict__["forward"])] += 1
    return found


def home_of(thing: Any) -> str:
    """The module that a function was written in, whatever it passes for; of one made here, empty."""
    return str(thing.__globals__.get("__name__", "")) if isinstance(thing, FunctionType) else _home(thing)


def _home(thing: Any) -> str:
    thing = getattr(thing, "__func__", thing)
    thing = getattr(thing, "func", thing)  # functools.partial
    name = getattr(thing, "__module__", None) or type(thing).__module__
    return str(name) if name in sys.modules or name else "unknown"
