"""What a call of a gated MLP costs in Python beyond its projections, fused and where the guard turns it away.

The device is not here: the op is stood in for by one whose dispatch, allocation and C++ kernel are real, and the
projections by modules that do nothing, for they are called either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn

from benchmarks.timing import microseconds
from npu_autopatch.kernels.swiglu.activations import selector
from npu_autopatch.kernels.swiglu.forward import fused_forward
from npu_autopatch.kernels.swiglu.variant import Variant
from npu_autopatch.ops.swiglu import Ops

SIZE = 64


class MLP(nn.Module):
    """llama's, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Identity(), nn.Identity(), nn.Identity()
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down_proj: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


def native(halves: Tensor, first: bool) -> Tensor:
    return torch.ops.aten.glu.default(halves, -1)


class Hand(MLP):
    """The shortest replacement that calls the projections."""

    def forward(self, x: Tensor) -> Tensor:
        down_proj: Tensor = self.down_proj(native(torch.cat((self.gate_proj(x), self.up_proj(x)), -1), True))
        return down_proj


class Fused(MLP):
    ops = Ops(native, None, None)
    forward = fused_forward(  # type: ignore[assignment]
        MLP.forward,
        MLP.forward,
        Variant(("gate_proj", "up_proj"), 0, "act_fn", "", ("down_proj",)),
        selector(ModuleType("benchmarked"), ops),
        ops,
        ("cpu",),
    )


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    x = torch.randn(1, 4, SIZE, requires_grad=True)
    trained = microseconds({"eager": MLP().forward, "by hand": Hand().forward, "fused": Fused().forward}, x)
    with torch.no_grad():
        inferred = microseconds({"eager": MLP().forward, "fused": Fused().forward}, x)
    yield "a gated MLP in training, eager", trained["eager"], None, "µs"
    yield "a gated MLP in training, by hand", trained["by hand"], None, "µs"
    yield "a gated MLP in training, fused", trained["fused"], None, "µs"
    yield "fused to by hand", trained["fused"] / trained["by hand"], 1.5, "times"
    yield "the guard that turns inference away", inferred["fused"] - inferred["eager"], None, "µs"
