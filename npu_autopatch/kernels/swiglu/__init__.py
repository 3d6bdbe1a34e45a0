"""Gated MLPs, ``down(act(gate(x)) * up(x))``: found and proved by what their forward calls with what.

A class is looked at where its forward takes one input, multiplies, and calls attributes. What it does with them, a
trace says that needs no instance: so attribute names, constructors and configurations decide nothing.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.swiglu.activations import selector
from npu_autopatch.kernels.swiglu.forward import fused_forward
from npu_autopatch.kernels.swiglu.probe import recognise, traced
from npu_autopatch.kernels.swiglu.proof import Proof
from npu_autopatch.kernels.swiglu.trace import NotGated, Unproved
from npu_autopatch.ops import swiglu as ops


class SwiGLUKernel:
    """Replaces the forward of gated MLPs by one that multiplies and activates in `npu_swiglu` or `npu_geglu`."""

    name = "swiglu"

    def missing(self) -> str:
        return ops.capability().missing

    def find(self, module: ModuleType) -> Iterator[Site]:
        """The classes of `module` whose forward multiplies as a gated MLP does, and those that are called one."""
        for cls in probing.classes(module):
            # The name only earns a class a line in the report that says why it is none.
            if _may_be_gated(cls) and (_is_called_one(cls) or _gates(cls)):
                yield Site(module.__name__, site_name(module.__name__, cls.__name__), cls, "forward")

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """The fused forward of the class, for whatever activation its instances hold."""
        cls, original = site.owner, site.owner.forward
        if reason := _beyond_torch(original):
            return Refusal(reason)
        try:
            variant = recognise(cls, original)
            Proof(cls, original, variant).prove()
        except Unproved as unproved:
            return Refusal(str(unproved))
        available = ops.op()
        select = selector(sys.modules[cls.__module__], available)
        return Match(str(variant), fused_forward(original, original, variant, select, available, devices))


KERNEL = SwiGLUKernel()

_MULTIPLIES = {"BINARY_MULTIPLY", "INPLACE_MULTIPLY"}  # up to Python 3.10; an argument of BINARY_OP since
_TIMES = {5, 18}
_ATTR_CALLS = sys.version_info >= (3, 12)  # LOAD_ATTR says by its lowest bit that a method is called


def _may_be_gated(cls: Any) -> bool:
    """Whether the code of the class's own forward can be that of a gated MLP."""
    forward = vars(cls).get("forward")
    if not isinstance(forward, FunctionType):
        return False
    code = forward.__code__
    if code.co_argcount not in (2, 3) or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return False
    if (forward.__defaults__ or ()) != (None,) * (code.co_argcount - 2):
        return False
    return _multiplies(code) and len(_called(cls, forward)) > 1


def _is_called_one(cls: type[nn.Module]) -> bool:
    return any(word in cls.__name__.lower() for word in ("mlp", "glu", "feedforward", "ffn"))


def _gates(cls: Any) -> bool:
    """Whether its forward, run on parts, gets as far as a product."""
    if _beyond_torch(cls.forward):
        return False
    try:
        traced(cls, cls.forward)
    except NotGated:
        return False
    except Unproved:
        pass
    return True


def _beyond_torch(forward: FunctionType) -> str:
    """What it calls or reads that is not torch's: one run does not show all that this may do."""
    scope = forward.__globals__
    others = [name for name in forward.__code__.co_names if name in scope and not _of_torch(scope[name])]
    return f"its forward uses {', '.join(others)}, of which a probe shows one case only" if others else ""


def _of_torch(value: object) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
    return name.partition(".")[0] == "torch"


def _called(cls: Any, forward: FunctionType) -> set[str]:
    """The names it calls methods by that are neither a tensor's, nor torch's, nor the class's: its modules."""
    code, scope = forward.__code__, forward.__globals__
    places = range(0, len(code.co_code), 2)
    names = set()
    for place in places:
        name, argument = dis.opname[code.co_code[place]], code.co_code[place + 1]
        if name == "LOAD_METHOD":
            names.add(code.co_names[argument])
        elif name == "LOAD_ATTR" and _ATTR_CALLS and argument & 1:
            names.add(code.co_names[argument >> 1])
    return {
        name for name in names if name not in scope and not any(hasattr(of, name) for of in (Tensor, F, torch, cls))
    }


def _multiplies(code: CodeType) -> bool:
    """Whether it multiplies, and neither loops nor catches anything."""
    found = False
    for place in range(0, len(code.co_code), 2):
        name = dis.opname[code.co_code[place]]
        if name == "FOR_ITER" or "BACKWARD" in name or name.startswith(("SETUP_", "BEFORE_")):
            return False
        found = found or name in _MULTIPLIES or (name == "BINARY_OP" and code.co_code[place + 1] in _TIMES)
    return found and not getattr(code, "co_exceptiontable", b"")
