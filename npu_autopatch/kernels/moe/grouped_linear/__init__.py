"""Grouped linears: one stacked weight, applied to rows that are sorted by expert, of which each has a count.

A class is looked at where its constructor makes a parameter, and its forward cuts one of two arguments by the other
and multiplies. Which of them are the rows, whether the counts are a list or a tensor, and how the weight lies, an
instance with unequal sizes shows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, renamed, site_name
from npu_autopatch.kernels.moe.base import MoESite
from npu_autopatch.kernels.moe.grouped_linear.probe import Probe, Variant
from npu_autopatch.kernels.moe.proof import Unproved, turned_away
from npu_autopatch.ops import grouped_matmul as ops
from npu_autopatch.ops.legality import PLAIN, autocasting, transformed

_CUTS, _MULTIPLIES = {"split", "cumsum", "tensor_split"}, {"linear", "matmul", "mm"}
_ATTENDS = {"softmax", "scaled_dot_product_attention"}


def find(module: ModuleType) -> Iterator[Site]:
    """The grouped linears of `module`."""
    for cls in probing.classes(module):
        forward, init = vars(cls).get("forward"), vars(cls).get("__init__")
        if not isinstance(forward, FunctionType) or not isinstance(init, FunctionType):
            continue
        code = forward.__code__
        plain = code.co_argcount == 3 and not forward.__defaults__ and not code.co_kwonlyargcount
        if not plain or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or "Parameter" not in init.__code__.co_names:
            continue
        names, _ = probing.operations(cls, forward)
        if names & _CUTS and names & _MULTIPLIES and not names & _ATTENDS:
            name = site_name(module.__name__, cls.__name__)
            yield MoESite(module.__name__, name, cls, "forward", sys.modules[__name__])


def prove(site: Site, devices: tuple[str, ...]) -> Match | Refusal:
    """The forward that makes one product of all."""
    cls, original = site.owner, site.owner.forward
    try:
        probe = Probe(cls, original)
        variant = probe.variant()
        probe.prove(variant, fused_forward(original, turned_away, variant, ops.REFERENCE, ("cpu",)))
    except (probing.BuildError, Unproved) as refused:
        return Refusal(str(refused))
    return Match(str(variant), fused_forward(original, original, variant, ops.op(), devices))


def fused_forward(
    original: FunctionType, fallback: Callable[..., Any], variant: Variant, ops: ops.Ops, devices: tuple[str, ...]
) -> FunctionType:
    """A forward with the signature of `original` that multiplies all rows at once, and else calls `fallback`."""
    compute = _computing(variant, ops, devices)

    def rows_first(self, a, b):  # type: ignore[no-untyped-def]
        fused = compute(self, a, b)
        return fallback(self, a, b) if fused is None else fused

    def counts_first(self, a, b):  # type: ignore[no-untyped-def]
        fused = compute(self, b, a)
        return fallback(self, a, b) if fused is None else fused

    template = rows_first if variant.rows_first else counts_first
    forward = renamed(template, original.__code__.co_varnames[:3], {})
    functools.update_wrapper(forward, original)
    return forward


def _computing(
    variant: Variant, available: ops.Ops, devices: tuple[str, ...]
) -> Callable[[Any, Any, Any], Tensor | None]:
    grouped_linear, traces = available.grouped_linear, available.traces
    name, transposed, listed = variant.weight, variant.transposed, variant.listed
    counted, fixed = variant.counted, variant.fixed
    in_axis = 1 if transposed else 2

    def compute(self: Any, x: Any, counts: Any) -> Tensor | None:
        if (
            type(x) not in PLAIN
            or x.device.type not in devices
            or x.dim() != 2
            or transformed()
            or autocasting(x)
            or "parametrizations" in self._modules
            or (not traces and torch.is_grad_enabled() and torch.compiler.is_compiling())
        ):
            return None
        weight = getattr(self, name)
        if not ops.legal(x, weight) or weight.dim() != 3 or weight.size(in_axis) != x.size(1):
            return None
        for attribute in counted:
            if getattr(self, attribute) != weight.size(0):
                return None
        for attribute, value in fixed:
            if getattr(self, attribute) is not value and (value is None or getattr(self, attribute) != value):
                return None
        tail = None
        if listed:
            if type(counts) is not list or len(counts) != weight.size(0):
                return None
            if torch.compiler.is_compiling():  # where the counts may be no numbers yet, and a cut by them is checked
                torch._check(sum(counts) == x.size(0))
            elif sum(counts) != x.size(0):
                return None
            counts = torch.tensor(counts, dtype=torch.int64, device=x.device)
        else:
            if (
                type(counts) not in PLAIN
                or counts.dtype is not torch.int64
                or counts.device != x.device
                or counts.shape != weight.shape[:1]
            ):
                return None
            # whether there are rows past the last group, which stay zero, only the device knows
            tail = torch.arange(x.size(0), device=x.device).unsqueeze(1) >= counts.sum()
        return grouped_linear(x, weight, counts, None, transposed, tail)

    return compute
