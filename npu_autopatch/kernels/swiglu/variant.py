"""The variants of a gated MLP: which modules it calls, in which order, and what it does between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """The exact semantics of one gated MLP.

    `projections` are the attributes called with the input, in the order of the calls: two, or one whose output is
    split in halves. `gate` is the index of the projection, or of the half, that is activated. `activation` is an
    attribute, or empty where the forward calls the `function` ``silu``, ``gelu`` or ``gelu_tanh`` itself. `upcast`:
    the product is taken in fp32 and rounded to the dtype of the gate. `after` are the attributes called one after
    the other with the product. Before `cast`, one of them, comes a cast to the dtype of its weight. `tail` is the
    attribute with the probability of a functional dropout at the end.
    """

    projections: tuple[str, ...]
    gate: int
    activation: str
    function: str
    after: tuple[str, ...]
    cast: str = ""
    tail: str = ""
    upcast: bool = False
    viewed: bool = False  # split by a view of four dimensions, which takes rank 3 only
    ranks: tuple[int, ...] = ()  # those the original treats alike; empty if all
    option: bool = False  # a second parameter that is None

    @property
    def separate(self) -> bool:
        return len(self.projections) == 2

    @property
    def up_first(self) -> bool:
        """One projection, whose second half is activated."""
        return not self.separate and self.gate == 1

    @functools.cached_property
    def form(self) -> Variant:
        """What the product is of, whatever the attributes are called and whatever comes after it."""
        return Variant(("first", "second")[: len(self.projections)], self.gate, "", "", ("down",), upcast=self.upcast)

    def __str__(self) -> str:
        form = "separate" if self.separate else "fused_up_first" if self.up_first else "fused"
        form += "+upcast" * self.upcast + "+dropout" * bool(self.tail or len(self.after) > 1)
        if self.separate:
            return f"{form}, under gradients only"
        return f"{form}, SiLU under gradients only" if self.up_first and self.function in ("", "silu") else form
