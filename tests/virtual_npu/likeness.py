"""Whether a patched model on the NPU gives the original's answer and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .tiny_models import inputs, run, tiny

Patch = Callable[[], AbstractContextManager[Any]]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return ((got - want).norm() / want.norm()).item()


def assert_the_originals_in_fp32(family: str, patched: Patch) -> None:
    """Logits and gradients."""
    model, batch = tiny(family).npu(), inputs(family)
    want = run(model, batch)
    with patched():
        got = run(model, batch)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5


def assert_as_near_to_fp64_in_bf16(family: str, patched: Patch) -> None:
    """Logits and gradients: no further than the original's by more than one rounding."""
    model, batch = tiny(family).to(torch.bfloat16), inputs(family)
    exact = run(copy.deepcopy(model).double(), batch)
    model.npu()
    eager = run(model, batch)
    with patched():
        fused = run(model, batch)
    for got, original, want in zip(fused, eager, exact, strict=True):
        assert distance(got, want) <= distance(original, want) + torch.finfo(torch.bfloat16).eps
