"""What a call of a rotary function costs in Python, next to the shortest replacement one can write.

The device is not here: the op is stood in for by one whose dispatch, allocation and C++ kernel are real.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import microseconds
from npu_autopatch.kernels.rope.replacement import Roles, fused_function
from npu_autopatch.kernels.rope.variant import Variant

_ROLES = Roles(("q", "k"), ("cos", "sin"), unsqueeze="unsqueeze_dim")
_VARIANT = Variant("half", "fullcos", ranks=((4, 3),))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """llama's, as transformers has it."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def native(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return torch.ops.aten.addcmul.default(x, cos, sin)


def nothing(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return x


def by_hand(op: Callable[..., Tensor]) -> Callable[..., Any]:
    """As peers write it: no test of anything, and contiguous inputs, which the device would copy otherwise."""

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return op(q.contiguous(), cos, sin, "half"), op(k.contiguous(), cos, sin, "half")

    return rotary


def fused(op: Callable[..., Tensor]) -> Callable[..., Any]:
    return fused_function(eager, inspect.signature(eager), _ROLES, _VARIANT, op, ("cpu",))


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    """A decoded token, and a prefix whose heads and tokens are swapped in memory, as attention's are."""
    functions = {
        "eager": eager,
        "by hand": by_hand(native),
        "fused": fused(native),
        "by hand, no op": by_hand(nothing),
        "fused, no op": fused(nothing),
    }
    for what, length in (("a token", 1), ("a prefix", 8)):
        q, k = (torch.randn(1, length, heads, 16).transpose(1, 2) for heads in (4, 2))
        with torch.no_grad():
            best = microseconds(functions, q, k, torch.rand(1, length, 16), torch.rand(1, length, 16))
        yield f"rotating {what}, eager", best["eager"], None, "µs"
        yield f"rotating {what}, by hand", best["by hand"], None, "µs"
        yield f"rotating {what}, fused", best["fused"], None, "µs"
        yield "fused to by hand", best["fused"] / best["by hand"], 1.5, "times"
        yield "the guard alone", best["fused, no op"] - best["by hand, no op"], None, "µs"
