"""What a module of stacked experts computes between its two products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.kernels.moe.experts import Select
from npu_autopatch.ops import swiglu

HALVES, INTERLEAVED, SEPARATE = "halves", "interleaved", "separate"


@dataclass(frozen=True)
class Gate:
    """Gate and up as they come out of the first product or products, and what is made of them.

    Either the class has a `method` for it, or the gate is activated by the attribute `act` (of the child that holds
    the weights if it is `held`), by SiLU where that is empty; or it is GPT-OSS's, with the numbers of the attributes
    `alpha` and `limit`: ``(up + 1) * gate * sigmoid(alpha * gate)``, the gate clamped above, up on both sides.
    """

    split: str
    gate_first: bool = True
    method: str = ""
    act: str = ""
    held: bool = False
    alpha: str = ""
    limit: str = ""

    def __str__(self) -> str:
        if self.method:
            return "own gate"
        order = "" if self.gate_first else "_up_first"
        return f"{self.split}{order}{'+clamped' if self.limit else ''}"


Middle = Callable[[Any, Any, Tensor, "Tensor | None"], Tensor]


def middle(gate: Gate, select: Select) -> Middle:
    """The function of the module, the holder of its weights, and the results of one first product or two.

    Gate and up side by side go to the op that `select` has for the activation; anything else is computed as by the
    class itself.
    """
    split, gate_first, method = _SPLITS[gate.split], gate.gate_first, gate.method
    act_name, held, alpha_name, limit_name = gate.act, gate.held, gate.alpha, gate.limit
    fusible = gate.split == HALVES and gate_first

    def by_method(self: Any, holder: Any, first: Tensor, second: Tensor | None) -> Tensor:
        made: Tensor = getattr(self, method)(first)
        return made

    def activated(self: Any, holder: Any, first: Tensor, second: Tensor | None) -> Tensor:
        act = getattr(holder if held else self, act_name) if act_name else F.silu
        if fusible and (op := select(act)) is not None and swiglu.legal_halves(first, first):
            return op(first, True)
        left, right = split(first, second)
        product: Tensor = act(left) * right if gate_first else act(right) * left
        return product

    def clamped(self: Any, holder: Any, first: Tensor, second: Tensor | None) -> Tensor:
        left, right = split(first, second)
        gate, up = (left, right) if gate_first else (right, left)
        alpha, limit = getattr(self, alpha_name), getattr(self, limit_name)
        gate = gate.clamp(min=None, max=limit)
        up = up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return by_method if method else clamped if limit_name else activated


def _halves(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    left, right = first.chunk(2, -1)
    return left, right


def _interleaved(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    return first[..., ::2], first[..., 1::2]


def _separate(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    assert second is not None
    return first, second


_SPLITS = {HALVES: _halves, INTERLEAVED: _interleaved, SEPARATE: _separate}
