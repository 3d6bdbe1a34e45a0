"""Norms and near-norms for `test_rms_norm_recognition`, under names nobody else uses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Plain(nn.Module):
    """llama, under names nobody else uses"""

    def __init__(self, width, tiny=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.tiny = tiny

    def forward(self, tokens):
        wide = tokens.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)


class ConstantEps(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(tokens.dtype)


class NoEps(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(tokens.dtype)


class WithEpsOfItsClass(nn.Module):
    tiny = 1e-5

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, tokens):
        wide = tokens.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)


class WithEpsAsProperty(Plain):
    @property
    def softening(self):
        return self.tiny

    def forward(self, tokens):
        wide = tokens.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.softening)).to(tokens.dtype)


class FlaggedByItsClass(Plain):
    doubled = False

    def forward(self, tokens):
        wide = tokens.float()
        result = self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)
        return result * 2 if self.doubled else result


class InPlace(Plain):
    def forward(self, tokens):
        root = torch.rsqrt(tokens.float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return tokens.mul_(root).mul(self.scale)


class OfTorch(nn.RMSNorm):
    pass


class Alone(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.tiny = config.rms_norm_eps

    def forward(self, tokens):
        wide = tokens.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)


class WithHelper(Plain):
    def unit(self, wide):
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)

    def forward(self, tokens):
        return self.scale * self.unit(tokens.float()).to(tokens.dtype)


class ClampedInside(Plain):
    def forward(self, tokens):
        wide = tokens.float().clamp(-30, 30)
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)


class Detached(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny).detach()
        return self.scale * (wide * root).to(tokens.dtype)


class Dropping(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        wide = F.dropout(wide, 0.5, self.training)
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)


class Scaled(Plain):
    def __init__(self, width, tiny=1e-6, factor=2.0):
        super().__init__(width, tiny)
        self.factor = factor

    def forward(self, tokens):
        wide = tokens.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.factor * self.scale * (wide * root).to(tokens.dtype)


class Unscaled(nn.Module):
    def __init__(self, width, factor=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.factor = factor

    def forward(self, tokens):
        wide = tokens.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.factor * self.scale * (wide * root).to(tokens.dtype)


class Biased(Plain):
    def __init__(self, width, tiny=1e-6):
        super().__init__(width, tiny)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, tokens):
        wide = tokens.float()
        return (
            self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)
            + self.shift
        )


class Centred(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        wide = wide - wide.mean(-1, keepdim=True)
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype)


class TimesInput(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        return tokens + self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(
            tokens.dtype
        )


class Tuple(Plain):
    def forward(self, tokens):
        wide = tokens.float()
        return (self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(tokens.dtype),)


class GatedByTanh(Plain):
    def forward(self, tokens, gate):
        wide = tokens.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return (self.scale * unit * torch.tanh(gate.float())).to(tokens.dtype)


class Mixture(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, tokens):
        return self.inner(tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + 1e-6))


class Loading(nn.Module):
    def __init__(self, width):
        raise AssertionError("built")
        self.inner = nn.Linear(width, width)

    def forward(self, tokens):
        return self.inner(tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + 1e-6))
