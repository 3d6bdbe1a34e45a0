"""What happened to each site and why, as a table and as JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from npu_autopatch.settings import rank

PATCHED, REFUSED, SKIPPED, FAILED, FOREIGN = STATES = ("patched", "refused", "skipped", "failed", "foreign")


@dataclass(frozen=True)
class Row:
    """One site. `state` is one of `STATES`.

    `reason` is a traceback for a failed one; for a patched one it is empty, or says where it is not reached. What
    `ended` was so until `disable()`, or the end of a `patched` block, and is as it was before.
    """

    module: str
    name: str
    kernel: str
    variant: str
    state: str
    reason: str = ""
    ended: bool = False


@dataclass
class Report:
    """Every site found in this process. ``print(report)`` is the table, `to_json` the same for programs."""

    sites: list[Row] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def count(self, state: str) -> int:
        """How many sites are in `state` now: none that ended."""
        return sum(row.state == state and not row.ended for row in self.sites)

    @property
    def ended(self) -> int:
        """How many sites ended."""
        return sum(row.ended for row in self.sites)

    def to_json(self) -> str:
        """``{"sites": [{"module", "name", "kernel", "variant", "state", "reason", "ended"}, ...], ...}``."""
        summary = {**{state: self.count(state) for state in STATES}, "ended": self.ended}
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
        rows = [row for row in self.sites if not row.ended]
        if not rows and self.ended:
            return f"not active any more: {self._patched(self.sites)}"
        if not rows and not self.settings:
            return "not enabled: set NPU_AUTOPATCH=1, or call npu_autopatch.enable()"
        if not self.count(PATCHED):
            return f"enabled, but nothing was patched: {self._why_nothing(rows)}"
        others = [f"{self.count(state)} {state}" for state in STATES[1:] if self.count(state)]
        return ", ".join([self._patched(rows), *others, *([f"{self.ended} ended"] if self.ended else [])])

    @staticmethod
    def _patched(rows: Iterable[Row]) -> str:
        kernels = Counter(row.kernel for row in rows if row.state == PATCHED)
        named = ", ".join(f"{kernel} {count}" for kernel, count in kernels.items())
        return f"{sum(kernels.values())} sites patched" + (f" ({named})" if named else "")

    @staticmethod
    def _why_nothing(rows: list[Row]) -> str:
        if not rows:
            return "no site was found in the modeling modules imported so far"
        reasons = Counter(row.reason.strip().splitlines()[-1] for row in rows if row.reason)
        reason, times = reasons.most_common(1)[0]
        return f"{times} of {len(rows)} sites {reason}" if times > 1 else f"{rows[0].name}: {reason}"

    def __str__(self) -> str:
        """The table in plain text, as wide as the terminal."""
        from rich.text import Text

        from npu_autopatch.listing import listing

        sites = listing(self.sites, shutil.get_terminal_size().columns)
        return "\n".join([*([Text.from_markup(sites).plain] if sites else []), self.summary()])

    def __rich__(self) -> object:
        from rich.text import Text

        return Text(str(self))
