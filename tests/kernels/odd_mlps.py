"""Gated MLPs and near-MLPs for `test_swiglu_recognition`, under names nobody else uses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Base(nn.Module):
    """What all of them have; the names of their own are what their forward calls."""

    def __init__(self, width: int = 12, inner: int = 20, both: bool = False):
        super().__init__()
        self.left = nn.Linear(width, 2 * inner if both else inner)
        self.right = nn.Linear(width, inner)
        self.back = nn.Linear(inner, width)
        self.bend = nn.SiLU()


class Plain(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.right(tokens))


class UpFirst(Base):
    def forward(self, tokens):
        up = self.right(tokens)
        return self.back(up * self.bend(self.left(tokens)))


class SecondActivated(Base):
    def forward(self, tokens):
        left = self.left(tokens)
        return self.back(torch.mul(left, 1) if self is None else left * self.bend(self.right(tokens)))


class Upcast(Base):
    def forward(self, tokens):
        gate, up = self.left(tokens), self.right(tokens)
        return self.back((self.bend(gate.float()) * up.float()).to(gate.dtype))


class FunctionalSiLU(Base):
    def forward(self, tokens):
        return self.back(F.silu(self.left(tokens)) * self.right(tokens))


class FunctionalGELU(Base):
    def forward(self, tokens):
        return self.back(F.gelu(self.left(tokens)) * self.right(tokens))


class FunctionalTanhGELU(Base):
    def forward(self, tokens):
        return self.back(self.right(tokens) * F.gelu(self.left(tokens), approximate="tanh"))


class Both(Base):
    def __init__(self, width: int = 12, inner: int = 20):
        super().__init__(width, inner, both=True)

    def forward(self, tokens):
        gate, up = self.left(tokens).chunk(2, dim=-1)
        return self.back(self.bend(gate) * up)


class BothUpFirst(Both):
    def forward(self, tokens):
        up, gate = self.left(tokens).chunk(2, dim=-1)
        return self.back(up * self.bend(gate))


class BothBySlice(Both):
    def forward(self, tokens):
        both = self.left(tokens)
        half = both.shape[-1] // 2
        return self.back(self.bend(both[..., :half]) * both[..., half:])


class BothByView(Both):
    def forward(self, tokens, step=None):
        both = self.left(tokens) if step is None else self.left(tokens * step)
        batch, length, _ = both.shape
        both = both.view(batch, length, 2, -1)
        return self.back(self.bend(both[..., 0, :]) * both[..., 1, :])


class Dropping(Base):
    def __init__(self, width: int = 12, inner: int = 20):
        super().__init__(width, inner)
        self.lose = nn.Dropout(0.4)

    def forward(self, tokens):
        return self.back(self.lose(self.bend(self.left(tokens)) * self.right(tokens)))


class DroppingLast(Dropping):
    def forward(self, tokens):
        return self.lose(self.back(self.bend(self.left(tokens)) * self.right(tokens)))


class DroppingByNumber(Base):
    def __init__(self, width: int = 12, inner: int = 20):
        super().__init__(width, inner)
        self.loss = 0.4

    def forward(self, tokens):
        out = self.back(self.bend(self.left(tokens)) * self.right(tokens))
        return F.dropout(out, p=self.loss, training=self.training)


class CastToWeight(Dropping):
    def forward(self, tokens):
        x = self.lose(self.bend(self.left(tokens)) * self.right(tokens))
        if (
            isinstance(self.back.weight, torch.Tensor)
            and x.dtype != self.back.weight.dtype
            and self.back.weight.dtype != torch.int8
        ):
            x = x.to(self.back.weight.dtype)
        return self.back(x)


# From here on, none is to be fused.


class InnerNorm(Base):
    def __init__(self, width: int = 12, inner: int = 20):
        super().__init__(width, inner)
        self.between = nn.LayerNorm(inner)

    def forward(self, tokens):
        return self.back(self.between(self.bend(self.left(tokens)) * self.right(tokens)))


class InnerNormOrDropout(InnerNorm):
    def __init__(self, width: int = 12, inner: int = 20):
        super().__init__(width, inner)
        self.lose = nn.Dropout(0.4)


class NormFirst(InnerNorm):
    def forward(self, tokens):
        tokens = self.between(tokens)
        return self.back(self.bend(self.left(tokens)) * self.right(tokens))


class Multiplied(Base):
    factor = 2.0

    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.right(tokens)) * self.factor


class MultipliedByInstanceMLP(Base):
    def __init__(self):
        super().__init__()
        self.ratio = 1.0

    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens) * self.ratio) * self.right(tokens))


class MultipliedOutput(MultipliedByInstanceMLP):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.right(tokens)) * self.ratio


class ClampedAt7(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens).clamp(max=7)) * self.right(tokens).clamp(-7, 7))


class ClampedAt100(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.right(tokens).clamp(-100, 100))


class ClampedProduct(Base):
    def forward(self, tokens):
        return self.back((self.bend(self.left(tokens)) * self.right(tokens)).clamp(-1000, 1000))


class SparseMLP(MultipliedByInstanceMLP):
    def forward(self, tokens):
        gate = self.left(tokens)
        if self.ratio > 0:
            gate = F.relu(gate - gate.mean(-1, keepdim=True))
        return self.back(self.bend(gate) * self.right(tokens))


class ResidualMLP(Base):
    def forward(self, tokens):
        return tokens + self.back(self.bend(self.left(tokens)) * self.right(tokens))


class SecondInput(Base):
    def forward(self, tokens, other):
        return self.back(self.bend(self.left(tokens)) * self.right(other))


class Interleaved(Both):
    def forward(self, tokens):
        both = self.left(tokens)
        return self.back(self.bend(both[..., ::2]) * both[..., 1::2])


class SquaredGate(Base):
    def forward(self, tokens):
        gate = self.bend(self.left(tokens))
        return self.back(gate * gate * self.right(tokens))


class PlusOne(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * (self.right(tokens) + 1))


class RoundedActivation(Base):
    def forward(self, tokens):
        gate, up = self.left(tokens), self.right(tokens)
        return self.back((self.bend(gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype))


class CastBack(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.right(tokens)).to(tokens.dtype)


class Detached(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)).detach() * self.right(tokens))


class DetachedOutput(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.right(tokens)).detach()


class InPlaceMLP(Base):
    def forward(self, tokens):
        up = self.right(tokens)
        up *= self.bend(self.left(tokens))
        return self.back(up)


class Remembering(Base):
    def forward(self, tokens):
        self.last = self.bend(self.left(tokens)) * self.right(tokens)
        return self.back(self.last)


class Branching(Base):
    def forward(self, tokens):
        if tokens.shape[0] > 64:
            return self.back(self.bend(self.left(tokens)) + self.right(tokens))
        return self.back(self.bend(self.left(tokens)) * self.right(tokens))


class OtherInTraining(Base):
    def forward(self, tokens):
        return self.back(F.dropout(self.bend(self.left(tokens)) * self.right(tokens), 0.1, self.training))


class OptionalDropout(Dropping):
    def forward(self, tokens, step=None):
        x = self.bend(self.left(tokens)) * self.right(tokens)
        if self.lose is not None:
            x = self.lose(x)
        return self.back(x)


class LastDimensionByNumber(Both):
    def forward(self, tokens):
        gate, up = self.left(tokens).chunk(2, dim=1)
        return self.back(self.bend(gate) * up)


class TwiceTheSame(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)) * self.left(tokens))


class Ungated(Base):
    def forward(self, tokens):
        return self.back(self.bend(self.left(tokens)))


def halved(x):
    return x * 0.5


class WithHelperMLP(Base):
    def forward(self, tokens):
        return self.back(halved(self.bend(self.left(tokens)) * self.right(tokens)))


class InheritedForward(Plain):
    """Served by the patch of its base."""
