"""Stacked experts as nobody has written them yet; some of them no grouped product may stand in for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

Config = SimpleNamespace(hidden_size=12, intermediate_size=20, num_experts=4, hidden_act="silu")


def inputs():
    generator = torch.Generator().manual_seed(2)
    ids = torch.tensor([[0, 2], [3, 0], [2, 3], [1, 0], [3, 1]])
    return torch.randn(5, 12, generator=generator), torch.rand(5, 2, generator=generator), ids


class Plain(nn.Module):
    """Up first, routing weights before ids, one weight turned."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.w1 = nn.Parameter(torch.randn(config.num_experts, config.hidden_size, 2 * config.intermediate_size) * 0.3)
        self.w2 = nn.Parameter(torch.randn(config.num_experts, config.hidden_size, config.intermediate_size) * 0.3)
        self.act = nn.SiLU()

    def expert(self, rows, expert):
        up, gate = (rows @ self.w1[expert]).chunk(2, -1)
        return F.linear(self.act(gate) * up, self.w2[expert])

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = self.expert(states[token], expert) * scores[token, place, None]
            out.index_add_(0, token, made.to(out.dtype))
        return out


class Residual(Plain):
    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = (states[token] + self.expert(states[token], expert)) * scores[token, place, None]
            out.index_add_(0, token, made)
        return out


class Reversed(Plain):
    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = self.expert(states[token], self.num_experts - 1 - expert) * scores[token, place, None]
            out.index_add_(0, token, made)
        return out


class Scaled(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.scale = 1

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            out.index_add_(0, token, self.scale * self.expert(states[token], expert) * scores[token, place, None])
        return out


class Flagged(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.doubled = False

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = self.expert(states[token], expert) * scores[token, place, None]
            out.index_add_(0, token, 2 * made if self.doubled else made)
        return out


class MayScale(Plain):
    """With a parameter that few instances have."""

    def __init__(self, config):
        super().__init__(config)
        self.register_parameter("scales", None)

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = self.expert(states[token], expert) * scores[token, place, None]
            out.index_add_(0, token, made if self.scales is None else made * self.scales[expert])
        return out


class Dropping(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(0.0)

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = self.dropout(self.expert(states[token], expert)) * scores[token, place, None]
            out.index_add_(0, token, made)
        return out


class PassingOn(Plain):
    """What its experts make goes through a child that does nothing here, and something in other instances."""

    def __init__(self, config):
        super().__init__(config)
        self.after = nn.Sequential()

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            out.index_add_(0, token, self.after(self.expert(states[token], expert)) * scores[token, place, None])
        return out


class OnlyInTraining(Plain):
    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts - (not self.training)):
            place, token = torch.where(mask[expert])
            out.index_add_(0, token, self.expert(states[token], expert) * scores[token, place, None])
        return out


class Writing(Plain):
    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            out.index_add_(0, token, self.expert(states[token], expert) * scores[token, place, None])
        states.mul_(1.0)
        return out


class Twice(Plain):
    """Three products one after the other."""

    def __init__(self, config):
        super().__init__(config)
        self.w3 = nn.Parameter(torch.randn(config.num_experts, config.hidden_size, config.hidden_size))

    def forward(self, states, scores, chosen):
        out = torch.zeros_like(states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            made = self.expert(states[token], expert) @ self.w3[expert]
            out.index_add_(0, token, made * scores[token, place, None])
        return out
