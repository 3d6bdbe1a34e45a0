"""One chain of one block as it was seen to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from npu_autopatch.analysis.recording import Op

Facts = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """One chain of one block, unpatched: its ops in the forward, the block's module, and the chains in and within it.

    `variants` are the words of our kernels for its sites. `batch` and `tokens` are what the mode was given.
    """

    chain: str
    ops: list[Op]
    module: nn.Module
    beside: Mapping[str, list[Op]]
    variants: tuple[str, ...]
    batch: int
    tokens: int
    across: bool = False
    norm_fused: bool = False

    @property
    def names(self) -> set[str]:
        """The ops by name."""
        return {op.name for op in self.ops}

    def setting(self, *names: str) -> Any:
        """The first of these settings that the module has."""
        return next((value for name in names if (value := getattr(self.module, name, None)) is not None), None)


def projected(op: Op) -> tuple[int, ...]:
    """The shape of what is projected: what is no parameter."""
    return next(shape for place, shape in enumerate(op.shapes) if place not in op.parameters)
