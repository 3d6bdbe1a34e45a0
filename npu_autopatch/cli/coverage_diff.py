"""What differs between two sweeps: of two versions of transformers, or before and after a change of the package."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_autopatch.cli.coverage_report import Coverage, detail, kernels_in
from npu_autopatch.listing import matches
from npu_autopatch.reporting import FAILED, PATCHED, REFUSED, STATES, Row

APPEARED, VANISHED, CHANGED = KINDS = ("appeared", "vanished", "changed")
STILL_THERE = "still there, but not taken for a site"


@dataclass(frozen=True)
class Change:
    """A site that differs. `old` is None if it appeared; `new` if it vanished, and `fate` is what became of it.

    `lost`: it was patched, and is not although it could be.
    """

    old: Row | None
    new: Row | None
    fate: str = ""
    lost: bool = False

    @property
    def row(self) -> Row:
        row = self.new or self.old
        assert row is not None
        return row

    @property
    def kind(self) -> str:
        """One of the `KINDS`; changed is a state or a variant."""
        return CHANGED if self.old and self.new else APPEARED if self.new else VANISHED

    @property
    def words(self) -> str:
        """In one line: its kernel, what it was and what it is."""
        kernel, old, new = self.row.kernel or "class", self.old, self.new
        if new is None:
            variant = f" ({self.row.variant})" if self.row.variant else ""
            return f"{kernel}, was {self.row.state}{variant}: {self.fate}"
        if old is None:
            return f"{kernel} {_said(new)}"
        if old.state == new.state:
            return f"{kernel} {new.state}: {old.variant or 'none'} -> {new.variant or 'none'}"
        return f"{kernel} {_said(new)} (was {_said(old)})"


@dataclass(frozen=True)
class Diff:
    """The changes between two sweeps, in the order of their sites' names."""

    old: Coverage
    new: Coverage
    old_rows: list[Row]
    changes: list[Change]

    def of(self, kind: str) -> list[Change]:
        """Those of one of the `KINDS`."""
        return [change for change in self.changes if change.kind == kind]

    @property
    def lost(self) -> list[Change]:
        return [change for change in self.changes if change.lost]

    @property
    def title(self) -> str:
        return f"transformers {self.old.transformers} -> {self.new.transformers}"

    @property
    def caution(self) -> str:
        """Where the two were not asked for the same; empty where they were."""
        asked = [
            (name, f"{then} then, {now} now")
            for name, then, now in (
                ("backend", self.old.backend, self.new.backend),
                ("kernels", ",".join(self.old.kernels), ",".join(self.new.kernels)),
                ("families", self.old.family, self.new.family),
            )
            if then != now
        ]
        return "; ".join(f"{name}: {words}" for name, words in asked)

    def totals(self) -> tuple[list[str], list[list[str]]]:
        """A header, and a line for each kernel and for all: sites in each state then and now, and the changes."""
        now, kernels = self.new.rows, kernels_in([*self.old_rows, *self.new.rows])
        present = {row.state for row in [*self.old_rows, *now]}
        states = [state for state in STATES if state in (PATCHED, REFUSED) or state in present]
        lines = []
        for name, counted in [*((kernel or "classes", [kernel]) for kernel in kernels), ("total", kernels)]:
            sides = [Counter(row.state for row in rows if row.kernel in counted) for rows in (self.old_rows, now)]
            changes = Counter(change.kind for change in self.changes if change.row.kernel in counted)
            both = [f"{sides[0][state]} -> {sides[1][state]}" for state in states]
            lines.append([name, *both, *(str(changes[kind] or "-") for kind in KINDS)])
        return ["kernel", *states, *KINDS], lines

    def to_json(self) -> str:
        """``{"old", "new", "lost", "appeared", "vanished", "changed", "totals"}``, each change with both its sides."""
        totals = {
            side: [
                {"kernel": kernel, "state": state, "sites": sites}
                for (kernel, state), sites in sorted(Counter((row.kernel, row.state) for row in rows).items())
            ]
            for side, rows in (("old", self.old_rows), ("new", self.new.rows))
        }
        sides = {
            side: {"versions": of.report.get("versions", {}), "settings": of.report.get("settings", {})}
            for side, of in (("old", self.old), ("new", self.new))
        }
        groups = {"lost": self.lost, **{kind: self.of(kind) for kind in KINDS}}
        described = {name: [_described(change) for change in changes] for name, changes in groups.items()}
        return json.dumps({**sides, **described, "totals": totals}, indent=1)


def compare(old: Coverage, new: Coverage, package: Path) -> Diff:
    """`new` against as much of `old` as it was asked for; `package` is the folder of the transformers it swept.

    A site is lost if it was patched and is now refused or failed; or if the same transformers still has it, its module
    was imported, and it is not found any more.
    """
    asked = [row for row in old.rows if row.kernel in ("", *new.kernels) and matches(row.name, new.family)]
    before = {_key(row): row for row in asked}
    after = {_key(row): row for row in new.rows}
    changes = []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        if was is None or now is None:
            fate = _fate(was, new, package) if was else ""
            gone = fate == STILL_THERE and was is not None and was.state == PATCHED
            changes.append(Change(was, now, fate, gone and old.transformers == new.transformers))
        elif (was.state, was.variant) != (now.state, now.variant):
            changes.append(Change(was, now, lost=was.state == PATCHED and now.state in (REFUSED, FAILED)))
    return Diff(old, new, asked, sorted(changes, key=lambda change: (change.row.name, change.row.kernel)))


def _key(row: Row) -> tuple[str, str, str]:
    return row.module, row.name, row.kernel


def _fate(row: Row, new: Coverage, package: Path) -> str:
    """What became of a site that is not found any more."""
    if any(one["module"] == row.module for one in new.not_imported):
        return "its module was not imported"
    file = package.joinpath(*row.module.split(".")[1:]).with_suffix(".py")
    if not file.is_file():
        return "its module is gone"
    name = re.escape(row.name.rpartition(".")[2])
    defined = re.search(rf"^\s*(class|def) {name}\b", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return STILL_THERE if defined else "gone"


def _said(row: Row) -> str:
    return f"{row.state}: {detail(row)}" if detail(row) else row.state


def _described(change: Change) -> dict[str, Any]:
    def side(row: Row | None) -> dict[str, str] | None:
        return {"state": row.state, "variant": row.variant, "reason": row.reason} if row else None

    row = change.row
    known: dict[str, Any] = {"module": row.module, "name": row.name, "kernel": row.kernel}
    return {**known, "old": side(change.old), "new": side(change.new), "fate": change.fate, "lost": change.lost}
