"""Grouped linears as nobody has written them yet; some of them no grouped product may stand in for."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class CountsFirst(nn.Module):
    def __init__(self, num_experts, taken, made):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, made, taken) * 0.3)

    def forward(self, sizes, rows):
        return torch.cat([F.linear(part, w) for part, w in zip(rows.split(sizes), self.weight.unbind(0), strict=True)])


class Reversed(nn.Module):
    def __init__(self, num_experts, taken, made):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, made, taken) * 0.3)

    def forward(self, rows, sizes):
        weights = self.weight.flip(0)
        return torch.cat([F.linear(part, w) for part, w in zip(rows.split(sizes), weights, strict=True)])


class Scaled(nn.Module):
    def __init__(self, num_experts, taken, made):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(num_experts, made, taken) * 0.3), 1.0

    def forward(self, rows, sizes):
        made = [F.linear(part, w) for part, w in zip(rows.split(sizes), self.weight.unbind(0), strict=True)]
        return torch.cat(made) * self.scale


class Biased(nn.Module):
    def __init__(self, num_experts, taken, made):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, made, taken) * 0.3)
        self.bias = nn.Parameter(torch.zeros(num_experts, made))

    def forward(self, rows, sizes):
        made = zip(rows.split(sizes), self.weight, self.bias, strict=True)
        return torch.cat([F.linear(part, w, b) for part, w, b in made])


class Residual(nn.Module):
    def __init__(self, num_experts, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, size, size) * 0.3)

    def forward(self, rows, sizes):
        made = [part + F.linear(part, w) for part, w in zip(rows.split(sizes), self.weight.unbind(0), strict=True)]
        return torch.cat(made)


class Rounded(nn.Module):
    """Its result is fp32, whatever it is given."""

    def __init__(self, num_experts, taken, made):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, made, taken) * 0.3)

    def forward(self, rows, sizes):
        made = [F.linear(part, w) for part, w in zip(rows.split(sizes), self.weight.unbind(0), strict=True)]
        return torch.cat(made).float()
