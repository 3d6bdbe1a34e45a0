"""The forwards that run stacked experts as grouped products, or the gate between batched ones in one op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from npu_autopatch.kernels.base import renamed
from npu_autopatch.kernels.moe.experts import Select
from npu_autopatch.kernels.moe.stacked.gate import Gate, middle
from npu_autopatch.kernels.moe.stacked.layout import Layout, Sizes
from npu_autopatch.ops import token_permute
from npu_autopatch.ops.grouped_matmul import Ops, legal
from npu_autopatch.ops.legality import FLOATS, PLAIN, autocasting, transformed


@dataclass(frozen=True)
class Variant:
    """What a forward of stacked experts computes.

    `inputs` are the places of hidden states, expert ids and routing weights among its arguments, of which there are
    none but the first where each expert has its own tokens already (`batched`). Routing weights are `dense`, for every
    expert of a token, or for its ids only; fp32 ones go with any dtype if they may be `mixed`. Hidden states have one
    of the `ranks`; of rank 2 they come back as ``[tokens, 1, hidden]`` if it `unsqueezes`. An id that is the number of
    experts names none if `masked`. `sizes` are attributes that must be a size of the weights, `fixed` those that must
    have the value they were proved with; `bypassed` are children that are not called, with their types.
    """

    layout: Layout
    gate: Gate
    inputs: tuple[int, ...] = (0,)
    dense: bool = False
    mixed: bool = False
    ranks: tuple[int, ...] = (2,)
    unsqueezes: bool = False
    masked: bool = False
    sizes: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()
    bypassed: tuple[tuple[str, type], ...] = ()

    @property
    def batched(self) -> bool:
        return len(self.inputs) == 1

    def but(self, **changes: Any) -> Variant:
        return replace(self, **changes)

    def __str__(self) -> str:
        words = ["dense" * self.dense, "identity" * self.layout.identity, "bias" * bool(self.layout.first_bias)]
        products = "batched" if self.batched else "stacked"
        return "+".join((f"{products}, {self.gate}", *filter(None, words)))


class Held(NamedTuple):
    """The weights of one call, each of rank 3."""

    holder: Any
    first: Tensor
    second: Tensor | None
    down: Tensor
    first_bias: Tensor | None
    down_bias: Tensor | None


def fused_forward(
    original: FunctionType, fallback: Callable[..., Any], variant: Variant, select: Select, ops: Ops, devices: Any
) -> FunctionType:
    """A forward with the signature of `original` that fuses what it may, and else calls `fallback`."""
    code = original.__code__
    compute = _batched(variant, select, devices) if variant.batched else _routed(variant, select, ops, devices)
    template = _TEMPLATES[code.co_argcount - 1](compute, fallback)
    forward = renamed(template, code.co_varnames[: code.co_argcount], {})
    functools.update_wrapper(forward, original)
    forward.__defaults__ = original.__defaults__
    return forward


Compute = Callable[[Any, tuple[Any, ...]], "Tensor | None"]


def _one(compute: Compute, original: Any) -> Any:
    def forward(self, a):  # type: ignore[no-untyped-def]
        fused = compute(self, (a,))
        return original(self, a) if fused is None else fused

    return forward


def _three(compute: Compute, original: Any) -> Any:
    def forward(self, a, b, c):  # type: ignore[no-untyped-def]
        fused = compute(self, (a, b, c))
        return original(self, a, b, c) if fused is None else fused

    return forward


def _four(compute: Compute, original: Any) -> Any:
    def forward(self, a, b, c, d):  # type: ignore[no-untyped-def]
        fused = compute(self, (a, b, c, d))
        return original(self, a, b, c, d) if fused is None else fused

    return forward


_TEMPLATES = {1: _one, 3: _three, 4: _four}


def _routed(variant: Variant, select: Select, ops: Ops, devices: tuple[str, ...]) -> Compute:
    permute, unpermute, counts_of, grouped_linear, _, traces = ops
    at_x, at_ids, at_weights = variant.inputs
    dense, mixed, ranks, unsqueezes = variant.dense, variant.mixed, variant.ranks, variant.unsqueezes
    layout, past = variant.layout, variant.masked or variant.layout.identity
    first_transposed, down_transposed, identity = layout.first_transposed, layout.down_transposed, layout.identity
    held, between = _reader(variant), middle(variant.gate, select)

    def routed(self: Any, arguments: tuple[Any, ...]) -> Tensor | None:
        x, ids, weights = arguments[at_x], arguments[at_ids], arguments[at_weights]
        if not _plain(x, devices) or type(ids) not in PLAIN or type(weights) not in PLAIN or x.dim() not in ranks:
            return None
        stacked = held(self, x)
        if stacked is None:
            return None
        if not traces and torch.is_grad_enabled() and torch.compiler.is_compiling():
            return None
        holder, first, second, down, first_bias, down_bias = stacked
        count, hidden = down.size(0), x.size(-1)
        if (
            not token_permute.legal(x, ids, None if dense else weights)
            or ids.dtype is not torch.int64  # one_hot takes no other, nor gather
            or ids.size(0) * hidden != x.numel()
            or (dense and not _legal_dense(x, weights, ids.size(0), count))
            or not (weights.dtype is x.dtype or (mixed and weights.dtype is torch.float32))
        ):
            return None
        tokens = x.reshape(-1, hidden)
        rows, order = permute(tokens, ids)
        counts = counts_of(ids, count)
        tail = torch.arange(rows.size(0), device=x.device).unsqueeze(1) >= counts.sum() if past else None
        # what the identity experts have of the first weight is of no use, and stays where it is
        counted = functional.pad(counts, (0, first.size(0) - count)) if identity else counts
        made = grouped_linear(rows, first, counted, first_bias, first_transposed, tail)
        other = None if second is None else grouped_linear(rows, second, counts, None, first_transposed, tail)
        rows = grouped_linear(between(self, holder, made, other), down, counts, down_bias, down_transposed, tail)
        if dense:
            weights = weights.gather(1, ids.clamp(max=count - 1) if past else ids)
        result = unpermute(rows, order, weights)
        if identity:
            kept = weights.masked_fill(ids < count, 0).sum(1, keepdim=True)
            result = result + (tokens * kept).to(tokens.dtype)
        return result.view(x.size(0), -1, hidden) if unsqueezes else result.view(x.shape)

    return routed


def _batched(variant: Variant, select: Select, devices: tuple[str, ...]) -> Compute:
    """Each expert has as many tokens as another: bmm is their grouped product, and better, with torch's gradients."""
    layout, gate = variant.layout, variant.gate
    first_transposed, down_transposed = layout.first_transposed, layout.down_transposed
    held, between = _reader(variant), middle(gate, select)

    def batched(self: Any, arguments: tuple[Any, ...]) -> Tensor | None:
        x = arguments[0]
        if not _plain(x, devices) or x.dim() != 2 or x.dtype not in FLOATS or x.numel() == 0:
            return None
        stacked = held(self, x)
        if stacked is None or select(getattr(stacked.holder if gate.held else self, gate.act)) is None:
            return None
        holder, first, _, down, _, _ = stacked
        rows = x.view(first.size(0), -1, x.size(-1))
        made = torch.bmm(rows, first if first_transposed else first.transpose(1, 2))
        made = between(self, holder, made, None)
        return torch.bmm(made, down if down_transposed else down.transpose(1, 2)).view(-1, x.size(-1))

    return batched


