"""The fused forward: one template for two projections, one for a single one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.kernels.base import renamed
from npu_autopatch.kernels.swiglu.activations import FUNCTIONS, Select
from npu_autopatch.kernels.swiglu.variant import Variant
from npu_autopatch.ops.legality import PLAIN, transformed
from npu_autopatch.ops.swiglu import Ops, legal, legal_halves


def fused_forward(
    original: FunctionType,
    fallback: Callable[..., Any],
    variant: Variant,
    select: Select,
    ops: Ops,
    devices: tuple[str, ...],
) -> FunctionType:
    """A forward with the signature of `original` that fuses what `select` has an op for, and else calls `fallback`."""
    parameters = original.__code__.co_varnames[: original.__code__.co_argcount]
    attributes = dict(zip(("first", "second"), variant.projections, strict=False))
    attributes |= {"act": variant.activation, "down": variant.after[0]}
    template = _separate if variant.separate else _single
    forward = renamed(template(fallback, variant, select, ops, devices), parameters[:2], attributes)
    if variant.option:
        forward = renamed(_with_option(fallback, forward), parameters, {})
    functools.update_wrapper(forward, original)
    forward.__defaults__ = original.__defaults__
    return forward


def _separate(
    original: Any, variant: Variant, select: Select, ops: Ops, devices: tuple[str, ...]
) -> Callable[..., Tensor]:
    gate_first, ranks, product, finish = variant.gate == 0, variant.ranks, _product(variant), _finish(variant)
    function = FUNCTIONS.get(variant.function)

    def forward(self, x):  # type: ignore[no-untyped-def]
        # Without a gradient the copy that puts the two side by side moves more bytes than the fused op saves.
        if (
            type(x) not in PLAIN
            or transformed()
            or not torch.is_grad_enabled()
            or x.device.type not in devices
            or (ranks and x.dim() not in ranks)
        ):
            return original(self, x)
        act = self.act if function is None else function
        op = select(act)
        if op is None:
            return original(self, x)
        first, second = self.first(x), self.second(x)  # a merged projection would enter here, and give both as one
        gate, up = (first, second) if gate_first else (second, first)
        if legal(x, gate, up) and (gate.requires_grad or up.requires_grad):
            multiplied = op(torch.cat((gate, up), -1), True)
        else:
            multiplied = product(act, gate, up)
        return self.down(multiplied) if finish is None else finish(self, multiplied)

    return forward


def _single(
    original: Any, variant: Variant, select: Select, ops: Ops, devices: tuple[str, ...]
) -> Callable[..., Tensor]:
    gate_first, ranks, product, finish = variant.gate == 0, variant.ranks, _product(variant), _finish(variant)
    function = FUNCTIONS.get(variant.function)
    copying = None if gate_first else ops.silu  # pays under gradients only, as in `_separate`
    split = _viewed if variant.viewed else _chunked

    def forward(self, x):  # type: ignore[no-untyped-def]
        if type(x) not in PLAIN or transformed() or x.device.type not in devices or (ranks and x.dim() not in ranks):
            return original(self, x)
        act = self.act if function is None else function
        op = select(act)
        if op is None or (op is copying and not torch.is_grad_enabled()):
            return original(self, x)
        halves = self.first(x)
        if legal_halves(x, halves) and (op is not copying or halves.requires_grad):
            multiplied = op(halves, gate_first)
        else:
            left, right = split(halves)
            multiplied = product(act, left, right) if gate_first else product(act, right, left)
        return self.down(multiplied) if finish is None else finish(self, multiplied)

    return forward


def _with_option(original: Any, fused: Any) -> Callable[..., Tensor]:
    def forward(self, x, option=None):  # type: ignore[no-untyped-def]
        return fused(self, x) if option is None else original(self, x, option)

    return forward


def _chunked(halves: Tensor) -> tuple[Tensor, ...]:
    return halves.chunk(2, -1)


def _viewed(halves: Tensor) -> tuple[Tensor, ...]:
    batch, length, _ = halves.shape
    return halves.view(batch, length, 2, -1).unbind(2)


Product = Callable[[Any, Tensor, Tensor], Tensor]


def _product(variant: Variant) -> Product:
    """The original's own expression, for when the projections have been called and the op cannot be."""
    return in_fp32 if variant.upcast else in_own_dtype


def in_own_dtype(act: Any, gate: Tensor, up: Tensor) -> Tensor:
    product: Tensor = act(gate) * up
    return product


def in_fp32(act: Any, gate: Tensor, up: Tensor) -> Tensor:
    product: Tensor = (act(gate.float()) * up.float()).to(gate.dtype)
    return product


def _finish(variant: Variant) -> Callable[[Any, Tensor], Tensor] | None:
    """What comes after the product; None if that is one module."""
    after, cast, tail = variant.after, variant.cast, variant.tail
    if len(after) == 1 and not cast and not tail:
        return None

    def finish(self: Any, x: Tensor) -> Tensor:
        for name in after:
            module = getattr(self, name)
            if name == cast and isinstance(module.weight, Tensor) and module.weight.dtype is not torch.int8:
                x = x.to(module.weight.dtype)
            x = module(x)
        return F.dropout(x, p=getattr(self, tail), training=self.training) if tail else x

    return finish
