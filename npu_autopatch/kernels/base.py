"""What every kernel speaks in: `Site`, `Match`, `Refusal`, and `Kernel` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Site:
    """A class, function or registry entry in one modeling module that a kernel may serve.

    The replacement goes into `attribute` of `owner`. `name` is the site as users write it, ``qwen3.Qwen3RMSNorm``.
    """

    module: str
    name: str
    owner: Any
    attribute: str


@dataclass(frozen=True)
class Match:
    """A proved site: the variant in words, and the function that goes into the slot."""

    variant: str
    replacement: Callable[..., Any]


@dataclass(frozen=True)
class Refusal:
    """Why a site stays as it is."""

    reason: str


class Kernel(Protocol):
    """One family of fused replacement."""

    name: str

    def missing(self) -> str:
        """Why the ops this kernel needs cannot be used here; an empty string if they can."""

    def find(self, module: ModuleType) -> Iterable[Site]:
        """The sites of `module` this kernel may serve."""

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """Probe `site` on the CPU; the replacement fuses calls whose tensors are on one of `devices`."""


def site_name(module: str, name: str) -> str:
    """``transformers.models.qwen3.modeling_qwen3``, ``Qwen3RMSNorm`` -> ``qwen3.Qwen3RMSNorm``."""
    parts = module.split(".")
    parts = parts[2:-1] if module.startswith("transformers.models.") else parts[-1:]
    return ".".join((*parts, name)).replace("modeling_", "", 1)


def renamed(function: Callable[..., Any], parameters: tuple[str, ...], attributes: dict[str, str]) -> FunctionType:
    """`function` under other parameter and attribute names.

    So a replacement is called by the original's keywords and reads the original's attributes, with no look-up by
    string and no ``**kwargs`` at each call.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__
    local = [f"{name}_" if name in parameters else name for name in code.co_varnames[len(parameters) :]]
    new = code.replace(
        co_varnames=(*parameters, *local),
        co_names=tuple(attributes.get(name, name) for name in code.co_names),
    )
    return FunctionType(new, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
