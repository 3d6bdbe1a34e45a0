"""Which layers of a config stay where it is made smaller."""

from __future__ import annotations

import re
from typing import Any

from transformers import PretrainedConfig

from npu_autopatch.verification.small_sizes import LAYERS, Sizes, read


class Layers:
    """Which layers of a config stay: the first of each kind that its lists and counts tell apart."""

    COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers", "encoder_layers", "depth")
    DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

    def __init__(self, config: PretrainedConfig) -> None:
        self.count = next((n for name in self.COUNTS if type(n := read(config, name)) is int), 0)
        kinds: list[list[Any]] = []
        for name in vars(config):
            value = read(config, name)
            if self._by_index(name, value):
                kinds.append([layer in value for layer in range(self.count)])
            elif self._by_layer(value):
                kinds.append([repr(entry) for entry in value])
            elif name in self.DENSE_FIRST and isinstance(value, int):
                kinds.append([layer < value for layer in range(self.count)])
        first = {kind: layer for layer, kind in reversed(list(enumerate(zip(*kinds, strict=True))))}
        self.kept = sorted(first.values())
        others = [layer for layer in range(self.count) if layer not in self.kept]
        self.kept = sorted(self.kept + others[: max(0, LAYERS - len(self.kept))])

    def of(self, name: str, value: Any, sizes: Sizes | AsTheyAre) -> Any:
        """The setting `name` for the layers that stay."""
        if self._by_index(name, value):
            return type(value)(self.kept.index(layer) for layer in value if layer in self.kept)
        if self._by_layer(value):
            return type(value)(sizes.of(name, value[layer]) for layer in self.kept)
        return sizes.of(name, value)

    def _by_layer(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == self.count

    def _by_index(self, name: str, value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and re.search("layers|ind(ex|ic)es|idxs|_ids", name) is not None
            and all(type(entry) is int and 0 <= entry < self.count for entry in value)
            and list(value) == sorted(set(value))
        )


class AsTheyAre:
    """The settings of one config, unchanged."""

    def of(self, name: str, value: Any) -> Any:
        return value
