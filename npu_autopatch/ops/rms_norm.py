"""`npu_rms_norm`: whether it can be called, what is legal, and what it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npu_autopatch.ops.capability import Capability, detect
from npu_autopatch.ops.legality import FLOATS, PLAIN

RMSNorm = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def capability() -> Capability:
    """Whether `npu_rms_norm` can be called here, with a gradient."""
    found = detect("npu_rms_norm", ("gamma", "epsilon"))
    if found.available and not found.differentiable:
        return Capability(found.op, "npu_rms_norm of this torch_npu has no gradient", False)
    return found


def op() -> RMSNorm:
    """The op: ``(x, gamma, eps) -> (y, rstd)``, contiguous; `gamma` of the dtype of `x`, or fp32."""
    overload: RMSNorm = torch.ops.npu.npu_rms_norm.default

    def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        # Results and gradient are contiguous on the device and have the strides of x in torch_npu's Meta kernel, so
        # a compiled graph would view what cannot be viewed. The device copies a non-contiguous x in any case.
        return overload(x.contiguous(), gamma, eps)

    return rms_norm


def legal(x: Tensor, weight: Tensor) -> bool:
    """Whether the op takes `x`, of a type in `PLAIN`, with a gamma made of `weight`: forward and backward."""
    return (
        type(weight) in PLAIN
        and x.dtype in FLOATS
        and weight.dtype in FLOATS
        and 1 < x.dim() < 9
        and x.size(-1) == weight.numel()
        and x.numel() > 0
        and weight.device == x.device
    )


def reference(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What the op computes, in torch: fp32 inside, one rounding at the end, the dtype of `x`."""
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd
