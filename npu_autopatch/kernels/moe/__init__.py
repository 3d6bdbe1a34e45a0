"""Mixtures of experts: each form in which models write them is found and proved by a module of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from npu_autopatch.kernels.base import Match, Refusal, Site
from npu_autopatch.kernels.moe import grouped_linear, interface, loops, stacked
from npu_autopatch.kernels.moe.base import Form, MoESite
from npu_autopatch.ops import grouped_matmul, token_permute


class MoEKernel:
    """Runs experts as grouped matrix products, tokens permuted before and un-permuted after them."""

    name = "moe"
    forms: tuple[Form, ...] = (interface, stacked, grouped_linear, loops)

    def missing(self) -> str:
        return grouped_matmul.capability().missing or token_permute.capability().missing

    def find(self, module: ModuleType) -> Iterator[Site]:
        """What each form finds in `module`."""
        for form in self.forms:
            yield from form.find(module)

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """As the form that found it does."""
        assert isinstance(site, MoESite)
        return site.form.prove(site, devices)


KERNEL = MoEKernel()
