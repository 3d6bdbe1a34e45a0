"""`npu_rms_norm` and its backward on the CPU. Contract: aclnnRmsNorm as on Atlas A2/A3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_autopatch.emulator.registration import ContractError, EmulatedOp

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``(y, rstd)`` of the root-mean-square norm over the dimensions of `gamma`.

    `input` has 1 to 8 dimensions, `gamma` the shape of its last ones and the same dtype, or fp32 for a half
    `input`. Computed in fp32 and rounded once; `y` has the dtype of `input`, `rstd` is fp32 with the normalised
    dimensions kept as 1. Raises `ContractError`.

    The contract does not fix the order of the sums inside. They are taken in fp64, here and in the backward, so that
    what a test measures is the replacement and not an order of ours.
    """
    _refuse("npu_rms_norm", input, gamma, least_rank=1)
    if epsilon < 0:
        raise ContractError("npu_rms_norm", f"epsilon {epsilon}", "epsilon of 0 or more")
    rstd = torch.rsqrt(input.double().pow(2).mean(_normalised(gamma), keepdim=True) + epsilon).float()
    return (input.float() * rstd * gamma.float()).to(input.dtype).contiguous(), rstd


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """``(dx, dgamma)``: `dx` in the dtype of `input`, `dgamma` always fp32. Raises `ContractError`."""
    _refuse("npu_rms_norm_backward", input, gamma, least_rank=2)
    if dy.shape != input.shape or dy.dtype != input.dtype:
        got = f"dy {tuple(dy.shape)} {dy.dtype}"
        raise ContractError("npu_rms_norm_backward", got, f"dy like input, {tuple(input.shape)} {input.dtype}")
    if rstd.dtype != torch.float32:
        raise ContractError("npu_rms_norm_backward", f"rstd {rstd.dtype}", "rstd torch.float32")
    x_hat, grad = input.double() * rstd, dy.double()
    d_hat = grad * gamma.double()
    dx = rstd * (d_hat - x_hat * (d_hat * x_hat).mean(_normalised(gamma), keepdim=True))
    dgamma = (grad * x_hat).sum(tuple(range(input.dim() - gamma.dim())))
    return dx.to(input.dtype).contiguous(), dgamma.float().contiguous()


def _normalised(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


def _refuse(op: str, input: Tensor, gamma: Tensor, least_rank: int) -> None:
    if not least_rank <= input.dim() <= 8:
        raise ContractError(op, f"input of rank {input.dim()}", f"rank {least_rank} to 8")
    if gamma.numel() == 0 or input.shape[input.dim() - gamma.dim() :] != gamma.shape:
        shapes = f"gamma {tuple(gamma.shape)} for input {tuple(input.shape)}"
        raise ContractError(op, shapes, "a non-empty gamma with the shape of the last dimensions of input")
    legal = input.dtype in _FLOATS and gamma.dtype in (input.dtype, torch.float32)
    if not legal:
        takes = "float32, bfloat16 or float16 with gamma of the same dtype, or float32"
        raise ContractError(op, f"input {input.dtype} with gamma {gamma.dtype}", takes)
    if input.device != gamma.device:
        raise ContractError(op, f"input on {input.device}, gamma on {gamma.device}", "one device")


def _forward_shapes(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    kept = input.shape[: input.dim() - gamma.dim()]
    rstd = input.new_empty((*kept, *(1,) * gamma.dim()), dtype=torch.float32)
    return input.new_empty(input.shape), rstd


def _backward_shapes(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), gamma.new_empty(gamma.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros where there is no gradient


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, *ctx.saved_tensors)
    return dx, dgamma, None


OPS = (
    EmulatedOp(
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        npu_rms_norm,
        _forward_shapes,
        backward=_backward,
        setup_context=_save,
    ),
    EmulatedOp(
        "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
        npu_rms_norm_backward,
        _backward_shapes,
    ),
)
