"""The fused forward of each variant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.kernels.base import renamed
from npu_autopatch.kernels.rms_norm.variant import ACTIVATIONS, Conditions, Variant
from npu_autopatch.ops.legality import FLOATS, PLAIN, transformed
from npu_autopatch.ops.rms_norm import RMSNorm, legal

Norm = Callable[[Any, Tensor, Tensor, float], Tensor]

_NUMBERS = (float, int)
# In the forwards below each condition has a line of its own, by which a trace names the one that decided.


def fused_forward(
    original: FunctionType,
    fallback: Callable[..., Any],
    variant: Variant,
    conditions: Conditions,
    op: RMSNorm,
    devices: tuple[str, ...],
) -> FunctionType:
    """A forward with the signature of `original` that calls `op` where that is legal, and `fallback` elsewhere."""
    parameters = original.__code__.co_varnames[: original.__code__.co_argcount]
    template = _gated if variant.gate else _weighted if variant.weight else _weightless
    attributes, constant = {"weight": variant.weight}, None
    if isinstance(variant.eps, str):
        attributes["eps"] = variant.eps
    else:
        constant = variant.eps
    none_eps = dict(zip(FLOATS, variant.none_eps, strict=True)) if variant.none_eps else None
    forward = template(fallback, variant, conditions.guard(variant), op, devices, none_eps, constant)
    fused = renamed(forward, parameters, attributes)
    functools.update_wrapper(fused, original)
    fused.__defaults__ = original.__defaults__
    return fused


def _norm(variant: Variant, op: RMSNorm) -> Norm:
    """The norm for any pair of dtypes, in the dtype of the original's result."""

    def norm(self: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = variant.result_dtype(x.dtype, weight.dtype)
        gamma = variant.gamma(weight)
        wide = x if dtype is x.dtype else x.float()  # so that the one rounding is the last
        if gamma.dtype is not wide.dtype and gamma.dtype is not torch.float32:
            gamma = gamma.float()
        return op(wide, gamma, eps)[0].to(dtype)

    return norm


def _grouped(variant: Variant, op: RMSNorm) -> Norm:
    """The norm over groups of the last dimension. The op multiplies by one gamma for all: the weight comes after it."""
    one_group, attribute, sizes = _norm(variant, op), variant.groups, variant.groups_are_sizes

    def norm(self: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        number, length = getattr(self, attribute), x.size(-1)
        size = length if number is None else number if sizes else length // number
        if size == length:
            return one_group(self, x, weight, eps)
        split = x.float().unflatten(-1, (-1, size))
        normed = op(split, split.new_ones(size), eps)[0].flatten(-2)
        if variant.rounding == "round_then_mul":
            normed = normed.to(x.dtype)
        return (variant.gamma(weight) * normed).to(variant.result_dtype(x.dtype, weight.dtype))

    return norm


def _weighted(
    original: Any,
    variant: Variant,
    applies: Any,
    op: RMSNorm,
    devices: tuple[str, ...],
    none_eps: Any,
    constant: float | None,
) -> Callable[..., Tensor]:
    norm = _grouped(variant, op) if variant.groups else _norm(variant, op)
    direct = not variant.offset and not variant.groups

    def forward(self, x):  # type: ignore[no-untyped-def]
        if type(x) not in PLAIN:
            return original(self, x)
        if transformed():
            return original(self, x)
        if applies is not None and not applies(self, x):
            return original(self, x)
        weight = self.weight
        if x.device.type not in devices:
            return original(self, x)
        if legal(x, weight):
            eps = self.eps if constant is None else constant
            if eps is None and none_eps is not None:
                eps = none_eps[x.dtype]
            if type(eps) in _NUMBERS and eps >= 0:
                if direct and x.dtype is weight.dtype:
                    return op(x, weight, eps)[0]
                return norm(self, x, weight, eps)
        return original(self, x)

    return forward


def _weightless(
    original: Any,
    variant: Variant,
    applies: Any,
    op: RMSNorm,
    devices: tuple[str, ...],
    none_eps: Any,
    constant: float | None,
) -> Callable[..., Tensor]:
    def forward(self, x):  # type: ignore[no-untyped-def]
        if type(x) not in PLAIN:
            return original(self, x)
        if transformed():
            return original(self, x)
        if applies is not None and not applies(self, x):
            return original(self, x)
        if x.device.type not in devices:
            return original(self, x)
        if x.dtype not in FLOATS:
            return original(self, x)
        if not 1 < x.dim() < 9:
            return original(self, x)
        if x.numel() == 0:
            return original(self, x)
        eps = self.eps if constant is None else constant
        if eps is None and none_eps is not None:
            eps = none_eps[x.dtype]
        if type(eps) in _NUMBERS and eps >= 0:
            return op(x, x.new_ones(x.size(-1)), eps)[0]  # the op insists on a gamma
        return original(self, x)

    return forward


def _gated(
    original: Any,
    variant: Variant,
    applies: Any,
    op: RMSNorm,
    devices: tuple[str, ...],
    none_eps: Any,
    constant: float | None,
) -> Callable[..., Tensor]:
    compute = _gate_first(variant, op) if variant.gate == "pre" else _gate_last(variant, op)

    def forward(self, x, gate):  # type: ignore[no-untyped-def]
        if type(x) not in PLAIN:
            return original(self, x, gate)
        if transformed():
            return original(self, x, gate)
        if applies is not None and not applies(self, x):
            return original(self, x, gate)
        weight = self.weight
        if x.device.type not in devices:
            return original(self, x, gate)
        if not legal(x, weight):
            return original(self, x, gate)
        if type(gate) not in PLAIN:
            return original(self, x, gate)
        if gate.dtype not in FLOATS or gate.shape != x.shape:
            return original(self, x, gate)
        eps = self.eps if constant is None else constant
        if eps is None and none_eps is not None:
            eps = none_eps[x.dtype]
        if type(eps) in _NUMBERS and eps >= 0:
            return compute(self, x, gate, weight, eps)
        return original(self, x, gate)

    return forward


def _wide(variant: Variant, op: RMSNorm) -> Callable[[Any, Tensor, Tensor, float, torch.dtype], Tensor]:
    """The norm of an fp32 `x`, rounded as the original would for an input of `dtype`, but for the last time."""
    early = variant.rounding == "round_then_mul"
    norm = _grouped(variant, op) if variant.groups else _norm(variant, op)

    def wide(self: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        size = x.size(-1)
        if variant.groups and (number := getattr(self, variant.groups)) is not None:
            size = number if variant.groups_are_sizes else size // number
        if not early or size == x.size(-1):
            return norm(self, x, weight.float(), eps)
        split = x.unflatten(-1, (-1, size))
        return weight * op(split, split.new_ones(size), eps)[0].flatten(-2).to(dtype)

    return wide


def _gate_first(variant: Variant, op: RMSNorm) -> Any:
    norm, activation = _wide(variant, op), ACTIVATIONS[variant.activation]

    def compute(self: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = norm(self, x.float() * activation(gate.float()), weight, eps, x.dtype)
        return normed.to(variant.result_dtype(x.dtype, weight.dtype))

    return compute


def _gate_last(variant: Variant, op: RMSNorm) -> Any:
    norm, activation = _wide(variant, op), ACTIVATIONS[variant.activation]
    plain = _norm(variant, op) if not variant.groups and variant.rounding == "round_then_mul" else None

    def compute(self: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = plain(self, x, weight, eps) if plain is not None else norm(self, x.float(), weight, eps, x.dtype)
        return (normed * activation(gate.float())).to(x.dtype)

    return compute
