"""What each variant computes, written out; and the inputs of a probe."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.rope.variant import COMPLEX, DEINTERLEAVED, INTERLEAVED, Variant, by_sections

# all different, so that no dimension is taken for another
BATCH, LENGTH, WIDTH, WIDER, ROWS = 2, 5, 16, 24, 7
HEADS = (3, 4, 6)  # of the inputs
SECTIONS = [2, 3, 3]
# layout of the inputs: the shape for a number of heads, and the leading dimensions of the table
LAYOUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "BNSD": (lambda n: (BATCH, n, LENGTH), (BATCH, LENGTH)),
    "BSND": (lambda n: (BATCH, LENGTH, n), (BATCH, LENGTH)),
    "SND": (lambda n: (LENGTH, n), (LENGTH,)),
    "BNSD of one row": (lambda n: (BATCH, n, LENGTH), (LENGTH,)),
    "BSND of one row": (lambda n: (BATCH, LENGTH, n), (LENGTH,)),
    "BNSD of rank 4": (lambda n: (BATCH, n, LENGTH), (1, 1, LENGTH)),
    "BSD": (lambda n: (BATCH, LENGTH), (BATCH, LENGTH)),
}


@functools.cache
def sample(dtype: torch.dtype, scale: float, seed: int, *shape: int) -> Tensor:
    """Random values; callers must not write to them."""
    return (probing.samples(*shape, seed=seed) * scale).to(dtype)


@functools.cache
def tables(dtype: torch.dtype, complex_: bool, *shape: int) -> tuple[Tensor, ...]:
    """Cos and sin of independent angles, whose halves differ; or one complex table."""
    angles = [probing.samples(*shape, seed=seed) * 2 for seed in (20, 21)]
    if complex_:
        return (torch.complex(angles[0].cos(), angles[1].sin()),)
    return angles[0].cos().to(dtype), angles[1].sin().to(dtype)


@functools.cache
def positions() -> Tensor:
    """A position for each token, not in order."""
    return torch.tensor([[4, 0, 6, 2, 2], [1, 5, 3, 0, 6]])


def exact(variant: Variant, x: Tensor, cos: Tensor, sin: Tensor, unsqueeze: int | None) -> Tensor:
    """The rotation of `x` in the dtype of its arguments, `cos` and `sin` as the original gets them."""
    cos, sin = placed(variant, cos, sin, unsqueeze)
    width = cos.size(-1)
    kept: Tensor | None = None
    if variant.partial and width < x.size(-1):
        kept, x = (x[..., width:], x[..., :width]) if variant.partial == "first" else (x[..., :-width], x[..., -width:])
    still: Tensor | None = None
    if variant.tail:
        still, x = x[..., : -cos.size(-2), :], x[..., -cos.size(-2) :, :]
    if variant.mode == DEINTERLEAVED:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    turned = x * cos + quarter_turn(x, variant.mode) * sin
    if still is not None:
        turned = torch.cat((still.to(turned.dtype), turned), -2)
    if kept is not None:
        turned = torch.cat((turned, kept) if variant.partial == "first" else (kept, turned), -1)
    return turned


def placed(variant: Variant, cos: Tensor, sin: Tensor, unsqueeze: int | None) -> tuple[Tensor, Tensor]:
    """The tables at full width, with the dimension of the heads."""
    if variant.lookup == "positions":
        cos, sin = cos[positions()], sin[positions()]
    elif variant.lookup == "sections":
        cos, sin = by_sections(cos, SECTIONS), by_sections(sin, SECTIONS)
    if widen := variant.widen():
        cos, sin = widen(cos), widen(sin)
    if unsqueeze is not None:
        cos, sin = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
    return cos, sin


def quarter_turn(x: Tensor, mode: str) -> Tensor:
    """Each pair turned by 90 degrees."""
    if mode == INTERLEAVED:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def close(got: Tensor, expected: Tensor) -> bool:
    """Whether two fp32 computations of one formula may differ so."""
    return got.shape == expected.shape and bool(torch.allclose(got.float(), expected, rtol=1e-4, atol=1e-4))


def real_and_imaginary(variant: Variant, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The two tables of a probe, of a complex one its parts."""
    if variant.table == COMPLEX:
        return found[0].real, found[0].imag
    return found[0], found[1]
