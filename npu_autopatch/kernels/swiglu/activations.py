"""Which activations are SiLU or gelu: told by what they compute, before any call, from their type at each call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from npu_autopatch.kernels import probing
from npu_autopatch.ops.swiglu import Op, Ops

Select = Callable[[Any], Op | None]
_GELU_TANH = functools.partial(F.gelu, approximate="tanh")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _GELU_TANH}
_kinds: WeakKeyDictionary[Any, str] = WeakKeyDictionary({nn.SiLU: "silu"})
_REACHED = {"silu", "sigmoid", "gelu", "act", "swish"}


def selector(module: ModuleType, ops: Ops) -> Select:
    """The op for an activation as an MLP of `module` may hold it, or None: what is decided at each call.

    Its type must be one of torch, of transformers, or known in `module`; nobody may watch it or have replaced its
    forward.
    """
    types: dict[str, list[type]] = {kind: [] for kind in ("silu", "gelu", "gelu_tanh", "gelu.act", "gelu_tanh.act")}
    for cls in _candidates(module):
        if kind := _kind(cls):
            types[kind].append(cls)
    silus, gelus, tanhs = tuple(types["silu"]), tuple(types["gelu"]), tuple(types["gelu_tanh"])
    gelus_by_act, tanhs_by_act = tuple(types["gelu.act"]), tuple(types["gelu_tanh.act"])
    silu, gelu, gelu_tanh, gelu_traces = ops

    def select(act: Any) -> Op | None:
        cls = type(act)
        if cls in silus:
            op: Op | None = silu
        elif act is F.silu:
            return silu
        elif not gelu_traces and torch.compiler.is_compiling():
            return None
        elif act is F.gelu:
            return gelu
        elif act is _GELU_TANH:
            return gelu_tanh
        elif cls is nn.GELU:
            op = gelu if act.approximate == "none" else gelu_tanh if act.approximate == "tanh" else None
        elif cls in gelus_by_act:
            op = gelu if act.act is F.gelu else None
        elif cls in tanhs_by_act:
            op = gelu_tanh if _is_tanh(act.act) else None
        elif cls in gelus:
            op = gelu
        elif cls in tanhs:
            op = gelu_tanh
        else:
            return None
        if (
            "forward" in act.__dict__
            or act._forward_hooks
            or act._forward_pre_hooks
            or act._backward_hooks
            or act._backward_pre_hooks
        ):
            return None
        return op

    return select


def _is_tanh(act: Any) -> bool:
    return type(act) is functools.partial and act.func is F.gelu and act.keywords == {"approximate": "tanh"}


def _candidates(module: ModuleType) -> Iterator[type[nn.Module]]:
    library = sys.modules.get("transformers.activations")
    values = [nn.SiLU, *(vars(library).values() if library else ()), *vars(module).values()]
    yield from {cls: None for cls in values if isinstance(cls, type) and issubclass(cls, nn.Module)}


def _kind(cls: type[nn.Module]) -> str:
    """Which of the ops a class of activations asks for; empty for none."""
    found = _kinds.get(cls)
    if found is None:
        found = _kinds[cls] = _measured(cls) if _may_activate(cls) else ""
    return found


def _may_activate(cls: type[nn.Module]) -> bool:
    forward, init = cls.forward, cls.__init__
    if cls is nn.GELU or not isinstance(forward, FunctionType) or forward.__code__.co_argcount != 2:
        return False
    plain = init is nn.Module.__init__ or (
        isinstance(init, FunctionType)
        and init.__code__.co_argcount - len(init.__defaults__ or ()) == 1
        and not init.__code__.co_kwonlyargcount
    )
    return plain and len(forward.__code__.co_code) < 200 and bool(_REACHED & set(forward.__code__.co_names))


def _measured(cls: type[nn.Module]) -> str:
    try:
        act = cls()
        settings = probing.settings_of(act)
        if any(True for _ in (*act.parameters(), *act.buffers(), *act.children())) or settings.keys() - {"act"}:
            return ""
        kind = next((kind for kind, function in FUNCTIONS.items() if _same(act, function, exactly=kind != "silu")), "")
    except Exception:  # whatever it is, it is not one of these
        return ""
    if not kind or not settings:
        return kind
    held = settings["act"]
    known = held is F.gelu if kind == "gelu" else kind == "gelu_tanh" and _is_tanh(held)
    return f"{kind}.act" if known else ""


def _same(act: Any, function: Callable[[Tensor], Tensor], exactly: bool) -> bool:
    """Equal to `function` in fp32 and bf16, to the bit if `exactly`, with its gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (1.0, 60.0):
            x = (probing.samples(64) * scale).to(dtype).requires_grad_()
            mine, theirs = act(x), function(x)
            if mine.dtype is not theirs.dtype or mine.shape != theirs.shape:
                return False
            got, right = (torch.autograd.grad(y.sum(), x)[0] for y in (mine, theirs))
            eps = torch.finfo(dtype).eps
            equal = torch.equal(mine, theirs) if exactly else torch.allclose(mine, theirs, rtol=8 * eps, atol=1e-30)
            if not equal or not torch.allclose(got, right, rtol=16 * eps, atol=1e-6):
                return False
    return True
