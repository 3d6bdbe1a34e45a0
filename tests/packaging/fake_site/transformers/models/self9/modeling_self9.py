"""Replaces itself in sys.modules, as lazy packages do."""

import sys
import types

import torch
from torch import nn


class Self9RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


_other = types.ModuleType(__name__)
_other.__spec__ = __spec__
_other.__file__ = __file__
_other.Self9RMSNorm = Self9RMSNorm
sys.modules[__name__] = _other
