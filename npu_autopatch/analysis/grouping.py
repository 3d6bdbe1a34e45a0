"""Ops that stand together: of one call, of one module."""

from __future__ import annotations

import re
from collections.abc import Iterable

from npu_autopatch.analysis.chains import norms, projects
from npu_autopatch.analysis.recording import Op


def each_norm(ops: Iterable[Op]) -> list[list[Op]]:
    """The ops of each norm over the rows. One that multiplies by weights is no norm, but a gate with a norm in it."""
    found = list(ops)
    sites = [call for call in calls(found, "rms_norm") if not any(map(projects, call))]
    return sites + [[op] for op in found if norms(op) and not op.within("rms_norm")]


def calls(ops: Iterable[Op], kind: str) -> list[list[Op]]:
    """The ops of each call of that kind."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        if scope := op.within(kind):
            found.setdefault(scope.number, []).append(op)
    return list(found.values())


def one_expert(op: Op) -> bool:
    """Whether it runs in one of a list of modules within a block of experts: those are no MLPs of their own."""
    block = op.within("moe")
    return block is not None and bool(re.search(r"\.\d+(\.|$)", op.module.removeprefix(block.module)))


def children(layer: str, ops: list[Op]) -> list[tuple[str, list[Op]]]:
    """The modules directly within a layer, with their ops."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        name = op.module.removeprefix(layer).removeprefix(".").partition(".")[0]
        if name:
            found.setdefault(f"{layer}.{name}", []).append(op)
    return list(found.items())


def sublayers(layer: str, ops: list[Op]) -> list[str]:
    """The parts of a layer that stand in a list in it."""
    found = (re.match(rf"{re.escape(layer)}\.\w+\.\d+", op.module) for op in ops)
    return list(dict.fromkeys(match.group() for match in found if match))


def inside(path: str, home: str) -> bool:
    """Whether a module is `home` or stands in it."""
    return path == home or path.startswith(f"{home}.")
