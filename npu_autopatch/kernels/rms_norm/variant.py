"""The variants of an RMS norm, and what must hold of an instance for its class's proof to apply to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.ops.legality import autocasting

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
_MISSING = object()


@dataclass(frozen=True)
class Variant:
    """The exact semantics of one norm.

    `rounding` says where it rounds for a half input: ``round_then_mul`` (before the weight), ``fp32_mul`` (after
    it), ``t5`` (before it, to the weight's dtype) or ``no_upcast`` (after every step). `weight` is an attribute,
    empty if there is none; `offset` is what is added to it, in fp32 unless `offset_rounded`. `eps` is an attribute
    or a constant; where it may be None, `none_eps` says what that stands for in each of `FLOATS`. `gate` is ``post``
    or ``pre`` the norm, with its `activation`. `groups` is the attribute that holds the number of groups, or their
    size if `groups_are_sizes`.
    """

    rounding: str
    weight: str = ""
    offset: int = 0
    offset_rounded: bool = False
    eps: str | float = 0.0
    gate: str = ""
    activation: str = ""
    groups: str = ""
    groups_are_sizes: bool = False
    none_eps: tuple[float, ...] = ()

    def but(self, **changes: Any) -> Variant:
        """This variant with some fields changed."""
        return _changed(self, tuple(changes.items()))

    @functools.cached_property
    def form(self) -> Variant:
        """What it computes, whatever its attributes are called."""
        return self.but(weight=self.weight and "weight", eps=0.0, none_eps=(), groups=self.groups and "groups")

    def __str__(self) -> str:
        if self.gate:
            return f"gated_{self.gate}_{self.activation}" + ("_grouped" if self.groups else "")
        if not self.weight:
            return "weightless"
        return ("one_plus" if self.offset else self.rounding) + ("_grouped" if self.groups else "")

    def gamma(self, weight: Tensor) -> Tensor:
        """What the normalised values are multiplied by."""
        if not self.offset:
            return weight
        return (1.0 + weight).float() if self.offset_rounded else 1.0 + weight.float()

    def result_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype of the original's result, before a gate."""
        if self.rounding == "fp32_mul":
            return x
        if self.rounding == "t5" and weight is not torch.float32:
            return weight
        return torch.promote_types(x, torch.float32 if self.offset and not self.offset_rounded else weight)


@functools.cache  # most classes of a process go through the same few
def _changed(variant: Variant, changes: tuple[tuple[str, Any], ...]) -> Variant:
    return replace(variant, **dict(changes))


@dataclass(frozen=True)
class Conditions:
    """What an instance must be like for its class's proof to hold.

    `pinned` attributes have the proved value, `sizes` are the last dimension, or a tuple of it, `methods` are not
    overridden by a subclass or on the instance; `ranks` are those the original treats alike, and a dimension of
    length one too if `unit_length`.
    """

    pinned: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    methods: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = tuple(range(2, 9))
    unit_length: bool = True

    def guard(self, variant: Variant) -> Callable[[Any, Tensor], bool] | None:
        """The test at each call; None where nothing needs one."""
        pinned, sizes, methods = tuple(self.pinned.items()), self.sizes, tuple(self.methods.items())
        ranks = self.ranks if self.ranks != Conditions.ranks or not self.unit_length else None
        unit_length = self.unit_length
        # autocast takes pow and rsqrt to fp32, which shows where the original did not go there itself
        autocast = variant.rounding == "no_upcast"
        if not (pinned or sizes or methods or ranks or autocast):
            return None

        def applies(self: Any, x: Tensor) -> bool:
            if ranks is not None and (x.dim() not in ranks or (not unit_length and x.size(-2) == 1)):
                return False
            if autocast and autocasting(x):
                return False
            for name, value in pinned:
                found = getattr(self, name, _MISSING)
                if type(found) is not type(value) or found != value:
                    return False
            for name in sizes:
                found = getattr(self, name, _MISSING)
                if found != x.shape[-1:] and (found,) != x.shape[-1:]:
                    return False
            for name, method in methods:
                if name in self.__dict__ or getattr(type(self), name, None) is not method:
                    return False
            return True

        return applies
