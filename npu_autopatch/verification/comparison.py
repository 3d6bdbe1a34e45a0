"""A pass against that of the original and one in fp64: the rule for being no worse than the original.

The mean error is at most one and a half times the original's, plus one unit in the last place of the largest value.
The mean over a few numbers is a matter of luck: where one draw of inputs has a pass behind, several decide.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from npu_autopatch.verification.choices import Choices
from npu_autopatch.verification.result import Largest

Errors = dict[str, tuple[float, float, float]]


@dataclass
class Pass:
    """One pass: each tensor returned by its name, what kind of thing is returned, and the gradients by their names."""

    returned: dict[str, Tensor]
    kind: Any
    gradients: dict[str, Tensor | None]
    choices: Choices
    calls: Counter[str] = field(default_factory=Counter)


def unlike(got: Pass, original: Pass, served: Iterable[str] = ("",)) -> list[str]:
    """Where `got` returns another kind of thing than `original`, or lacks a gradient that it has.

    A parameter below a module of `served` may have zeros where the original has no gradient.
    """
    found = [] if got.kind == original.kind else [f"it returns {got.kind}, not {original.kind}"]
    for name, theirs in original.gradients.items():
        mine = got.gradients[name]
        if mine is not None and theirs is not None:
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                found.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}")
        elif mine is not None and (mine.any() or not name.startswith(tuple(served))):
            found.append(f"{name}: a gradient where there is none")
        elif theirs is not None:
            found.append(f"{name}: no gradient")
    for name, value in original.returned.items():
        if not value.is_floating_point() and not torch.equal(got.returned[name], value):
            found.append(f"{name}: other numbers")
    return found


def errors(got: Pass, original: Pass, exact: Pass, dtype: torch.dtype) -> Errors:
    """The mean error of all that has one, that of the original, and one unit in the last place of the largest value.

    Narrow dtypes leave few digits of some gradients (a scalar, a router): there all are one part, each relative to its
    largest.
    """
    parts = [(n, got.returned[n], t, exact.returned[n]) for n, t in original.returned.items() if t.is_floating_point()]
    gradients = _with_gradients(got, original, exact)
    if dtype is not torch.float32 and gradients:
        ours, theirs, right = (as_one(gradients, which) for which in (1, 2, 3))
        gradients = [("all gradients", ours, theirs, right)]
    return {
        name: (error(mine, right), error(theirs, right), torch.finfo(dtype).eps * right.abs().max().item())
        for name, mine, theirs, right in parts + gradients
        if right.numel()
    }


def typically_behind(draws: list[Errors]) -> dict[str, str]:
    """The parts whose error is typically above one and a half times the original's and a unit, and by how much.

    By the geometric mean of how far over that ours is in each draw. Where a model itself amplifies rounding, an
    attention that is not scaled, the error of one draw outweighs the sum of all others, ours and the original's alike:
    a sum over draws would compare two such accidents.
    """
    found = {}
    for name in dict.fromkeys(name for draw in draws for name in draw):
        there = [draw[name] for draw in draws if name in draw]
        limits = [(mine, 1.5 * theirs + unit) for mine, theirs, unit in there]
        over = [mine / limit if limit else math.inf if mine else 0.0 for mine, limit in limits]
        typical = math.exp(sum(math.log(max(each, 1e-3)) if each == each else math.inf for each in over) / len(over))
        if not typical <= 1:
            words = ", ".join(f"{error:.2e}" for error in there[0][:2])
            found[name] = f"{name}: {1.5 * typical:.3g} times the original's error (ours and its: {words})"
    return found


def largest(got: Pass, original: Pass, exact: Pass, dtype: torch.dtype) -> tuple[Largest | None, Largest | None]:
    """Of what is returned, and of the gradients: the part in which we are furthest off beside the original."""
    returned = [
        (n, got.returned[n], t, exact.returned[n]) for n, t in original.returned.items() if t.is_floating_point()
    ]
    found = []
    for parts in (returned, _with_gradients(got, original, exact)):
        measured = []
        for name, mine, theirs, right in parts:
            if right.numel() and mine.shape == theirs.shape == right.shape and right.any():
                unit = torch.finfo(dtype).eps * right.abs().max().item()
                far = [((t.cpu().double() - right).abs().max() / unit).item() for t in (mine, theirs)]
                measured.append(Largest(name, *far))
        found.append(furthest(measured))
    return found[0], found[1]


def furthest(measured: Iterable[Largest | None]) -> Largest | None:
    """The one that is furthest behind the original; a NaN is."""
    there = [each for each in measured if each is not None]
    return max(there, key=lambda e: (e.ours != e.ours, e.ours / (e.original + 1)), default=None)


def error(got: Tensor, exact: Tensor) -> float:
    """The mean distance over all elements."""
    return (got.cpu().double() - exact).abs().mean().item()


def as_one(pairs: list[tuple[str, Tensor, Tensor, Tensor]], which: int) -> Tensor:
    """One of the tensors of each pair, relative to the largest exact value, side by side."""
    there = [(pair[1:][which - 1], pair[3]) for pair in pairs if pair[3].any()]
    return torch.cat([(tensor.cpu().double() / right.abs().max()).flatten() for tensor, right in there])


def flat(output: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors in `output` by their names, and what kind of thing it is: structure, dtypes and shapes."""
    leaves, kind = tree_flatten(output)
    returned = {}
    shapes: list[tuple[Any, ...]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            returned[_name(output, place)] = leaf.detach()
            shapes.append((leaf.dtype, tuple(leaf.shape)))
        else:
            shapes.append((type(leaf),))
    return returned, (str(kind), shapes)


def _with_gradients(got: Pass, original: Pass, exact: Pass) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    found = []
    for name, theirs in original.gradients.items():
        mine, right = got.gradients[name], exact.gradients[name]
        if theirs is not None and mine is not None and right is not None:
            found.append((name, mine, theirs, right.double()))
    return found


def _name(output: Any, place: int) -> str:
    if isinstance(output, dict):
        for name, value in output.items():
            count = len(tree_flatten(value)[0])
            if place < count:
                return name if count == 1 else f"{name} {place}"
            place -= count
    return f"output {place}"
