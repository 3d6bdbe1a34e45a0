"""Who holds a function beside its module, and would not see another in its place."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from npu_autopatch.foreign import home_of

_CONTAINERS = (dict, list, tuple, set, staticmethod, classmethod, CellType)
_DEPTH = 5  # a decorator's list in a cell in a closure of a function


def count(module: ModuleType, name: str) -> int:
    """How many hold the function `name` of `module` beside the module. Cheap, and says nothing of who."""
    return sys.getrefcount(vars(module)[name]) - ALONE


def importers(function: Any) -> list[tuple[ModuleType, str]]:
    """The modules that hold `function`, and under which names."""
    return [(module, name) for module in _modules() for name, value in list(vars(module).items()) if value is function]


def captures(module: ModuleType, function: Any) -> list[tuple[list[Any], int]]:
    """The places of `function` in lists that the constructors of `module`'s classes close over.

    Some versions of transformers decorate attention classes so, to give each instance the function for `kernelize`.
    """
    found = []
    for value in list(vars(module).values()):
        init = vars(value).get("__init__") if isinstance(value, type) else None
        for cell in (init.__closure__ or ()) if isinstance(init, FunctionType) else ():
            for held in gc.get_referents(cell):  # none of an empty cell
                if type(held) is list:
                    found += [(held, place) for place, item in enumerate(held) if item is function]
    return found


def in_instances(function: Any) -> list[tuple[dict[str, Any], str]]:
    """The entries of nn.Module instances, and of dicts they have, that hold `function`: some walks of the heap."""
    holders = gc.get_referrers(function)
    spaces = [holder for holder in holders if type(holder) is dict]
    theirs = _of_instances(spaces)
    found = [vars(holder) for holder in holders if isinstance(holder, nn.Module)]
    found += [space for space in spaces if id(space) in theirs]
    return [(space, name) for space in found for name, value in list(space.items()) if value is function]


def _of_instances(spaces: list[dict[str, Any]], depth: int = 1) -> set[int]:
    """Which of `spaces` an nn.Module has, or a dict that it has, by their ids."""
    if not spaces:
        return set()
    ids, outer, found = set(map(id, spaces)), [], set()
    for owner in gc.get_referrers(*spaces):
        if isinstance(owner, nn.Module):
            found |= ids.intersection(map(id, gc.get_referents(owner)))
        elif depth > 0 and type(owner) is dict:
            outer.append(owner)
    theirs = _of_instances(outer, depth - 1)
    for space in outer:
        if id(space) in theirs:
            found |= ids.intersection(map(id, list(space.values())))
    return found


def names(functions: Iterable[tuple[FunctionType, int]]) -> dict[FunctionType, list[str]]:
    """The modules, classes and functions that hold each of `functions`, given with its `count`.

    Modules of transformers are left out: their names are sites of their own. So are replacements, which hold their
    original. Who is no module is asked of the collector, some tens of milliseconds for all functions together.
    """
    asked = dict(functions)
    found: dict[FunctionType, set[str]] = {function: set() for function in asked}
    if asked:
        for module in _modules():
            for value in list(vars(module).values()):
                if type(value) is FunctionType and value in found:
                    found[value].add(module.__name__)
    others = [function for function, held in asked.items() if held > len(found[function])]
    said = _ask(others) if others else {}
    for function in others:
        found[function] |= said[id(function)]
    return {
        function: sorted(name for name in held if not name.startswith(("transformers", "npu_autopatch.")))
        for function, held in found.items()
    }


def _ask(functions: list[FunctionType]) -> dict[int, set[str]]:
    spaces = {id(vars(module)) for module in _modules()}
    found: dict[int, set[str]] = defaultdict(set)
    seen = {id(functions), *spaces}
    level: dict[int, tuple[Any, set[int]]] = {id(function): (function, {id(function)}) for function in functions}
    for _ in range(_DEPTH):
        things = [thing for thing, _ in level.values()]
        seen |= {id(things), *level}
        following: dict[int, tuple[Any, set[int]]] = {}
        for holder in gc.get_referrers(*things) if things else ():
            if id(holder) in seen:
                continue
            roots = {root for thing in gc.get_referents(holder) for root in level.get(id(thing), (None, ()))[1]}
            if name := _name(holder):
                for root in roots:
                    found[root].add(name)
            elif type(holder) in _CONTAINERS:
                following[id(holder)] = holder, roots
        level = following
    return found


def _name(holder: Any) -> str:
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    return f"{home_of(holder)}.{holder.__qualname__}" if isinstance(holder, FunctionType) and home_of(holder) else ""


def _modules() -> list[ModuleType]:
    """Each module once, whatever it is imported as."""
    return list({id(module): module for module in list(sys.modules.values()) if type(module) is ModuleType}.values())


def _count_alone() -> int:
    """The references to a function that its module alone holds, as `sys.getrefcount` counts them."""
    module = ModuleType("alone")
    exec("def function(): pass", vars(module))
    return sys.getrefcount(vars(module)["function"])


ALONE = _count_alone()
