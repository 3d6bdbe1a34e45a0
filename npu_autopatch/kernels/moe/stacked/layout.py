"""Where a module of stacked experts holds its weights, as the shapes of an instance with unequal sizes allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from npu_autopatch.kernels import probing


@dataclass(frozen=True)
class Sizes:
    """Of one instance. `named` counts the identity experts too, which have ids and no weights."""

    experts: int
    named: int
    hidden: int
    inner: int


@dataclass(frozen=True)
class Layout:
    """The parameters by what they do, all of the module itself or all of its child `holder`.

    `first` makes gate and up side by side, or one of them where `second` makes the other; ``[E, out, in]``, the last
    two axes exchanged if it is `first_transposed`. Likewise `down`. Where `flattened` names an attribute, that is the
    number of experts, and the weights are of rank 2, those of one expert after those of another.
    """

    first: str
    down: str
    second: str = ""
    first_bias: str = ""
    down_bias: str = ""
    first_transposed: bool = False
    down_transposed: bool = False
    holder: str = ""
    flattened: str = ""
    identity: bool = False


def layouts(module: nn.Module) -> Iterator[tuple[Layout, Sizes]]:
    """Every layout that the shapes of the parameters of `module` allow."""
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}
    holders = {name.rpartition(".")[0] for name in named}
    if len(holders) != 1 or "." in (holder := next(iter(holders))):
        return
    named = {name.rpartition(".")[2]: parameter for name, parameter in named.items()}
    by_rank = [{name: p for name, p in named.items() if p.dim() == rank} for rank in (2, 3)]
    if sum(map(len, by_rank)) != len(named):
        return
    others, stacks = by_rank
    if stacks:
        yield from _of_stacks(stacks, others, holder, "")
    elif len(others) == 3 and len({tuple(weight.shape) for weight in others.values()}) == 1:
        rows = next(iter(others.values())).size(0)
        for name, value in integers(module).items():
            if 1 < value < rows and rows % value == 0:
                views = {key: weight.view(int(value), -1, weight.size(-1)) for key, weight in others.items()}
                yield from _of_stacks(views, {}, holder, name)


def integers(module: nn.Module) -> dict[str, int]:
    settings = probing.settings_of(module).items()
    return {name: value for name, value in settings if isinstance(value, int) and not isinstance(value, bool)}


def _of_stacks(
    stacks: dict[str, Tensor], vectors: dict[str, Tensor], holder: str, flattened: str
) -> Iterator[tuple[Layout, Sizes]]:
    if len(stacks) not in (2, 3):
        return
    for down in reversed(stacks):
        first, *second = (name for name in stacks if name != down)
        for first_transposed, down_transposed in itertools.product((False, True), repeat=2):
            made, taken = _out_in(stacks[first], first_transposed)
            hidden, inner = _out_in(stacks[down], down_transposed)
            if taken != hidden or made != inner * (1 if second else 2):
                continue
            if second and stacks[second[0]].shape != stacks[first].shape:
                continue
            experts, named = stacks[down].size(0), stacks[first].size(0)
            if experts > named:
                continue
            for first_bias, down_bias in _biases(vectors, (named, made), (experts, hidden), bool(second)):
                yield (
                    Layout(
                        first,
                        down,
                        second[0] if second else "",
                        first_bias,
                        down_bias,
                        first_transposed,
                        down_transposed,
                        holder,
                        flattened,
                        identity=experts != named,
                    ),
                    Sizes(experts, named, hidden, inner),
                )


def _out_in(weight: Tensor, transposed: bool) -> tuple[int, int]:
    _, out, taken = weight.shape
    return (taken, out) if transposed else (out, taken)


def _biases(vectors: dict[str, Any], first: Any, down: Any, separate: bool) -> Iterator[tuple[str, str]]:
    """The pairs of names that may be the biases of both products: none, or both."""
    if not vectors:
        yield "", ""
    elif len(vectors) == 2 and not separate:
        for one, other in itertools.permutations(vectors):
            if vectors[one].shape == first and vectors[other].shape == down:
                yield one, other
