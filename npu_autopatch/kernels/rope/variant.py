"""The variants of a rotary function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HALF, INTERLEAVED, DEINTERLEAVED = "half", "interleaved", "interleave_in_half_out"
FULL, FIRST_HALF, HALF_SIZE, COMPLEX = "fullcos", "halfcos", "half_size_cos", "complex"


@dataclass(frozen=True)
class Variant:
    """The exact semantics of one rotary function.

    `mode` says which values make a pair: the two halves (``half``), neighbours (``interleaved``), or neighbours whose
    results end in the two halves (``interleave_in_half_out``). `table` says what of cos and sin is used: the full
    width (``fullcos``), the first half for both values of a pair (``halfcos``), a table of that half alone
    (``half_size_cos``) or complex numbers (``complex``). `lookup` is what the tables go through first: nothing, a
    selection by position (``positions``) or by the sections of three position axes (``sections``). `partial` is the
    side of a wider input that is rotated, ``first`` or ``last``; empty if all of it must be. With `tail`, cos may have
    fewer rows than the input, whose last ones are rotated. `flat`: the input is ``[S, N, D]``.

    `compute` is the dtype of the arithmetic, ``promoted`` from the input's and the table's, ``float32`` or
    ``float64``; `result` is that dtype (``promoted``) or the input's (``own``). `unsqueeze` is where the tables get
    the dimension of the heads, unless an argument says it; None if nowhere. `ranks` are the ranks of input and table
    that were proved.
    """

    mode: str
    table: str
    lookup: str = ""
    partial: str = ""
    tail: bool = False
    compute: str = "promoted"
    result: str = "promoted"
    unsqueeze: int | None = 1
    ranks: tuple[tuple[int, int], ...] = ()
    flat: bool = False

    def but(self, **changes: Any) -> Variant:
        """This variant with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        words = {"sections": "mrope_", "positions": ""}.get(self.lookup, "") + self.mode
        if self.table != FULL or self.mode == INTERLEAVED:
            words += f"_{self.table}"
        if self.partial:
            words += "_partial" if self.partial == "first" else "_partial_last"
        return words + ("_vision" if self.flat and self.compute == "float32" else "")

    @property
    def op_mode(self) -> str:
        """The mode of the op that serves it."""
        return "interleave" if self.mode == INTERLEAVED else "half"

    def widen(self) -> Callable[[Tensor], Tensor] | None:
        """From a real table of the original to one of full width in the op's order; None if it is that already."""
        whole = _doubled if self.mode == INTERLEAVED else _repeated
        if self.table == FULL:
            return None
        if self.table == FIRST_HALF:
            return lambda table: whole(table[..., : table.size(-1) // 2])
        return whole

    def split(self) -> Callable[[Tensor], Tensor] | None:
        """From an input to one in the op's order; None if it is that already."""
        return _split if self.mode == DEINTERLEAVED else None


def _doubled(table: Tensor) -> Tensor:
    return torch.stack((table, table), -1).flatten(-2)


def _repeated(table: Tensor) -> Tensor:
    return torch.cat((table, table), -1)


def _split(x: Tensor) -> Tensor:
    """Neighbours to the two halves."""
    split: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # type: ignore[no-untyped-call]
    return split


def by_sections(table: Tensor, sections: list[int]) -> Tensor:
    """The table ``[B, S, D]`` of the three position axes ``[3, B, S, D]``, each section from the next axis."""
    parts = table.split(sections * 2, -1)
    return torch.cat([part[place % 3] for place, part in enumerate(parts)], -1)