def _plain(x: Any, devices: tuple[str, ...]) -> bool:
    return type(x) in PLAIN and x.device.type in devices and not transformed() and not autocasting(x)


def _legal_dense(x: Tensor, weights: Tensor, tokens: int, experts: int) -> bool:
    return weights.dtype in FLOATS and weights.device == x.device and weights.shape == (tokens, experts)


def _reader(variant: Variant) -> Callable[[Any, Tensor], Held | None]:
    """The function that reads the weights of a call, each once; None where they are not what the op takes."""
    layout, sizes, fixed, bypassed = variant.layout, variant.sizes, variant.fixed, variant.bypassed
    child, flattened, identity = layout.holder, layout.flattened, layout.identity
    in_axis = 1 if layout.first_transposed else 2
    inner_axis = 1 if layout.down_transposed else 2

    def held(self: Any, x: Tensor) -> Held | None:
        holder = getattr(self, child) if child else self
        if "parametrizations" in holder._modules:
            return None
        for name, kind in bypassed:
            module = cast(nn.Module, getattr(self, name))
            if (
                type(module) is not kind
                or "forward" in module.__dict__
                or module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                return None
        for name, value in fixed:
            if getattr(self, name) is not value and (value is None or getattr(self, name) != value):
                return None
        first, down = getattr(holder, layout.first), getattr(holder, layout.down)
        second = getattr(holder, layout.second) if layout.second else None
        first_bias = getattr(holder, layout.first_bias) if layout.first_bias else None
        down_bias = getattr(holder, layout.down_bias) if layout.down_bias else None
        if (
            not legal(x, first, first_bias)
            or not legal(x, down, down_bias)
            or (layout.first_bias and (first_bias is None or down_bias is None))
            or (second is not None and not legal(x, second))
        ):
            return None
        if flattened:
            experts = getattr(self, flattened)
            if first.dim() != 2 or first.size(0) % experts or down.shape != first.shape:
                return None
            first = first.view(experts, -1, first.size(1))
            down = down.view(experts, -1, down.size(1))
            second = None if second is None else second.view(experts, -1, second.size(1))
        if (
            first.dim() != 3
            or down.dim() != 3
            or first.size(in_axis) != x.size(-1)
            or (first.size(0) != down.size(0) and not identity)
            or (second is not None and second.shape != first.shape)
        ):
            return None
        if sizes:
            measured = Sizes(down.size(0), first.size(0), x.size(-1), down.size(inner_axis))
            for name, size in sizes:
                if getattr(self, name) != getattr(measured, size):
                    return None
        return Held(holder, first, second, down, first_bias, down_bias)

    return held
