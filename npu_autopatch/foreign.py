"""Who else has patched a class: another package's forward, a wrapper, an instance's own forward."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
import wrapt

# Since wrapt 2.0 a FunctionWrapper is no ObjectProxy, and both have had BaseObjectProxy for a base.
_PROXY = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)


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
    return "" if home == module.__name__ or home.startswith("transformers") else home


def holders(module: ModuleType, name: str) -> list[str]:
    """Who else holds the function `name` of `module`, and would not see another in its place.

    Modules that took the name, classes and containers that captured the function. Modules of transformers are left
    out: their names are sites of their own.
    """
    if sys.getrefcount(vars(module)[name]) <= ALONE:  # asking the collector takes tens of milliseconds
        return []
    spaces = {id(vars(other)): other for other in list(sys.modules.values()) if isinstance(other, ModuleType)}
    names = _owners(vars(module)[name], spaces, set(), depth=4)
    return sorted(name for name in set(names) if not name.startswith("transformers"))


def _owners(thing: Any, spaces: dict[int, ModuleType], seen: set[int], depth: int) -> Iterator[str]:
    """The modules, classes and functions at the end of what holds `thing`."""
    for holder in gc.get_referrers(thing):
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if id(holder) in spaces:
            yield spaces[id(holder)].__name__
        elif isinstance(holder, type):
            yield f"{holder.__module__}.{holder.__qualname__}"
        elif isinstance(holder, FunctionType):
            if home_of(holder):  # or else it is a replacement that holds its original
                yield f"{home_of(holder)}.{holder.__qualname__}"
        elif depth and type(holder) in (dict, list, tuple, set, staticmethod, CellType):
            yield from _owners(holder, spaces, seen, depth - 1)


def importers(function: Any) -> list[tuple[ModuleType, str]]:
    """The modules that hold `function`, and under which names."""
    spaces = {id(vars(module)): module for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    found = [spaces[id(space)] for space in gc.get_referrers(function) if id(space) in spaces]
    return [(module, name) for module in found for name, value in list(vars(module).items()) if value is function]


def _count_alone() -> int:
    """The references to a function that its module alone holds, as `sys.getrefcount` counts them."""
    module = ModuleType("alone")
    exec("def function(): pass", vars(module))
    return sys.getrefcount(vars(module)["function"])


ALONE = _count_alone()


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
