"""Which layers of a model are alike, and the model with few of each kind, its sizes kept."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from npu_autopatch.verification import small

LAYER = re.compile(r"^(.*?\.?\w+\.\d+)(?:\.|$)")
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "exponential_"}
Build = Callable[[PretrainedConfig], nn.Module]
Alike = dict[str, tuple[int, ...]]  # by the path of a layer, the numbers of those it stands for


def layer_of(path: str) -> str:
    """The layer a module belongs to: its path up to the first number; empty outside the layers."""
    found = LAYER.match(path)
    return found.group(1) if found else ""


def number_of(layer: str) -> int:
    """The number at the end of a layer's path."""
    return int(layer.rpartition(".")[2])


def alike(model: nn.Module) -> Alike:
    """Which layer of each kind stands for the others."""
    return _representatives(_kinds(model, _numbered(model)))


def fewer(config: PretrainedConfig, build: Build) -> tuple[nn.Module, Alike]:
    """A model without values that has each kind of layer, and which layers stand for which.

    A layer stands for those of the same modules, sizes and settings. Where a kind has more than one, the layer that
    stands for it has a layer before it, for what begins in one layer and ends in the next.
    """
    whole = on_no_device(config, build)
    numbered = _numbered(whole)
    kinds = _kinds(whole, numbered)
    few = _reduced(config, kinds)
    if few is not None:
        model = on_no_device(few[0], build)
        of_kept = {path: kinds[old] for path, old in few[1].items()}
        found = {path: signature for _, path, signature in _signatures(model, numbered)}
        if found == {path: signature for path, (signature, _) in of_kept.items()}:
            return model, _representatives(of_kept)
    return whole, _representatives(kinds)


def on_no_device(config: PretrainedConfig, build: Build) -> nn.Module:
    """The model in bf16, its weights without values."""
    with torch.device("meta"), _Unfilled():
        return build(copy.deepcopy(config)).to(torch.bfloat16).eval()


class _Unfilled(TorchFunctionMode):
    """Leaves out what only fills a tensor: there are no values, and thousands of experts are to be built."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        home, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
        fills = home == nn.init.__name__ or name in _FILLS
        filled = args[0] if args else (kwargs or {}).get("tensor")
        return filled if fills and isinstance(filled, Tensor) else function(*args, **(kwargs or {}))


Kinds = dict[str, tuple[Any, tuple[int, ...]]]


def _kinds(model: nn.Module, numbered: set[tuple[str, str]]) -> Kinds:
    """By path of a layer: its signature, and the numbers of the layers beside it that have the same."""
    signatures = _signatures(model, numbered)
    return {
        path: (mine, tuple(number_of(other) for its, other, theirs in signatures if (its, theirs) == (home, mine)))
        for home, path, mine in signatures
    }


def _numbered(model: nn.Module) -> set[tuple[str, str]]:
    """The settings within a layer that are its number: submodule and name."""
    always: dict[tuple[str, str], bool] = {}
    for path in _layers(model):
        for name, module in model.get_submodule(path).named_modules():
            for setting, value in vars(module).items():
                if type(value) is int:
                    always[name, setting] = always.get((name, setting), True) and value == number_of(path)
    return {setting for setting, same in always.items() if same}


def _layers(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name and layer_of(name) == name]


def _signatures(model: nn.Module, numbered: set[tuple[str, str]]) -> list[tuple[str, str, Any]]:
    """Of each layer: the list it is in, its path, and all that makes it differ from others but its number."""
    found = [(path, _signature(model.get_submodule(path), numbered)) for path in _layers(model)]
    return [(path.rpartition(".")[0], path, signature) for path, signature in found]


def _signature(layer: nn.Module, numbered: set[tuple[str, str]]) -> Any:
    parts = []
    for name, module in layer.named_modules():
        told = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, type(None)))}
        settings = tuple(sorted((k, repr(v)) for k, v in told.items() if (name, k) not in numbered))
        weights = tuple((k, tuple(p.shape)) for k, p in module.named_parameters(recurse=False))
        parts.append((name, type(module).__qualname__, settings, weights))
    return tuple(parts)


def _reduced(config: PretrainedConfig, kinds: Kinds) -> tuple[PretrainedConfig, dict[str, str]] | None:
    """The config with few layers, and which path in the whole model each layer of it had; None where it has no list."""
    lists = {path.rpartition(".")[0] for path in kinds}
    if len(lists) != 1:
        return None
    home = lists.pop()
    kept: set[int] = set()
    for _, numbers in kinds.values():
        kept |= {numbers[0]} if numbers[0] or len(numbers) < 2 else {numbers[0], numbers[1]}
    chosen = sorted(kept)
    few = small.fewer_layers(config, chosen)
    return few, {f"{home}.{place}": f"{home}.{number}" for place, number in enumerate(chosen)}


def _representatives(kinds: Kinds) -> Alike:
    """The last layer there is of each kind."""
    last = {(path.rpartition(".")[0], numbers): path for path, (_, numbers) in kinds.items()}
    return {path: numbers for (_, numbers), path in last.items()}
