"""What happened to each site and why, as a table and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from npu_autopatch.settings import rank

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

PATCHED, REFUSED, SKIPPED, FAILED, FOREIGN = STATES = ("patched", "refused", "skipped", "failed", "foreign")


@dataclass(frozen=True)
class Row:
    """One site. `state` is one of `STATES`; `reason` is empty for a patched site, a traceback for a failed one."""

    module: str
    name: str
    kernel: str
    variant: str
    state: str
    reason: str = ""


@dataclass
class Report:
    """Every site found in this process. ``print(report)`` is the table, `to_json` the same for programs."""

    sites: list[Row] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.sites)

    def to_json(self) -> str:
        """``{"sites": [{"module", "name", "kernel", "variant", "state", "reason"}, ...], ...}``."""
        summary = {state: self.count(state) for state in STATES}
        sites = [asdict(row) for row in self.sites]
        whole = {"sites": sites, "summary": summary, "settings": self.settings, "versions": self.versions}
        return json.dumps(whole, indent=1)

    def write(self, path: str) -> None:
        """The JSON into `path`, whole or not at all. ``{pid}`` and ``{rank}`` in it keep processes apart."""
        path = path.replace("{pid}", str(os.getpid())).replace("{rank}", rank())
        beside = f"{path}.{os.getpid()}"
        with open(beside, "w", encoding="utf-8") as file:
            file.write(self.to_json() + "\n")
        os.replace(beside, path)

    def summary(self) -> str:
        """One line."""
        patched = Counter(row.kernel for row in self.sites if row.state == PATCHED)
        if not patched:
            return f"enabled, but nothing was patched: {self._why_nothing()}"
        kernels = ", ".join(f"{kernel} {count}" for kernel, count in patched.items())
        others = [f"{self.count(state)} {state}" for state in STATES[1:] if self.count(state)]
        return ", ".join([f"{sum(patched.values())} sites patched ({kernels})", *others])

    def _why_nothing(self) -> str:
        if not self.sites:
            return "no site was found in the modeling modules imported so far"
        reasons = Counter(row.reason.strip().splitlines()[-1] for row in self.sites if row.reason)
        reason, times = reasons.most_common(1)[0]
        return f"{times} of {len(self.sites)} sites {reason}" if times > 1 else f"{self.sites[0].name}: {reason}"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=None if os.isatty(1) else 120, highlight=False)
        with console.capture() as captured:
            console.print(self.__rich__())
        return captured.get().rstrip()

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(table(self.sites), self.summary())


def table(rows: Iterable[Row]) -> Table:
    """A rich table of sites; of a failure, the last line of its traceback."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("site", "kernel", "state", "variant or reason"):
        shown.add_column(column, overflow="fold", no_wrap=column in ("kernel", "state"))
    colours = {PATCHED: "green", REFUSED: "dim", SKIPPED: "dim", FAILED: "red", FOREIGN: "yellow"}
    for row in rows:
        words = row.variant if row.state == PATCHED else row.reason.strip().splitlines()[-1] if row.reason else ""
        shown.add_row(escape(row.name), row.kernel, f"[{colours[row.state]}]{row.state}[/]", escape(words))
    return shown
