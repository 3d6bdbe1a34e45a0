"""What the parts of a model are called: their kind, and the numbers of their layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from npu_autopatch.analysis import chains, layers
from npu_autopatch.analysis.recording import CORE
from npu_autopatch.analysis.result import Chain


def kind(found: list[Chain]) -> str:
    """What a layer is made of, in a few words."""
    names = {chain.name for chain in found}
    core = next((chain for chain in found if chain.name == CORE), None)
    mixers = []
    if chains.LINEAR_ATTENTION in names:
        mixers.append("linear attention")
    if core is not None:
        window = core.facts.get("window")
        words = ["sparse"] * (chains.INDEXER in names) + ["latent"] * bool(core.facts.get("latent"))
        words += ["compressed"] * (chains.COMPRESSOR in names) + [f"sliding {window}"] * bool(window)
        mixers.append(" ".join([*words, "attention"]))
    ends = ["experts"] if chains.EXPERTS in names else ["MLP"] if chains.MLP in names else []
    return ", ".join([*mixers, *ends])


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: ``0-2, 5``; from four of equal distance ``3, 7, ... 47``."""
    numbers = list(numbers)
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(told if len(told) < 6 else [*told[:3], "...", told[-1]])


def order(layer: str) -> tuple[str, int]:
    return (layer.rpartition(".")[0], layers.number_of(layer)) if layer else ("", 0)
