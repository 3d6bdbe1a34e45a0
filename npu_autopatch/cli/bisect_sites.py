"""Sites as NPU_AUTOPATCH_SKIP can name them, and the value that leaves only some of them patched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from npu_autopatch import finder
from npu_autopatch.reporting import PATCHED, SKIPPED, Row

_LONGEST = 100_000  # bytes; Linux takes 128 KiB for one variable, its name among them


class Sites:
    """The sites of a program by the pattern that skips them, those first that serve others.

    The same name in two modules is one, which the setting cannot tell apart.
    """

    def __init__(self, patched: Iterable[Row], skipped: Iterable[Row] = ()) -> None:
        """`patched` is the report of a run in which all could be, `skipped` of one in which none was.

        The second knows sites of modules that the first, which failed, has not come to. Whether they would be
        patched nobody knows.
        """
        first = list(patched)
        seen = {row.name for row in first}
        rows = [row for row in first if row.state == PATCHED]
        rows += [row for row in skipped if row.state == SKIPPED and row.name not in seen]
        once = {(row.module, row.name, row.kernel): row for row in rows}  # each process of a launcher has them
        self.rows: dict[str, list[Row]] = {}
        for row in once.values():
            self.rows.setdefault(pattern(row.name), []).append(row)
        serving = [name for name, held in self.rows.items() if not any(finder.watched(row.module) for row in held)]
        self.shared = len(serving)
        self.patterns = [*serving, *(name for name in self.rows if name not in serving)]

    def skipping_all_but(self, patched: Collection[str], own: Iterable[str]) -> list[str]:
        """The patterns to skip, `own` of the user first. A family that is skipped whole is named once."""
        families = defaultdict(list)
        for name in self.patterns:
            families[name.partition(".")[0]].append(name)
        patterns = list(own)
        for family, names in families.items():
            skipped = [name for name in names if name not in patched]
            patterns += [family] if len(skipped) == len(names) > 1 else skipped
        return patterns


def pattern(name: str) -> str:
    """The pattern that `Settings.skips` matches with the site `name` and no other."""
    return re.sub(r"[^\w.!-]", lambda character: f"[{character[0]}]", name)


def setting(patterns: Collection[str], file: Path) -> str:
    """The value of NPU_AUTOPATCH_SKIP: `patterns`, or `file`, which has those that no variable can hold."""
    text = ",".join(patterns)
    if len(text.encode()) <= _LONGEST and text.count(",") == max(0, len(patterns) - 1):
        return text
    file.write_text("".join(f"{pattern}\n" for pattern in patterns), encoding="utf-8")
    return f"@{file}"
