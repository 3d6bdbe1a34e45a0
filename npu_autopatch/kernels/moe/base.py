"""A site of the kernel `moe` knows which form of experts it was found as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from npu_autopatch.kernels.base import Match, Refusal, Site


class Form(Protocol):
    """One way in which models write their experts."""

    def find(self, module: ModuleType) -> Iterator[Site]:
        """The sites of this form in `module`."""

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """As `Kernel.prove`."""


@dataclass(frozen=True)
class MoESite(Site):
    """A site, and the form that found it and proves it."""

    form: Form
