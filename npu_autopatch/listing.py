"""The sites of a report, one block for each kernel and state: names and reasons side by side in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from fnmatch import fnmatchcase

from npu_autopatch.reporting import PATCHED, STATES, Row

_COLOURS = dict(zip(STATES, ("green", "yellow", "dim", "red", "yellow"), strict=True))
_NAME = 40  # a longer name has a line of its own


def matches(site: str, patterns: str) -> bool:
    """Whether a site, or its family, matches one of the comma-separated shell patterns."""
    names = (site, site.partition(".")[0])
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(",") for name in names)


def listing(rows: Iterable[Row], width: int) -> str:
    """A block for each kernel and state, in rich's markup; of a failure, the last line of its traceback.

    What ended comes after what has not.
    """
    blocks: dict[tuple[bool, str, str], list[tuple[str, str]]] = {}
    for row in rows:
        reason = row.reason.strip().splitlines()[-1] if row.reason.strip() else ""
        words = "; ".join(filter(None, (row.variant, reason))) if row.state == PATCHED else reason
        blocks.setdefault((row.ended, row.kernel, row.state), []).append((row.name, words))
    shown = []
    for key in sorted(blocks, key=lambda block: (*block[:2], STATES.index(block[2]))):
        ended, kernel, state = key
        words, colour = (f"{state}, ended", "dim") if ended else (state, _COLOURS[state])
        shown.append(f"[bold]{kernel or 'classes'}[/] [{colour}]{words}[/] {len(blocks[key])}")
        shown.append(beside(blocks[key], width))
    return "\n".join(shown)


def beside(pairs: list[tuple[str, str]], width: int) -> str:
    """Names, and words wrapped in a column beside them, in rich's markup. No name is broken."""
    from rich.markup import escape

    column = min(_NAME, max((len(name) for name, _ in pairs), default=0)) + 4
    lines = []
    for name, words in pairs:
        first, *others = textwrap.wrap(words, max(20, width - column)) or [""]
        if len(name) > _NAME:
            lines.append(f"  {name}")
            name = ""
        lines += [f"  {name:<{column - 2}}{first}".rstrip(), *(" " * column + other for other in others)]
    return escape("\n".join(lines))
