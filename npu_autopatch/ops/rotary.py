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


# How an input goes to the op: as it is; with heads and tokens swapped, which is how attention's views lie in memory;
# its rows one after the other, so that angles may differ by row in interleave mode; each vector alone; or, of rank 3,
# as one row.
AS_IT_IS, SWAPPED, SWAPPED_IN_ROWS, IN_ROWS, ALONE, ONE_ROW = 1, 2, 3, 4, 5, 6


def placement(mode: str, partial: bool, swaps: bool) -> Callable[[Tensor, tuple[int, ...]], int]:
    """The test of an input of rank 3 or 4 against the shape of its tables: how it goes to the op, 0 if it may not.

    The input is ``[B, N, S, D]``, ``[B, S, N, D]``, ``[S, N, D]`` or has no heads; the tables have rank 4, and may be
    narrower where an input is rotated in part (`partial`). `swaps`: it is rotated as it stands, so its strides count.
    """
    interleave = mode == INTERLEAVE

    def place(x: Tensor, table: tuple[int, ...]) -> int:
        shape = x.shape
        if len(shape) == 4:
            batch, first, second, wide = shape
        elif len(shape) == 3:
            batch, (first, second, wide) = 1, shape
        else:
            return 0
        rows, one, length, width = table
        if wide != width and not (partial and wide > width):
            return 0
        if not (batch and first and second and 0 < width < _WIDEST) or width % 2:
            return 0
        if one == 1 and length == second:  # B N S D
            heads, at = first, AS_IT_IS
        elif length == 1 and one == first:  # B S N D
            heads, at = second, IN_ROWS
        elif table == (batch, first, second, width):
            return ALONE
        else:
            return 0
        if rows != 1 and rows != batch:
            return 0
        if interleave:
            if rows != 1:  # angles by row
                return 0 if heads >= _MOST else SWAPPED_IN_ROWS if at == AS_IT_IS else IN_ROWS
            if batch * heads >= _MOST:
                return 0
        elif batch >= _MOST or heads >= _MOST:
            return 0
        if at == AS_IT_IS and swaps and first != 1 and second != 1 and len(shape) == 4:
            stride = x.stride()
            dense = batch == 1 or stride[0] == first * second * width
            if dense and stride[1] == width and stride[2] == first * width and stride[3] == 1:
                return SWAPPED
        return AS_IT_IS if len(shape) == 4 else ONE_ROW

    return place


def rotated(op: Rotation, mode: str) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """The op for an input as `placement` says, with tables as `lay` makes them.

    Attention's queries are views of ``[B, S, N, D]`` memory: they go to the op in that layout, without a copy, and
    come back as the same kind of view, as elementwise ops would leave them.
    """

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, at: int) -> Tensor:
        if at == AS_IT_IS:
            return op(x.contiguous(), cos, sin, mode)
        if at == SWAPPED:
            return op(x.transpose(1, 2), cos, sin, mode).transpose(1, 2)
        if at == ONE_ROW:
            return op(x.unsqueeze(0).contiguous(), cos, sin, mode).squeeze(0)
        if at == ALONE:
            return op(x.reshape(1, -1, 1, x.size(-1)), cos, sin, mode).view(x.shape)
        swapped = x.transpose(1, 2) if at == SWAPPED_IN_ROWS else x
        turned = op(swapped.reshape(1, -1, swapped.size(-2), x.size(-1)), cos, sin, mode).view(swapped.shape)
        return turned.transpose(1, 2) if at == SWAPPED_IN_ROWS else turned

    return rotate


def lay(table: Tensor, at: int) -> Tensor:
    """A table of rank 4 in the layout that `at` gives the input."""
    if at in (AS_IT_IS, ONE_ROW):
        return table
    if at == SWAPPED:
        return table.transpose(1, 2)
    return table.reshape(1, -1, 1, table.size(-1))
