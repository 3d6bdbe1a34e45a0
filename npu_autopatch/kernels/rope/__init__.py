"""Rotary functions: found and proved by what they return.

A function is looked at where it takes three to six arguments and puts tensors together. Whether it rotates some of
them by the others, and how, its outputs on random inputs say. The proof proper runs the replacement itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.rope.probe import Probe, Unproved
from npu_autopatch.kernels.rope.replacement import Roles, fused_function, ours_undone
from npu_autopatch.kernels.rope.variant import Variant
from npu_autopatch.ops import rotary as ops

_JOINS = {"cat", "stack", "view_as_complex", "concat", "concatenate"}
# a function that names one of these does more than compute: a probe may not call it
_EFFECTS = {"distributed", "dist", "all_gather", "all_reduce", "barrier", "print", "open", "exec", "system", "backward"}


class RopeKernel:
    """Replaces rotary functions by `npu_rotary_mul`."""

    name = "rope"

    def missing(self) -> str:
        return ops.capability().missing

    def find(self, module: ModuleType) -> Iterator[Site]:
        """The functions in the namespace of `module` that rotate, its own and those it imported."""
        made = set()  # classes of decorated functions, which may have two names
        for name, value in list(vars(module).items()):
            # The name only earns a function a line in the report that says why it is none.
            called_so = any(word in name.lower() for word in ("rot", "rope")) and not isinstance(value, type)
            function = _function(value)
            if function is None or _not_a_rotation(function):
                by_angles = function is not None and function.__code__.co_argcount > 1  # or else half of a rotation
                stranger = callable(value) and not isinstance(value, nn.Module) and not _at_home(value, module)
                if not called_so or not (by_angles or stranger):
                    continue
            elif not called_so and isinstance(_case(value, function), str):
                continue
            if not isinstance(value, nn.Module):
                yield Site(module.__name__, site_name(module.__name__, name), module, name)
            elif type(value) not in made:
                made.add(type(value))
                yield Site(module.__name__, site_name(module.__name__, name), type(value), "forward")

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """The fused function of the variant that is proved."""
        original = ours_undone(getattr(site.owner, site.attribute))
        if not isinstance(original, FunctionType):
            return Refusal(f"it is a {type(original).__name__}, not a plain function")
        rotary = site.owner() if isinstance(site.owner, type) else original
        function = _function(rotary)
        if function is None or (reason := _not_a_rotation(function)):
            return Refusal(reason if function is not None else "what it calls is not a plain function")
        case = _case(rotary, function)
        if isinstance(case, str):
            return Refusal(case)
        roles, variant = case
        fused = fused_function(original, inspect.signature(original), roles, variant, ops.op(), devices)
        return Match(str(variant), fused)


KERNEL = RopeKernel()


def _function(value: Any) -> FunctionType | None:
    """The original function a name of a module stands for.

    Where the package kernels is installed, a decorated function is an instance of a class made for it alone, whose
    forward calls the function: that class is patched, as its instance is what others hold.
    """
    if isinstance(value, FunctionType):
        return cast(FunctionType, ours_undone(value))
    if isinstance(value, nn.Module) and isinstance(type(value).forward, FunctionType):
        forward = cast(FunctionType, ours_undone(type(value).forward))
        closure = inspect.getclosurevars(forward).nonlocals if hasattr(forward, "__signature__") else {}
        found = list(closure.values())
        if len(found) == 1 and isinstance(found[0], FunctionType):
            return found[0]
    return None


def _at_home(value: Any, module: ModuleType) -> bool:
    """Whether a callable comes from the module itself, from transformers or from remote code."""
    home = getattr(ours_undone(value), "__globals__", {}).get("__name__", "")
    return bool(home == module.__name__ or home.startswith("transformers"))


def _not_a_rotation(function: FunctionType) -> str:
    """Why the code of a function cannot be that of a rotation by tables; empty if it can."""
    code = function.__code__
    if not 3 <= code.co_argcount + code.co_kwonlyargcount <= 8:
        return f"it takes {inspect.signature(function)}, not inputs and a cos and sin"
    names = probing.reached(function)
    if effects := sorted(names & _EFFECTS):
        return f"it does more than compute ({', '.join(effects)}), so no probe may call it"
    return "" if names & _JOINS else "it puts no tensors together, as a rotation does"


def _case(rotary: Callable[..., Any], function: FunctionType) -> tuple[Roles, Variant] | str:
    """The proved roles and variant, or why there are none.

    Few codes make all the rotary functions there are: each is proved once in a process.
    """
    code = probing.code_of(function)
    if code is not None and code in _proved:
        return _proved[code]
    case: tuple[Roles, Variant] | str
    try:
        case = Probe(rotary, inspect.signature(function)).case()
    except Unproved as unproved:
        case = str(unproved)
    if code is not None:
        _proved[code] = case
    return case


_proved: dict[tuple[Any, ...], tuple[Roles, Variant] | str] = {}
