"""Tiny instances of classes that are built from a configuration, every size of them another."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from npu_autopatch.kernels import probing

EXPERTS, TOP_K = 5, 3
# all different, even, and multiples of what alignment the CPU's grouped products ask for
_SIZES = tuple(range(16, 400, 8))
_ACTIVATION = "silu"


class Size(probing.Anything):
    """A size that is also a configuration, each attribute of which is a size of its own.

    Where a table is asked with it, as for the name of an activation, it is ``silu``.
    """

    given: dict[str, Any]
    names: dict[str, Size]

    def __new__(cls, value: int, given: dict[str, Any] | None = None, names: dict[str, Size] | None = None) -> Size:
        size = super().__new__(cls, value)
        size.given, size.names = given or {}, {} if names is None else names
        return size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.given:
            return self.given[name]
        if name not in self.names:
            self.names[name] = Size(_size(name, len(self.names)), self.given, self.names)
        return self.names[name]

    def get(self, name: str, default: Any = None) -> Any:
        """What a dictionary without any entry gives."""
        return default

    def __eq__(self, other: object) -> bool:
        return other == _ACTIVATION if isinstance(other, str) else int(self) == other

    def __hash__(self) -> int:
        return hash(_ACTIVATION)


def _size(name: str, index: int) -> int:
    """A hint from how sizes are called: an instance only has to run, what it computes is measured."""
    if any(word in name for word in ("top_k", "topk", "per_tok", "moe_k", "num_selected")):
        return TOP_K
    if "expert" in name and any(word in name for word in ("num", "n_routed", "n_expert", "groups")):
        return EXPERTS
    return _SIZES[index]


def build(cls: type[nn.Module], **given: Any) -> nn.Module:
    """An instance of `cls`, its parameters random, its sizes unequal. `given`: attributes of its configuration.

    Five experts and three of them for a token where the names of the configuration tell. Raises
    `probing.BuildError`.
    """
    config = Size(8, given)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]
    arguments = {p.name: config if "config" in p.name or len(named) == 1 else getattr(config, p.name) for p in named}
    try:
        module = cls(**arguments)
    except Exception as error:
        raise probing.BuildError(f"it cannot be built for a probe: {type(error).__name__}: {error}") from error
    randomise(module)
    return module.float()


def randomise(module: nn.Module) -> None:
    """Every parameter and every floating buffer drawn at std 0.3, the same each time."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    with torch.no_grad():
        for seed, tensor in enumerate(tensors):
            tensor.copy_(probing.samples(*tensor.shape, seed=100 + seed) * 0.3)
