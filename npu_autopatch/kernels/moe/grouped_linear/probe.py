"""What a grouped linear computes: found by running it on an instance with unequal sizes, and proved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe import tiny
from npu_autopatch.kernels.moe.proof import Unproved
from npu_autopatch.kernels.moe.stacked.probe import Failed, close
from npu_autopatch.kernels.moe.stacked.settings import guards

_MOST = 16  # ulps at the size of what is compared: products of some dozens of terms


@dataclass(frozen=True)
class Variant:
    """What a forward computes: ``rows @ weight[e].T``, of a weight ``[E, in, out]`` without the ``.T`` if `transposed`.

    The counts are a list of integers if `listed`, or else a tensor; the rows are the first argument or the second.
    `counted` are attributes that must be the number of experts, `fixed` those with the one value they were proved with.
    """

    weight: str
    transposed: bool
    listed: bool
    rows_first: bool
    counted: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"grouped linear, counts in a {'list' if self.listed else 'tensor'}"


class Probe:
    """An instance of a class of grouped linears, and its forward."""

    def __init__(self, cls: type[nn.Module], original: FunctionType) -> None:
        self.original, self.instance = original, tiny.build(cls)
        self.names, _ = probing.operations(cls, original)
        named = dict(self.instance.named_parameters())
        if len(named) != 1 or next(iter(named.values())).dim() != 3:
            raise Unproved("its parameters are not one stacked weight")
        ((self.name, self.weight),) = named.items()
        if any(True for _ in self.instance.children()) or any(True for _ in self.instance.buffers()):
            raise Unproved("it holds more than a weight")
        experts = self.weight.size(0)
        self.counts = [*((3 * expert + 1) % 4 for expert in range(experts - 1)), 2]  # some have none, not the last
        self.to_one = [sum(self.counts) * (expert == experts - 1) for expert in range(experts)]

    def variant(self) -> Variant:
        """What fp32 shows. Raises `Unproved`."""
        for listed, rows_first, transposed in product((True, False), (True, False), (False, True)):
            variant = Variant(self.name, transposed, listed, rows_first)
            if self.holds(variant, self.counts):
                break
        else:
            raise Unproved("it multiplies no rows, sorted by expert, by the weights of their experts")
        self.expected = self.run(variant, self.counts)
        few = [count // 2 for count in self.counts]
        if not self.holds(variant, self.to_one) or not (self.holds(variant, few) or self.attempt(variant, few) is None):
            raise Unproved("with other counts it computes something else")
        sizes = {"experts": self.weight.size(0)}
        measured, fixed = guards(self.instance, self.names, sizes, lambda: self.unmoved(variant))
        self.instance.eval()
        if not self.holds(variant, self.counts):
            raise Unproved("in evaluation it computes something else than in training")
        self.instance.train()
        return replace(variant, counted=tuple(name for name, _ in measured), fixed=fixed)

    def arguments(self, variant: Variant, counts: list[int], x: Tensor | None = None) -> tuple[Any, Any]:
        if x is None:
            x = self.rows(variant)
        given: Any = list(counts) if variant.listed else torch.tensor(counts)
        return (x, given) if variant.rows_first else (given, x)

    def rows(self, variant: Variant) -> Tensor:
        return probing.samples(sum(self.counts), self.weight.size(1 if variant.transposed else 2))

    def run(self, variant: Variant, counts: list[int]) -> Tensor:
        """Its output, without a gradient. Raises `Unproved`."""
        x, given = arguments = self.arguments(variant, counts)
        tensors = [argument for argument in (x, given) if isinstance(argument, Tensor)]
        versions = [tensor._version for tensor in tensors]
        try:
            with torch.no_grad():
                output = self.original(self.instance, *arguments)
        except Exception as error:
            words = str(error).partition("\n")[0]
            raise Failed(f"it fails on a probe: {type(error).__name__}: {words}") from error
        if versions != [tensor._version for tensor in tensors]:
            probing.samples.cache_clear()
            raise Unproved("it writes to its inputs")
        if type(output) is not Tensor:
            raise Unproved(f"it returns {type(output).__name__}, not rows")
        return output

    def attempt(self, variant: Variant, counts: list[int]) -> Tensor | None:
        try:
            return self.run(variant, counts)
        except Failed:
            return None

    def holds(self, variant: Variant, counts: list[int]) -> bool:
        """Whether the original computes it, rows past the last group being zero."""
        outcome = self.attempt(variant, counts)
        if outcome is None:
            return False
        x = self.rows(variant)
        pieces = x[: sum(counts)].split(counts)
        weights = self.weight.detach() if variant.transposed else self.weight.detach().transpose(1, 2)
        right = [rows @ weight for rows, weight in zip(pieces, weights, strict=True)]
        past = x.new_zeros(x.size(0) - sum(counts), weights.size(2))
        return close(outcome, torch.cat((*right, past)))

    def unmoved(self, variant: Variant) -> bool:
        outcome = self.attempt(variant, self.counts)
        return outcome is None or close(outcome, self.expected)

    def prove(self, variant: Variant, fused: FunctionType) -> None:
        """Original and replacement on the same rows, in each dtype, with gradients. Raises `Unproved`."""
        for dtype in (torch.float32, torch.bfloat16):
            self.instance.to(dtype)
            theirs, mine = (self.results(variant, function, dtype, dtype) for function in (self.original, fused))
            self.instance.double()
            exact = self.results(variant, self.original, dtype, torch.float64)
            for what, one, other, right in zip(_WHAT, mine, theirs, exact, strict=True):
                unit = probing.ulp(right.abs().amax(-1, keepdim=True), dtype)
                if not probing.no_worse(one, other, right, unit, _MOST):
                    said = str(dtype).removeprefix("torch.")
                    raise Unproved(f"in {said} {what} is not that of a grouped product")

    def results(self, variant: Variant, function: Any, rounded: torch.dtype, dtype: torch.dtype) -> list[Tensor]:
        """The output, and the gradients of rows and weight. Rows are `rounded` before they become `dtype`."""
        rows = self.rows(variant)
        scales = torch.tensor([1.0, 60.0]).repeat(rows.size(0))[: rows.size(0)].unsqueeze(1)
        x = (rows * scales).to(rounded).to(dtype, copy=True).requires_grad_()
        try:
            output = function(self.instance, *self.arguments(variant, self.counts, x))
        except Exception as error:
            words = str(error).partition("\n")[0]
            raise Unproved(f"it fails on a probe: {type(error).__name__}: {words}") from error
        if not output.requires_grad:
            raise Unproved("its output carries no gradient")
        incoming = probing.samples(*output.shape, seed=7).to(rounded).to(dtype)
        gradients = torch.autograd.grad(output, [x, *self.instance.parameters()], incoming, allow_unused=True)
        if None in gradients:
            raise Unproved("its rows or its weight get no gradient")
        return [output.detach(), *gradients]


_WHAT = ("its output", "the gradient of its rows", "the gradient of its weight")
