"""The variants of an RMS norm, and the fused forward of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.kernels.base import renamed
from npu_autopatch.ops.rms_norm import FLOATS, PLAIN, RMSNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
Norm = Callable[[Any, Tensor, Tensor, float], Tensor]

_NUMBERS = (float, int)
_MISSING = object()


@dataclass(frozen=True)
class Variant:
    """The exact semantics of one norm.

    `rounding` says where it rounds for a half input: ``round_then_mul`` (before the weight), ``fp32_mul`` (after
    it), ``t5`` (before it, to the weight's dtype) or ``no_upcast`` (after every step). `weight` is an attribute,
    empty if there is none; `offset` is what is added to it, in fp32 unless `offset_rounded`. `eps` is an attribute
    or a constant. `gate` is ``post`` or ``pre`` the norm, with its `activation`. `groups` is the attribute that holds
    the number of groups, or their size if `groups_are_sizes`. `none_eps`, where eps may be None, is what that stands for in each of `FLOATS`.
    """

    rounding: str
    weight: str = ""
    offset: int = 0
    offset_rounded: bool = False
    eps: str | float = 0.0
    gate: str = ""
    activation: str = ""
    groups: str = ""
    groups_are_sizes: bool = False
    none_eps: tuple[float, ...] = ()

    def but(self, **changes: Any) -> Variant:
        """This variant with some fields changed."""
        return replace(self, **changes)

    @functools.cached_property
    def form(self) -> Variant:
        """What it computes, whatever its attributes are called."""
        return self.but(weight=self.weight and "weight", eps=0.0, none_eps=(), groups=self.groups and "groups")

    def __str__(self) -> str:
        if self.gate:
            return f"gated_{self.gate}_{self.activation}" + ("_grouped" if self.groups else "")
        if not self.weight:
            return "weightless"
        return ("one_plus" if self.offset else self.rounding) + ("_grouped" if self.groups else "")

    def gamma(self, weight: Tensor) -> Tensor:
        """What the normalised values are multiplied by."""
        if not self.offset:
            return weight
        return (1.0 + weight).float() if self.offset_rounded else 1.0 + weight.float()

    def result_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype of the original's result, before a gate."""
        if self.rounding == "fp32_mul":
            return x
        if self.rounding == "t5" and weight is not torch.float32:
            return weight
        return torch.promote_types(x, torch.float32 if self.offset and not self.offset_rounded else weight)


@dataclass(frozen=True)
class Conditions:
    """What an instance must be like for its class's proof to hold.

    `pinned` attributes have the proved value, `sizes` are the last dimension, or a tuple of it, `methods` are not overridden by a
    subclass; `ranks` are those the original treats alike, and a dimension of length one too if `unit_length`.
    """

    pinned: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    methods: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = tuple(range(2, 9))
    unit_length: bool = True

    def guard(self, variant: Variant) -> Callable[[Any, Tensor], bool] | None:
        """The test at each call; None where nothing needs one."""
        pinned, sizes, methods = tuple(self.pinned.items()), self.sizes, tuple(self.methods.items())
        ranks = self.ranks if self.ranks != Conditions.ranks or not self.unit_length else None
        unit_length = self.unit_length
        # autocast takes pow and rsqrt to fp32, which shows where the original did not go there itself
        autocast = variant.rounding == "no_upcast"
        if not (pinned or sizes or methods or ranks or autocast):
            return None

        def applies(self: Any, x: Tensor) -> bool:
            for name, value in pinned:
                found = getattr(self, name, _MISSING)
                if type(found) is not type(value) or found != value:
                    return False
            for name in sizes:
                found = getattr(self, name, _MISSING)
                if found != x.shape[-1:] and (found,) != x.shape[-1:]:
                    return False
            for name, method in methods:
                if getattr(type(self), name, None) is not method:
                    return False
            if ranks is not None and (x.dim() not in ranks or not unit_length and x.size(-2) == 1):
                return False
            return not (autocast and torch.is_autocast_enabled(x.device.type))

        return applies


def fused_forward(
    original: FunctionType, fallback: FunctionType, variant: Variant, conditions: Conditions, op: RMSNorm, devices: tuple[str, ...]
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
    forward = renamed(forward, parameters, attributes)
    functools.update_wrapper(forward, original)
    forward.__defaults__ = original.__defaults__
    return forward


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
    original: Any, variant: Variant, applies: Any, op: RMSNorm, devices: tuple[str, ...], none_eps: Any, constant: float | None
) -> FunctionType:
    norm = _grouped(variant, op) if variant.groups else _norm(variant, op)
    direct = not variant.offset and not variant.groups

    def forward(self, x):  # type: ignore[no-untyped-def]
        if type(x) not in PLAIN or (applies is not None and not applies(self, x)):
            return original(self, x)
        weight = self.weight
        if (
            type(weight) in PLAIN
            and x.device.type in devices
            and x.dtype in FLOATS
            and weight.dtype in FLOATS
            and 1 < x.dim() < 9
            and x.size(-1) == weight.numel()
            and x.numel() > 0
            and weight.device == x.device
        ):
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
    original: Any, variant: Variant, applies: Any, op: RMSNorm, devices: tuple[str, ...], none_eps: Any, constant: float | None
) -> FunctionType:
    def forward(self, x):  # type: ignore[no-untyped-def]
        if (
            type(x) in PLAIN
            and x.device.type in devices
            and x.dtype in FLOATS
            and 1 < x.dim() < 9
            and x.numel() > 0
            and (applies is None or applies(self, x))
        ):
            eps = self.eps if constant is None else constant
            if eps is None and none_eps is not None:
                eps = none_eps[x.dtype]
            if type(eps) in _NUMBERS and eps >= 0:
                return op(x, x.new_ones(x.size(-1)), eps)[0]  # the op insists on a gamma
        return original(self, x)

    return forward


def _gated(
    original: Any, variant: Variant, applies: Any, op: RMSNorm, devices: tuple[str, ...], none_eps: Any, constant: float | None
) -> FunctionType:
    compute = _gate_first(variant, op) if variant.gate == "pre" else _gate_last(variant, op)

    def forward(self, x, gate):  # type: ignore[no-untyped-def]
        if type(x) not in PLAIN or (applies is not None and not applies(self, x)):
            return original(self, x, gate)
        weight = self.weight
        if (
            type(weight) in PLAIN
            and type(gate) in PLAIN
            and x.device.type in devices
            and x.dtype in FLOATS
            and weight.dtype in FLOATS
            and gate.dtype in FLOATS
            and 1 < x.dim() < 9
            and x.size(-1) == weight.numel()
            and x.numel() > 0
            and weight.device == x.device
            and gate.shape == x.shape
        ):
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
