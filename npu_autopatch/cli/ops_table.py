"""Our own table of torch_npu's ops: what each computes, takes and differentiates, with its signature in each train.

A train is a release of torch_npu for many versions of torch at once; signatures follow it, not the version.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What we know of one op. `schemas`: by train, where its signature changed; None where the op was missing again.

    `differentiable_since` is the first train with a gradient, None if there is none; `gradient` says of what.
    """

    name: str
    brief: str
    computes: str
    limits: list[str]
    gradient: str
    differentiable_since: str | None
    hardware: str
    used_by: list[str]
    use: str
    emulated: bool
    schemas: dict[str, str | None] = field(repr=False)

    @property
    def since(self) -> str:
        """The first train that has the op."""
        return next(train for train, schema in self.schemas.items() if schema)

    @property
    def signature(self) -> str:
        """As in the newest train."""
        return next(schema for schema in reversed(self.schemas.values()) if schema)

    @property
    def changes(self) -> Iterator[tuple[str, str]]:
        """Each train that changed the signature, and how."""
        for (_, old), (train, new) in pairwise(self.schemas.items()):
            if new is None or old is None:
                yield train, "there again" if new else "missing"
            else:
                yield train, _change(old, new)

    def knows(self, signature: str) -> bool:
        """Whether `signature` is that of some train, but for how its defaults are written."""
        return any(schema and _types(schema) == _types(signature) for schema in self.schemas.values())


@dataclass(frozen=True)
class Table:
    """The entries by name, and the versions of torch_npu they were taken from, by train."""

    trains: dict[str, list[str]]
    entries: dict[str, Entry]

    @property
    def snapshot(self) -> str:
        """What the table is a snapshot of, in words."""
        trains = list(self.trains)
        oldest, newest = self.trains[trains[0]][0], self.trains[trains[-1]][-1]
        return f"torch_npu {oldest} to {newest}, trains {trains[0]} to {trains[-1]}"

    def train(self, version: str) -> str:
        """The train of a version of torch_npu; empty if the table has not seen it."""
        public = version.partition("+")[0]
        return next((train for train, versions in self.trains.items() if public in versions), "")


@functools.cache
def table() -> Table:
    """The table, read once."""
    content = json.loads(Path(__file__).with_name("ops_table.json").read_text(encoding="utf-8"))
    return Table(content["trains"], {entry["name"]: Entry(**entry) for entry in content["ops"]})


def arguments(signature: str) -> dict[str, str]:
    """The arguments of a signature by name: type, and default if there is one."""
    inside = signature.partition("(")[2].rpartition(") -> ")[0]
    pieces = [piece for piece in re.split(r", (?![^\[(]*[\])])", inside) if piece not in ("", "*")]
    found = {}
    for piece in pieces:
        declared, equals, default = piece.partition("=")
        kind, name = declared.rsplit(" ", 1)
        found[name] = f"{kind}{equals}{default}"
    return found


def _types(signature: str) -> tuple[str, list[tuple[str, str]]]:
    kinds = [(name, kind.partition("=")[0]) for name, kind in arguments(signature).items()]
    return signature.rpartition(" -> ")[2], kinds


def _change(old: str, new: str) -> str:
    before, after = arguments(old), arguments(new)
    parts = []
    if added := [name for name in after if name not in before]:
        parts.append(f"takes {', '.join(added)} too")
    if dropped := [name for name in before if name not in after]:
        parts.append(f"takes {', '.join(dropped)} no more")
    for name in before:
        if name in after and before[name] != after[name]:
            parts.append(f"{name} is {after[name]}, was {before[name]}")
    results = [signature.rpartition(" -> ")[2] for signature in (old, new)]
    if results[0] != results[1]:
        parts.append(f"gives {results[1]}, gave {results[0]}")
    return "; ".join(parts) or "its arguments are in another order"
