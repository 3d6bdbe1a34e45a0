"""What each variant of a norm computes, in plain torch: what a probe compares with.

Inputs and weights of a probe are the same for every class, so each of these is computed once in a process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.rms_norm.variant import ACTIVATIONS, Variant

SIZE = 24  # even, to have groups, and unlike any other number in a norm
INCOMING = 9  # the seed of the gradient that arrives at the output
EPS = 0.25  # large enough to show at any scale
# dtypes of input and weight; together they tell every rounding apart
PAIRS = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
Outcomes = Mapping[tuple[torch.dtype, torch.dtype], Tensor]


@functools.cache
def sample(dtype: torch.dtype, scale: float, seed: int, *shape: int) -> Tensor:
    """Random values; seed 0 is the input, 1 the gate, 2 and on the weights."""
    return (probing.samples(*shape, seed=seed) * scale).to(dtype)


@functools.cache
def exact(form: Variant, seed: int | None, eps: float, groups: int, dtype: torch.dtype, scale: float) -> Tensor:
    """The formula in fp64, on the input of `dtype` and `scale` and the weight `seed`."""
    x, gate = sample(dtype, scale, 0, 2, 3, SIZE).double(), sample(dtype, 1.0, 1, 2, 3, SIZE).double()
    return _exact(form, x, gate, None if seed is None else sample(dtype, 1.0, seed, SIZE).double(), eps, groups)


def _exact(form: Variant, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int) -> Tensor:
    if form.gate == "pre":
        x = x * ACTIVATIONS[form.activation](gate)
    normed = _normed(form, x, eps, groups)
    if weight is not None:
        normed = normed * (weight + form.offset)
    return normed * ACTIVATIONS[form.activation](gate) if form.gate == "post" else normed


@functools.cache
def ulps(
    form: Variant, seed: int | None, eps: float, groups: int, dtype: torch.dtype, scale: float, of: torch.dtype
) -> Tensor:
    """One ulp of the dtype `of` at each value of `exact`."""
    return probing.ulp(exact(form, seed, eps, groups, dtype, scale), of)


@functools.cache
def gradients(form: Variant, seed: int | None, eps: float, groups: int) -> list[Tensor]:
    """The gradients of the formula in fp64, for fp32 inputs of scale 1: of input, gate and weight, as there are."""
    needed = [sample(torch.float32, 1.0, i, 2, 3, SIZE).double().requires_grad_() for i in range(2 if form.gate else 1)]
    needed += [] if seed is None else [sample(torch.float32, 1.0, seed, SIZE).double().requires_grad_()]
    normed = _exact(
        form, needed[0], needed[1] if form.gate else needed[0], None if seed is None else needed[-1], eps, groups
    )
    return list(torch.autograd.grad(normed, needed, sample(torch.float32, 1.0, INCOMING, 2, 3, SIZE).double()))


@functools.cache
def rounded(
    form: Variant, seed: int | None, eps: float, groups: int, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """The formula with the roundings of `form`, for an input of `x_dtype` and a weight of `dtype`."""
    x, gate = sample(x_dtype, 1.0, 0, 2, 3, SIZE), sample(x_dtype, 1.0, 1, 2, 3, SIZE)
    wide = x if form.rounding == "no_upcast" else x.float()
    if form.gate == "pre":
        wide = wide * ACTIVATIONS[form.activation](gate.float())
    gamma = None if seed is None else form.gamma(sample(dtype, 1.0, seed, SIZE))
    # what multiplies in fp32 does not round before a gate that comes last
    kept = torch.float32 if form.gate == "post" and form.rounding == "fp32_mul" else x_dtype
    normed = ROUNDINGS[form.rounding](_normed(form, wide, eps, groups), gamma, kept)
    return (normed * ACTIVATIONS[form.activation](gate.float())).to(x_dtype) if form.gate == "post" else normed


def _normed(form: Variant, x: Tensor, eps: float, groups: int) -> Tensor:
    length = x.size(-1)
    size = length if not form.groups or not groups else groups if form.groups_are_sizes else length // groups
    split = x.unflatten(-1, (-1, size))
    normed: Tensor = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + eps)
    return normed.flatten(-2)


def _round_then_mul(normed: Tensor, gamma: Tensor | None, dtype: torch.dtype) -> Tensor:
    return normed.to(dtype) if gamma is None else gamma * normed.to(dtype)


def _fp32_mul(normed: Tensor, gamma: Tensor | None, dtype: torch.dtype) -> Tensor:
    return normed.to(dtype) if gamma is None else (gamma.float() * normed).to(dtype)


def _t5(normed: Tensor, gamma: Tensor | None, dtype: torch.dtype) -> Tensor:
    if gamma is None:
        return normed
    return gamma * (normed if gamma.dtype is torch.float32 else normed.to(gamma.dtype))


def _no_upcast(normed: Tensor, gamma: Tensor | None, dtype: torch.dtype) -> Tensor:
    return normed if gamma is None else normed * gamma


# in the order a tie is decided
ROUNDINGS: dict[str, Callable[[Tensor, Tensor | None, torch.dtype], Tensor]] = {
    "round_then_mul": _round_then_mul,
    "fp32_mul": _fp32_mul,
    "t5": _t5,
    "no_upcast": _no_upcast,
}


def mismatch(form: Variant, seed: int | None, eps: float, groups: int, outcomes: Outcomes) -> float:
    """The largest share of values in which an outcome differs from the formula; 1 if a dtype does."""
    worst = 0.0
    for (x_dtype, dtype), outcome in outcomes.items():
        expected = rounded(form, seed, eps, groups, x_dtype, dtype)
        if outcome.dtype is not expected.dtype:
            return 1.0
        if outcome.dtype is torch.float32:
            worst = max(worst, 0.0 if close(outcome, expected) else 1.0)
        elif not torch.equal(outcome, expected):
            worst = max(worst, (outcome != expected).double().mean().item())
    return worst


def rounds_each_step(form: Variant, seed: int | None, eps: float, groups: int, outcomes: Outcomes) -> bool:
    """Whether the outcomes have the promoted dtype, and the error of a few half roundings at most."""
    for (x_dtype, dtype), outcome in outcomes.items():
        if outcome.dtype is not torch.promote_types(x_dtype, x_dtype if seed is None else dtype):
            return False
        if x_dtype is dtype or seed is None:
            right = exact(form, seed, eps, groups, x_dtype, 1.0)
            if ((outcome.double() - right).abs() / probing.ulp(right, torch.bfloat16)).max().item() > 4:
                return False
    return True


def measured_eps(form: Variant, seed: int | None, small: Tensor) -> float:
    """The eps that explains `small`, an output for an input of scale 1e-4, to two digits."""
    without = exact(form, seed, 0.0, 0, torch.float32, 1e-4)
    mean = sample(torch.float32, 1e-4, 0, 2, 3, SIZE).double().pow(2).mean(-1, keepdim=True)
    eps = ((without / small.detach().double()).pow(2) * mean - mean).mean().item()
    return float(f"{max(eps, 0.0):.2g}") if eps == eps and eps < 1 else 0.0


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of fp32 operations; the last word have the ulps of `probing.no_worse`."""
    if got.shape != expected.shape:
        return False
    return (got - expected).abs().max().item() <= 1e-5 * expected.abs().max().item()


def why_not(outcome: Tensor, shifted: Tensor, weights: list[Tensor]) -> str:
    """In words, what a forward computes instead; `shifted` is its output with 3 added to the input."""
    x, y = sample(torch.float32, 1.0, 0, 2, 3, SIZE).double(), outcome.detach().double()

    def is_(candidate: Tensor) -> bool:
        return torch.allclose(y, candidate, rtol=1e-3, atol=1e-4)

    if torch.allclose(outcome, shifted, rtol=1e-3, atol=1e-4):
        return "it subtracts the mean: a layer norm, not an RMS norm"
    for gamma in (torch.ones(SIZE).double(), *(w.double() + offset for w in weights for offset in (0, 1))):
        scaled = x * gamma
        if is_(scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True))):
            return "it multiplies by its weight before the norm, not after it"
        if is_(scaled):
            return "it normalises nothing: it returned its input, or that times a weight"
        if is_(scaled * torch.rsqrt(x.pow(2).sum(-1, keepdim=True))):
            return "it divides by the root of the sum of squares, not of their mean"
    return "its output on random inputs is that of no RMS norm"
