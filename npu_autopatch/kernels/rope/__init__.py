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
from npu_autopatch.kernels.rope.replacement import Roles, fused_function
from npu_autopatch.kernels.rope.variant import Variant
from npu_autopatch.ops import rotary as ops

_JOINS = {"cat", "stack", "view_as_complex", "concat", "concatenate"}


class RopeKernel:
    """Replaces rotary functions by `npu_rotary_mul`."""

    name = "rope"

    def missing(self) -> str:
        return ops.capability().missing

    def find(self, module: ModuleType) -> Iterator[Site]:
        """The functions in the namespace of `module` that rotate, and those that are called so."""
        for name, value in list(vars(module).items()):
            function = _function(value)
            if function is None or not _may_rotate(function):
                continue
            # The name only earns a function a line in the report that says why it is none.
            if "rot" not in name.lower() and not _rotates(value):
                continue
            owner, attribute = (module, name) if isinstance(value, FunctionType) else (type(value), "forward")
            yield Site(module.__name__, site_name(module.__name__, name), owner, attribute)

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """The fused function of the variant that is proved."""
        slot = getattr(site.owner, site.attribute)
        original = inspect.unwrap(slot, stop=lambda function: not hasattr(function, "__npu_autopatch__"))
        in_class = isinstance(site.owner, type)
        function = cast(type[nn.Module], site.owner)() if in_class else original
        signature = inspect.signature(original)
        case = _case(function, _function(function))
        if isinstance(case, str):
            return Refusal(case)
        roles, variant = case
        return Match(str(variant), fused_function(original, signature, roles, variant, ops.op(), devices))


KERNEL = RopeKernel()


def _function(value: Any) -> FunctionType | None:
    """The function a name of a module stands for.

    Where the package kernels is installed, a decorated function is an instance of a class made for it alone, whose
    forward calls the function: that class is patched, as its instance is what others hold.
    """
    if isinstance(value, FunctionType):
        return value
    if isinstance(value, nn.Module) and isinstance(forward := type(value).forward, FunctionType):
        forward = inspect.unwrap(forward, stop=lambda function: not hasattr(function, "__npu_autopatch__"))
        cells = [cell.cell_contents for cell in forward.__closure__ or ()]
        if len(cells) == 1 and isinstance(cells[0], FunctionType) and hasattr(forward, "__signature__"):
            return cells[0]
    return None


def _may_rotate(function: FunctionType) -> bool:
    code = inspect.unwrap(function).__code__
    if not 3 <= code.co_argcount + code.co_kwonlyargcount <= 8:
        return False
    names, _ = probing.operations(object, inspect.unwrap(function))
    return bool(names & _JOINS)


def _case(rotary: Callable[..., Any], function: FunctionType | None) -> tuple[Roles, Variant] | str:
    """The proved roles and variant, or why there are none.

    Few codes make all the rotary functions there are: each is proved once in a process.
    """
    code = probing.code_of(function) if function is not None else None
    if code is not None and code in _proved:
        return _proved[code]
    case: tuple[Roles, Variant] | str
    try:
        case = Probe(rotary, inspect.signature(function or rotary)).case()
    except Unproved as unproved:
        case = str(unproved)
    if code is not None:
        _proved[code] = case
    return case


_proved: dict[tuple[Any, ...], tuple[Roles, Variant] | str] = {}


def _rotates(function: Callable[..., Any]) -> bool:
    try:
        Probe(function, inspect.signature(function)).form()
    except Unproved:
        return False
    return True
