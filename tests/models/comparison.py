"""A model's answer and gradients, against those of the same model in fp64: the rule for being no worse than eager."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.verification.comparison import Errors, as_one, error
from npu_autopatch.verification.double import InDouble


@dataclass(frozen=True)
class Outcome:
    """What a model returns first, and the gradient of each parameter, None for one that has none."""

    answer: Tensor
    gradients: dict[str, Tensor | None]


def outcome(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    """One pass of a copy of `model`; the incoming gradient is the same each time, and bf16 holds it exactly."""
    batch = _rounded(batch, model.dtype)
    return _outcome(
        copy.deepcopy(model), {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    )


def trained(model: nn.Module, batch: dict[str, Any], steps: int = 3) -> Outcome:
    """The last logits of a few steps of gradient descent with a copy of `model`, and its parameters after them."""
    model = copy.deepcopy(model).train()
    batch = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    for _ in range(steps):
        out = model(**batch, labels=batch["input_ids"])
        out.loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
        model.zero_grad(set_to_none=True)
    return Outcome(out.logits.detach(), {name: p.detach() for name, p in model.named_parameters()})


def exact_outcome(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    """The outcome of `model`'s own parameters and buffers, all of it computed in fp64."""
    batch = _rounded(_rounded(batch, model.dtype), torch.float64)
    with InDouble():
        return _outcome(copy.deepcopy(model).double(), batch)


def _rounded(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _outcome(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)  # the same dropout
        answer = model(**batch)[0]
    incoming = torch.randn(answer.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    answer.backward(incoming.to(answer))
    return Outcome(answer.detach(), {name: p.grad for name, p in model.named_parameters()})


def worse(got: Outcome, original: Outcome, exact: Outcome) -> list[str]:
    """Where `got` differs from `original` in dtype or shape, or is further from `exact` than rounding explains.

    The rule: the mean error is at most one and a half times the original's, plus one unit in the last place of the
    largest value. It holds for the answer and, in fp32, for the gradient of each parameter; narrower dtypes leave so
    few digits of some (a scalar, a router) that there it holds for all gradients as one, each relative to its largest.
    """
    found = []
    dtype = original.answer.dtype
    pairs = [("the answer", got.answer, original.answer, exact.answer)]
    assert got.gradients.keys() == original.gradients.keys() == exact.gradients.keys()
    for name, mine in got.gradients.items():
        theirs, right = original.gradients[name], exact.gradients[name]
        if mine is not None and theirs is not None and right is not None:
            pairs.append((name, mine, theirs, right))
        elif not mine is theirs is right:
            found.append(f"{name}: a gradient is missing in one of them")
    for name, mine, theirs, _ in pairs:
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            found.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}")
    if dtype is not torch.float32:
        pairs = [pairs[0], ("all gradients", *(as_one(pairs[1:], which) for which in (1, 2, 3)))]
    return found + [words for name, *tensors in pairs if (words := further(name, *tensors, dtype))]


def further(name: str, got: Tensor, original: Tensor, exact: Tensor, dtype: torch.dtype) -> str:
    """How much `got` is further from `exact` than the rule allows; empty if it is not."""
    mine, theirs = error(got, exact), error(original, exact)
    limit = 1.5 * theirs + torch.finfo(dtype).eps * exact.abs().max().item()
    return "" if mine <= limit else f"{name}: mean error {mine:.2e}, the original's {theirs:.2e}, limit {limit:.2e}"


def behind(parts: Iterable[Errors]) -> list[str]:
    """The parts whose error, over these draws of inputs, is above one and a half times the original's and a unit."""
    totals: dict[str, list[float]] = {}
    for draw in parts:
        for name, values in draw.items():
            totals[name] = [a + b for a, b in zip(totals.get(name, (0.0, 0.0, 0.0)), values, strict=True)]
    return [
        f"{name}: error {mine:.2e}, the original's {theirs:.2e}, a unit {unit:.2e}"
        for name, (mine, theirs, unit) in totals.items()
        if not mine <= 1.5 * theirs + unit
    ]
