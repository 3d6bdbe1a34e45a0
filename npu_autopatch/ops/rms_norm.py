"""`npu_rms_norm`: the call, when it is legal, and what it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_autopatch.ops.capability import Capability, detect

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def capability() -> Capability:
    """Whether `npu_rms_norm` can be called here with a gradient."""
    found = detect("npu_rms_norm", ("gamma", "epsilon"))
    if found.available and not found.differentiable:
        return Capability(found.op, "npu_rms_norm of this torch_npu has no gradient", False)
    return found


def call(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """The normalised `x`, through the op."""
    y: Tensor = torch.ops.npu.npu_rms_norm(x, gamma, eps)[0]
    return y


def reference(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """What the op computes, in torch: fp32 inside, one rounding at the end, the dtype of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * gamma.float()).to(x.dtype)
