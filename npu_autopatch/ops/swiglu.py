"""`npu_swiglu` and `npu_geglu`: whether they can be called, what is legal, and what they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.ops.capability import Capability, detect
from npu_autopatch.ops.legality import FLOATS, PLAIN

Op = Callable[[Tensor, bool], Tensor]


class Ops(NamedTuple):
    """The ops by activation: ``(both halves along the last dimension, whether the first is activated) -> product``.

    None where there is no such op. `silu` copies its input if the second half is activated. `gelu_traces` says whether
    the two for gelu may be called where a compiler traces.
    """

    silu: Op
    gelu: Op | None
    gelu_tanh: Op | None
    gelu_traces: bool = True


def capability() -> Capability:
    """Whether `npu_swiglu` can be called here, with a gradient."""
    return _with_gradient(detect("npu_swiglu", ("dim",)))


def geglu_capability() -> Capability:
    """Whether `npu_geglu` can be called here, with a gradient; without it only SiLU is fused."""
    return _with_gradient(detect("npu_geglu", ("dim", "approximate", "activate_left")))


@functools.cache
def geglu_traces() -> bool:
    """Whether a compiler can trace the gradient of `npu_geglu`: the Meta kernel of torch_npu 2.13 only raises."""
    half, whole = torch.empty(1, device="meta"), torch.empty(2, device="meta")
    try:
        torch.ops.npu.npu_geglu_grad.default(half, whole, half, -1, 0, True)
    except (RuntimeError, TypeError):
        return False
    return True


def _with_gradient(found: Capability) -> Capability:
    if found.available and not found.differentiable:
        return Capability(found.op, f"{found.op} of this torch_npu has no gradient", False)
    return found


@functools.cache
def _swiglu() -> Op:
    overload = torch.ops.npu.npu_swiglu.default

    def swiglu(halves: Tensor, first: bool) -> Tensor:
        if not first:
            up, gate = halves.chunk(2, -1)
            halves = torch.cat((gate, up), -1)
        activated: Tensor = overload(halves.contiguous(), -1)
        return activated

    return swiglu


@functools.cache
def _geglu(approximate: int) -> Op:
    overload = torch.ops.npu.npu_geglu.default

    def geglu(halves: Tensor, first: bool) -> Tensor:
        activated: Tensor = overload(halves.contiguous(), -1, approximate, first)[0]
        return activated

    return geglu


@functools.cache
def op() -> Ops:
    """The ops of this process; asked for once `npu_swiglu` is there, and what comes with it."""
    if not geglu_capability().available:
        return Ops(_swiglu(), None, None)
    return Ops(_swiglu(), _geglu(0), _geglu(1), geglu_traces())


def legal(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether the ops take `gate` and `up` side by side, on the device of the plain `x`: forward and backward."""
    return (
        type(gate) in PLAIN
        and type(up) in PLAIN
        and gate.dtype in FLOATS
        and gate.dtype is up.dtype
        and gate.shape == up.shape
        and 0 < gate.dim() < 9
        and gate.numel() > 0
        and gate.device == x.device
        and up.device == x.device
    )


def legal_halves(x: Tensor, halves: Tensor) -> bool:
    """Whether the ops take `halves`, on the device of the plain `x`: forward and backward."""
    return (
        type(halves) in PLAIN
        and halves.dtype in FLOATS
        and 0 < halves.dim() < 9
        and halves.numel() > 0
        and halves.size(-1) % 2 == 0
        and halves.device == x.device
    )


def _reference(activation: Callable[[Tensor], Tensor]) -> Op:
    def product(halves: Tensor, first: bool) -> Tensor:
        left, right = halves.float().chunk(2, -1)
        gate, up = (left, right) if first else (right, left)
        return (activation(gate) * up).to(halves.dtype)

    return product


# What the ops compute, in torch: fp32 inside, one rounding at the end.
REFERENCE = Ops(
    _reference(F.silu),
    _reference(F.gelu),
    _reference(functools.partial(F.gelu, approximate="tanh")),
)
