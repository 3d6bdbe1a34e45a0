"""`npu_rotary_mul` and its backward on the CPU. Contract: aclnnRotaryPositionEmbedding as on Atlas A2/A3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_autopatch.emulator.registration import ContractError, EmulatedOp

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LIMIT = 1000  # of B and of N; in interleave mode of B * N
_TABLE_GRADIENT_LIMIT = 1024  # of B * N, where cos and sin need gradients


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """``input * cos + rotated(input) * sin`` over the last dimension, in the dtype of `input`.

    `input` has rank 4 (BNSD, BSND or SBND) or 3 (TND). `r1`, cos, and `r2`, sin, have its rank and last dimension
    and one of the broadcast forms of the layout; they are taken to its dtype. `rotary_mode` is ``half`` (the second
    half of D, negated, before the first) or ``interleave`` (neighbours). Raises `ContractError`.

    Halves are computed in fp32 and rounded once.
    """
    _refuse("npu_rotary_mul", input, r1, r2, rotary_mode, rotate)
    x, cos, sin = (t.to(input.dtype).float() for t in (input, r1, r2))
    return (x * cos + _turned(x, rotary_mode) * sin).to(input.dtype).contiguous()


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dcos, dsin)``; what is not asked for by `requires_grad` of `r1` and `r2` is not written.

    Raises `ContractError`.
    """
    _refuse("npu_rotary_mul_backward", input, r1, r2, rotary_mode, None)
    if grad.shape != input.shape or grad.dtype != input.dtype:
        got = f"grad {tuple(grad.shape)} {grad.dtype}"
        raise ContractError("npu_rotary_mul_backward", got, f"grad like input, {tuple(input.shape)} {input.dtype}")
    dy, x, cos, sin = (t.to(input.dtype).float() for t in (grad, input, r1, r2))
    dx = (dy * cos - _turned(dy * sin, rotary_mode)).to(input.dtype).contiguous()
    if not (r1.requires_grad or r2.requires_grad):
        return dx, torch.full_like(r1, float("nan")), torch.full_like(r2, float("nan"))
    if _batches_and_heads(input, r1) > _TABLE_GRADIENT_LIMIT:
        got = f"input {tuple(input.shape)} with cos that needs a gradient"
        raise ContractError("npu_rotary_mul_backward", got, f"B * N of at most {_TABLE_GRADIENT_LIMIT}")
    dcos = (dy * x).sum_to_size(r1.shape).to(r1.dtype)
    dsin = (dy * _turned(x, rotary_mode)).sum_to_size(r2.shape).to(r2.dtype)
    return dx, dcos, dsin


def _turned(x: Tensor, mode: str) -> Tensor:
    """A quarter turn of each pair; its transpose is its negative."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)


def _refuse(op: str, x: Tensor, cos: Tensor, sin: Tensor, mode: str, rotate: Tensor | None) -> None:
    if mode not in ("half", "interleave"):
        raise ContractError(op, f"rotary_mode {mode!r}", "half or interleave on these chips")
    if rotate is not None:
        raise ContractError(op, "rotate", "no rotate: its gradient is not supported")
    if x.dim() not in (3, 4) or cos.dim() != x.dim() or sin.shape != cos.shape:
        ranks = f"input of rank {x.dim()} with cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise ContractError(op, ranks, "rank 3 or 4 with cos and sin of that rank and one shape")
    width = x.size(-1)
    if width % 2 or not 0 < width < 896 or cos.size(-1) != width:
        raise ContractError(op, f"D {width} with cos of {cos.size(-1)}", "an even D below 896, cos and sin as wide")
    if x.numel() == 0:
        raise ContractError(op, "an empty input", "an input with elements")
    if any(t.dtype not in _FLOATS for t in (x, cos, sin)):
        raise ContractError(op, f"{x.dtype}, {cos.dtype}, {sin.dtype}", "float32, bfloat16 or float16")
    if not _layouts(x, cos, mode):
        forms = "11SD, 1S1D, S11D or T1D" if mode == "interleave" else "one of BNSD, BSND, SBND or TND, or a broadcast"
        got = f"cos {tuple(cos.shape)} for input {tuple(x.shape)} in mode {mode}"
        raise ContractError(op, got, f"{forms} form, with B and N below {_LIMIT}")


def _layouts(x: Tensor, cos: Tensor, mode: str) -> list[tuple[int, int]]:
    """B and N of each layout in which `cos` has a legal form for `x`."""
    if x.dim() == 3:  # TND; T is no batch
        total, heads, _ = x.shape
        found = [(1, heads)] if cos.shape[:2] in ((total, 1), (total, heads)) else []
        if mode == "interleave" and cos.shape[:2] != (total, 1):
            found = []
    else:
        found = []
        for b, n, s in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):  # BNSD, BSND, SBND
            batch, heads = x.size(b), x.size(n)
            shapes = [(1, 1), (batch, 1), (batch, heads)][: 1 if mode == "interleave" else 3]
            if cos.size(s) == x.size(s) and (cos.size(b), cos.size(n)) in shapes:
                found.append((batch, heads))
    within = [(b, n) for b, n in found if b < _LIMIT and n < _LIMIT]
    return [(b, n) for b, n in within if mode == "half" or b * n < _LIMIT]


def _batches_and_heads(x: Tensor, cos: Tensor) -> int:
    return min(b * n for b, n in _layouts(x, cos, "half"))


def _forward_shapes(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    return input.new_empty(input.shape)


def _backward_shapes(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    return input.new_empty(input.shape), r1.new_empty(r1.shape), r2.new_empty(r2.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.mode = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    gradients = torch.ops.npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.mode)
    dx, dcos, dsin = (g if wanted else None for g, wanted in zip(gradients, needed, strict=False))
    return dx, dcos, dsin, None, None


OPS = (
    EmulatedOp(
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
        npu_rotary_mul,
        _forward_shapes,
        backward=_backward,
        setup_context=_save,
    ),
    EmulatedOp(
        "npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half')"
        " -> (Tensor, Tensor, Tensor)",
        npu_rotary_mul_backward,
        _backward_shapes,
    ),
)
