"""`npu_swiglu`, `npu_geglu` and their backwards on the CPU. Contracts: aclnnSwiGlu, aclnnGeGluV3 as on Atlas A2/A3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.emulator.registration import ContractError, EmulatedOp

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FORMS = ("none", "tanh")  # what `approximate` 0 and 1 of npu_geglu stand for


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(a) * b``, where `a` and `b` are the halves of `input` along `dim`.

    `input` is contiguous, has 1 to 8 dimensions, an even size at `dim` and at least one element. Computed in fp32 and
    rounded once. Raises `ContractError`.
    """
    _refuse("npu_swiglu", input, dim)
    a, b = input.float().chunk(2, dim)
    return (F.silu(a) * b).to(input.dtype).contiguous()


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The gradient of `input`, in its dtype. Raises `ContractError`."""
    _refuse("npu_swiglu_backward", input, dim)
    _refuse_unlike("npu_swiglu_backward", "grad_output", grad_output, input, dim)
    a, b = input.float().chunk(2, dim)
    grad, sigmoid = grad_output.float(), torch.sigmoid(a)
    da = grad * b * sigmoid * (1 + a * (1 - sigmoid))
    return torch.cat((da, grad * a * sigmoid), dim).to(input.dtype)


def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """``(gelu(a) * b, gelu(a))``; `a` is the second half of `input` along `dim`, or the first if `activate_left`.

    `approximate` is 0 for the exact gelu and 1 for tanh; the rest is as for `npu_swiglu`. Raises `ContractError`.
    """
    _refuse("npu_geglu", input, dim, approximate)
    a, b = _activated_first(input.float().chunk(2, dim), activate_left)
    gelu = F.gelu(a, approximate=_FORMS[approximate])
    return (gelu * b).to(input.dtype).contiguous(), gelu.to(input.dtype).contiguous()


def npu_geglu_grad(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    """The gradient of `input`, in its dtype. Raises `ContractError`."""
    _refuse("npu_geglu_grad", input, dim, approximate)
    _refuse_unlike("npu_geglu_grad", "grad_output", grad_output, input, dim)
    _refuse_unlike("npu_geglu_grad", "gelu", gelu, input, dim)
    a, b = _activated_first(input.float().chunk(2, dim), activate_left)
    grad = grad_output.float()
    da = torch.ops.aten.gelu_backward(grad * b, a, approximate=_FORMS[approximate])
    return torch.cat(_activated_first((da, grad * gelu.float()), activate_left), dim).to(input.dtype)


def _activated_first(halves: tuple[Tensor, ...], activate_left: bool) -> tuple[Tensor, ...]:
    """From the order in memory to the activated half first, and back."""
    return halves if activate_left else halves[::-1]


def _refuse(op: str, input: Tensor, dim: int, approximate: int = 0) -> None:
    if not 1 <= input.dim() <= 8:
        raise ContractError(op, f"input of rank {input.dim()}", "rank 1 to 8")
    if not -input.dim() <= dim < input.dim():
        raise ContractError(op, f"dim {dim} for an input of rank {input.dim()}", "a dim of the input")
    if input.size(dim) % 2:
        raise ContractError(op, f"size {input.size(dim)} at dim {dim}", "an even size")
    if input.numel() == 0:
        raise ContractError(op, f"input {tuple(input.shape)}", "at least one element")
    if input.dtype not in _FLOATS:
        raise ContractError(op, f"input {input.dtype}", "float32, bfloat16 or float16")
    if not input.is_contiguous():
        raise ContractError(op, f"input with strides {input.stride()}", "a contiguous input")
    if approximate not in (0, 1):
        raise ContractError(op, f"approximate {approximate}", "0 for the exact gelu, 1 for tanh")


def _refuse_unlike(op: str, name: str, tensor: Tensor, input: Tensor, dim: int) -> None:
    shape = _half(input, dim)
    if list(tensor.shape) != shape or tensor.dtype != input.dtype:
        raise ContractError(op, f"{name} {tuple(tensor.shape)} {tensor.dtype}", f"{tuple(shape)} {input.dtype}")


def _half(input: Tensor, dim: int) -> list[int]:
    shape = list(input.shape)
    shape[dim] //= 2
    return shape


def _swiglu_shapes(input: Tensor, dim: int = -1) -> Tensor:
    return input.new_empty(_half(input, dim))


def _swiglu_backward_shapes(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    return input.new_empty(input.shape)


def _geglu_shapes(
    input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    return input.new_empty(_half(input, dim)), input.new_empty(_half(input, dim))


def _geglu_grad_shapes(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    return input.new_empty(input.shape)


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1] if len(inputs) > 1 else -1


def _swiglu_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (input,) = ctx.saved_tensors
    return torch.ops.npu.npu_swiglu_backward(grad.contiguous(), input, ctx.dim), None


def _save_geglu(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros where there is no gradient
    ctx.settings = inputs[1:]


def _geglu_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    gradient = torch.ops.npu.npu_geglu_grad(grad.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return gradient, None, None, None


OPS = (
    EmulatedOp(
        "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        npu_swiglu,
        _swiglu_shapes,
        backward=_swiglu_gradient,
        setup_context=_save_swiglu,
    ),
    EmulatedOp(
        "npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
        npu_swiglu_backward,
        _swiglu_backward_shapes,
    ),
    EmulatedOp(
        "npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)",
        npu_geglu,
        _geglu_shapes,
        backward=_geglu_gradient,
        setup_context=_save_geglu,
    ),
    EmulatedOp(
        "npu_geglu_grad(Tensor grad_output, Tensor input, Tensor gelu, int dim=-1, int approximate=1, "
        "bool activate_left=False) -> Tensor",
        npu_geglu_grad,
        _geglu_grad_shapes,
    ),
)
