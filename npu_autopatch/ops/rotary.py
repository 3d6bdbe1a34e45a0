"""`npu_rotary_mul`: whether it can be called, what is legal, and what it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npu_autopatch.ops.capability import Capability, detect

HALF, INTERLEAVE = "half", "interleave"
Rotation = Callable[[Tensor, Tensor, Tensor, str], Tensor]

# B * N in interleave mode, B and N in the other; D below 896
_MOST, _WIDEST = 1000, 896


def capability() -> Capability:
    """Whether `npu_rotary_mul` can be called here, with a gradient and in both modes.

    The mode is never left to a default; the trains before `rotary_mode` are declined.
    """
    found = detect("npu_rotary_mul", ("r1", "r2", "rotary_mode"))
    if found.available and not found.differentiable:
        return Capability(found.op, "npu_rotary_mul of this torch_npu has no gradient", False)
    return found


def op() -> Rotation:
    """The op: ``(x, cos, sin, mode)``, all of one rank, width and dtype."""
    overload: Rotation = torch.ops.npu.npu_rotary_mul.default
    return overload


def reference(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """What the op computes, in torch: fp32 inside, one rounding at the end, the dtype of `x`."""
    wide = x.float()
    if mode == HALF:
        first, second = wide.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-wide[..., 1::2], wide[..., 0::2]), -1).flatten(-2)
    return (wide * cos.float() + turned * sin.float()).to(x.dtype)


def legal(x: Tensor, cos: Tensor, mode: str) -> bool:
    """Whether `rotated` takes `x`, of rank 3 or 4, with `cos`, of rank 4 and broadcast over the heads if there are any.

    `x` is as wide as `cos` here, or wider where only a part of it is rotated.
    """
    if x.dim() == 4:
        batch, first, second, _ = x.shape
    elif x.dim() == 3:
        batch, (first, second, _) = 1, x.shape
    else:
        return False
    rows, one, length, width = cos.shape
    if one == 1 and length == second:  # B N S D
        heads = first
    elif length == 1 and one == first:  # B S N D
        heads = second
    elif (rows, one, length) == (batch, first, second):  # no heads: an angle for each vector
        batch = heads = rows = 1
    else:
        return False
    if rows != 1 and rows != batch:
        return False
    # In interleave mode cos may not differ by row: the rows are then laid one after the other, and B is 1.
    product = batch * heads if mode == INTERLEAVE and rows == 1 else max(batch, heads)
    return product < _MOST and width % 2 == 0 and 0 < width < _WIDEST and x.numel() > 0


def rotated(op: Rotation, mode: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The op for what `legal` admits: `x` of ``[B, N, S, D]``, ``[B, S, N, D]`` or ``[S, N, D]``, `cos` of rank 4.

    Attention's queries are views of ``[B, S, N, D]`` memory: they go to the op in that layout, without a copy, and
    come back as the same kind of view, as elementwise ops would leave them.
    """
    interleave = mode == INTERLEAVE

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dim() == 3:
            return rotate(x.unsqueeze(0), cos, sin).squeeze(0)
        heads_first = cos.size(1) == 1 and cos.size(2) == x.size(2)
        if not heads_first and cos.size(2) != 1:
            alone = (1, -1, 1, x.size(-1))
            return op(x.reshape(alone), cos.reshape(alone), sin.reshape(alone), mode).view(x.shape)
        if interleave and cos.size(0) != 1:
            if heads_first:
                x, cos, sin = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
            batch, length = x.shape[:2]
            one_row = (cos.reshape(1, batch * length, 1, -1), sin.reshape(1, batch * length, 1, -1))
            turned = op(x.reshape(1, batch * length, x.size(2), -1), *one_row, mode).view(x.shape)
            return turned.transpose(1, 2) if heads_first else turned
        if heads_first and not x.is_contiguous() and x.transpose(1, 2).is_contiguous():
            turned = op(x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2), mode)
            return turned.transpose(1, 2)
        return op(x.contiguous(), cos, sin, mode)

    return rotate
