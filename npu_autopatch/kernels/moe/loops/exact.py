"""What a list of gated MLPs computes for chosen tokens, in fp64 and by formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels.swiglu.activations import FUNCTIONS
from npu_autopatch.kernels.swiglu.variant import Variant


@dataclass(frozen=True)
class Bank:
    """All experts' parameters, stacked: of each projection the weight [E, N, K], and the bias [E, 1, N] or None."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    act: Any
    variant: Variant

    @classmethod
    def of(cls, experts: list[nn.Module], variant: Variant) -> Bank:
        """The parameters as they are now, as fp64 leaves."""
        weights, biases = [], []
        for name in (*variant.projections, variant.after[0]):
            linears: list[Any] = [getattr(expert, name) for expert in experts]
            weights.append(_stacked([linear.weight for linear in linears]))
            bias = linears[0].bias is not None
            biases.append(_stacked([linear.bias for linear in linears]) if bias else None)
        act = getattr(experts[0], variant.activation) if variant.activation else FUNCTIONS[variant.function]
        return cls(tuple(weights), tuple(biases), act, variant)

    @property
    def experts(self) -> int:
        return self.weights[0].size(0)

    @property
    def hidden(self) -> int:
        return self.weights[0].size(2)

    def outputs(self, hidden: Tensor) -> Tensor:
        """Of every expert for every token: [E, n, H]."""
        first = [self._linear(hidden, i) for i in range(len(self.weights) - 1)]
        both = first if self.variant.separate else list(first[0].chunk(2, -1))
        gate, up = both[self.variant.gate], both[1 - self.variant.gate]
        return self._linear(self.act(gate) * up, -1)

    def _linear(self, x: Tensor, index: int) -> Tensor:
        bias = self.biases[index]
        y = x @ self.weights[index].mT
        return y if bias is None else y + bias.unsqueeze(1)


def combined(outputs: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``sum_j weights[i, j] * outputs[ids[i, j], i]``: [n, H]."""
    tokens = torch.arange(ids.size(0)).unsqueeze(1)
    return (outputs[ids.long(), tokens] * weights.unsqueeze(-1)).sum(1)


def _stacked(parameters: list[Tensor]) -> Tensor:
    return torch.stack([parameter.detach() for parameter in parameters]).double().requires_grad_()
