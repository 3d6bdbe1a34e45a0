"""Sites as NPU_AUTOPATCH_SKIP can name them, and the value that leaves only some of them patched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from npu_autopatch import finder
from npu_autopatch.reporting import PATCHED, SKIPPED, Row


class Sites:
    """The sites of a program by the pattern that skips them, those first that serve others.

    What the setting cannot tell apart is one: the same name in two modules, or a character of a file's name that is
    none of a pattern's and becomes ``?``.
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
        for row in sorted(once.values(), key=lambda row: "?" not in pattern(row.name)):
            wide = (known for known in self.rows if "?" in known and fnmatchcase(row.name, known))
            self.rows.setdefault(next(wide, pattern(row.name)), []).append(row)
        serving = [name for name, held in self.rows.items() if not any(finder.watched(row.module) for row in held)]
        self.shared = len(serving)
        self.patterns = [*serving, *(name for name in self.rows if name not in serving)]

    def skipping_all_but(self, patched: Collection[str], own: str) -> str:
        """The value of NPU_AUTOPATCH_SKIP; `own` is the user's. A family that is skipped whole is named once."""
        families = defaultdict(list)
        for name in self.patterns:
            families[name.partition(".")[0]].append(name)
        words = [own] if own else []
        for family, names in families.items():
            skipped = [name for name in names if name not in patched]
            whole = len(skipped) == len(names) > 1 and "?" not in family
            words += [family] if whole else skipped
        return ",".join(words)


def pattern(name: str) -> str:
    """The pattern that `Settings.skips` matches with the site `name`."""
    return re.sub(r"[^\w.-]", "?", name)
