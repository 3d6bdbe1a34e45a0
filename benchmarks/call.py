"""What a fused call costs in Python, next to the shortest replacement one can write.

The device is not here: the op is stood in for by one whose dispatch, allocation and C++ kernel are real, which is
what a call costs the host at the least. The guard alone is given in absolute terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import microseconds
from npu_autopatch.kernels.rms_norm.forward import fused_forward
from npu_autopatch.kernels.rms_norm.variant import Conditions, Variant

SIZE = 64
_native = torch.ops.aten._fused_rms_norm.default


class Norm(nn.Module):
    """llama's, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def native(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _native(x, (SIZE,), gamma, eps)
    return found


def nothing(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor]:
    return (x,)


def by_hand(op: Callable[..., Any]) -> type[Norm]:
    class Hand(Norm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return op(hidden_states, self.weight, self.variance_epsilon)[0]  # type: ignore[no-any-return]

    return Hand


def fused(op: Callable[..., Any]) -> type[Norm]:
    class Fused(Norm):
        forward = fused_forward(  # type: ignore[assignment]
            Norm.forward,
            Norm.forward,
            Variant("round_then_mul", "weight", eps="variance_epsilon"),
            Conditions(),
            op,
            ("cpu",),
        )

    return Fused


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    classes = {
        "eager": Norm,
        "by hand": by_hand(native),
        "fused": fused(lambda x, gamma, eps: native(x.contiguous(), gamma, eps)),
        "by hand, no op": by_hand(nothing),
        "fused, no op": fused(nothing),
    }
    with torch.no_grad():
        best = microseconds({name: cls().forward for name, cls in classes.items()}, torch.randn(1, 4, SIZE), each=500)
    yield "a call, eager", best["eager"], None, "µs"
    yield "a call, by hand", best["by hand"], None, "µs"
    yield "a call, fused", best["fused"], None, "µs"
    yield "fused to by hand", best["fused"] / best["by hand"], 1.5, "times"
    yield "the guard alone", best["fused, no op"] - best["by hand, no op"], None, "µs"
