"""What `bisect` has found, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from npu_autopatch.cli.bisect_run import Program, Run
from npu_autopatch.cli.bisect_search import Search, blamed
from npu_autopatch.cli.bisect_sites import Sites, setting
from npu_autopatch.cli.terminal import console
from npu_autopatch.listing import beside
from npu_autopatch.reporting import Row


@dataclass
class Culprit:
    """Sites that fail together and none without the others, and the run in which only they were patched.

    `verified` is what `npu-autopatch verify` says of them, where it can.
    """

    rows: list[Row]
    run: Run
    together: bool
    verified: list[str]


@dataclass
class Outcome:
    """What was found: `verdict` is one of "found", "passes", "not ours", "no site", "interrupted"; `words` say it."""

    backend: str
    program: Program
    verdict: str = "interrupted"
    words: str = ""
    sites: Sites = field(default_factory=lambda: Sites([]))
    search: Search | None = None
    own: Sequence[str] = ()
    failed: dict[frozenset[str], Run] = field(default_factory=dict)
    verified: dict[str, str] = field(default_factory=dict)

    @property
    def culprits(self) -> list[Culprit]:
        """Each minimal set that fails by itself."""
        return [self._culprit(found) for found in (self.search.found if self.search else [])]

    def _culprit(self, found: list[str]) -> Culprit:
        rows = [row for name in found for row in self.sites.rows[name]]
        verified = [self.verified[row.name] for row in rows if row.name in self.verified]
        return Culprit(rows, self.failed[frozenset(found)], len(found) > 1, verified)

    @property
    def skip(self) -> str:
        """The value of NPU_AUTOPATCH_SKIP with which the program passes, as far as is known."""
        if self.search is None or not self.search.found:
            return ""
        names = [name for culprit in self.search.found for name in blamed(culprit, self.search.shared)]
        return setting([*self.own, *names], self.program.folder / "skip.txt")


def so_far(outcome: Outcome) -> str:
    """What is known when the user stops it."""
    search = outcome.search
    if search is None:
        return "interrupted before there was anything to say"
    if not search.suspects:
        return "interrupted; the culprits above may not be all"
    names = [row.name for suspect in search.suspects for row in outcome.sites.rows[suspect]]
    some = ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
    return f"interrupted; a culprit is among these {len(names)}: {some}"


def where(outcome: Outcome) -> str:
    """The backend, in words."""
    emulated = ", CPU kernels in place of the NPU's" if outcome.backend == "emulate" else ""
    return f"backend {outcome.backend}{emulated}"


def described(outcome: Outcome) -> dict[str, Any]:
    """All of it, for programs."""
    runs = [
        {"what": run.what, "failure": run.failure, "seconds": round(run.seconds, 2), "log": str(run.log)}
        for run in outcome.program.runs
    ]
    return {
        "command": list(outcome.program.command),
        "backend": outcome.backend,
        "verdict": outcome.verdict,
        "words": outcome.words,
        "culprits": [
            {
                "sites": [asdict(row) for row in culprit.rows],
                "failure": culprit.run.failure,
                "log": str(culprit.run.log),
                "verified": culprit.verified,
            }
            for culprit in outcome.culprits
        ],
        "suspects": outcome.search.suspects if outcome.search else [],
        "skip": outcome.skip,
        "sites": sum(map(len, outcome.sites.rows.values())),
        "runs": runs,
    }


def print_(outcome: Outcome) -> None:
    """The culprits, the verdict, and the line for the environment."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    screen = console()
    for number, culprit in enumerate(outcome.culprits, start=1):
        how = "fail together, and none without the others" if culprit.together else "fails alone"
        screen.print(f"[bold]culprit {number}[/] [red]{how}[/]: {escape(culprit.run.failure)} ({culprit.run.log.name})")
        named = [(row.name, ", ".join(filter(None, (row.kernel, row.variant)))) for row in culprit.rows]
        screen.print(beside(named, screen.width))
        for words in culprit.verified:
            screen.print(Padding(Text(words), (0, 0, 0, 2)))
    if outcome.culprits:
        screen.print()
    screen.print(outcome.words, markup=False)
    if outcome.skip:
        line = f"NPU_AUTOPATCH_SKIP={shlex.quote(outcome.skip)}"
        screen.print(f"\n  {line}\n", markup=False, soft_wrap=True)
    screen.print(f"{len(outcome.program.runs)} runs, {where(outcome)}", markup=False)
    screen.print(f"their output is in {outcome.program.folder}", markup=False, soft_wrap=True)
