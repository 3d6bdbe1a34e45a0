"""The sites of a report, one block for each kernel and state: names and reasons side by side in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from npu_autopatch.reporting import PATCHED, STATES, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = dict(zip(STATES, ("green", "yellow", "dim", "red", "yellow"), strict=True))


def matches(site: str, patterns: str) -> bool:
    """Whether a site, or its family, matches one of the comma-separated shell patterns."""
    names = (site, site.partition(".")[0])
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(",") for name in names)


def listing(rows: Iterable[Row]) -> RenderableType:
    """A block for each kernel and state; of a failure, the last line of its traceback."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    blocks: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        blocks.setdefault((row.kernel, row.state), []).append(row)
    shown: list[RenderableType] = []
    for kernel, state in sorted(blocks, key=lambda block: (block[0], STATES.index(block[1]))):
        block = blocks[kernel, state]
        shown.append(f"[bold]{kernel or 'classes'}[/] [{_COLOURS[state]}]{state}[/] {len(block)}")
        table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
        table.add_column(overflow="fold", max_width=44)
        table.add_column(overflow="fold")
        for row in block:
            reason = row.reason.strip().splitlines()[-1] if row.reason.strip() else ""
            table.add_row(escape(row.name), escape(row.variant if row.state == PATCHED else reason))
        shown.append(table)
    return Group(*shown)
