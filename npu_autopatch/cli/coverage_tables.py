"""A sweep, or what differs between two, for people: counts by family and kernel, and lists of sites."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from npu_autopatch.cli.coverage_diff import APPEARED, CHANGED, VANISHED, Change, Diff
from npu_autopatch.cli.coverage_report import Coverage, detail, family, kernels_in
from npu_autopatch.cli.terminal import console
from npu_autopatch.listing import beside, listing
from npu_autopatch.reporting import FAILED, PATCHED, REFUSED, STATES, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(coverage: Coverage, refused: bool, sites: bool) -> None:
    """Print the counts of each family; the refused sites or all of them if asked for, and failed ones always."""
    screen, rows = console(), coverage.rows
    screen.print(f"transformers {coverage.transformers}, {_backend(coverage)}", markup=False)
    screen.print("sites patched +refused:\n", markup=False)
    if rows:
        screen.print(_counts(rows))
    _lists(screen, rows, refused, sites)
    _failed(screen, rows)
    _not_imported(screen, coverage)
    total = Counter((row.kernel, row.state) for row in rows)
    kernels = [name for name in kernels_in(rows) if name]
    summed = [f"{name} {total[name, PATCHED]} patched, {total[name, REFUSED]} refused" for name in kernels]
    screen.print(f"\n{'; '.join(summed) or 'no site found'}")


def show_diff(diff: Diff, refused: bool, sites: bool) -> None:
    """Print the totals and every change; the sites that appeared by family, or one by one if asked for."""
    from rich.table import Table

    screen = console()
    screen.print(f"{diff.title}, {_backend(diff.new)}", markup=False)
    if diff.caution:
        screen.print(f"not asked for the same: {diff.caution}", markup=False)
    screen.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    header, lines = diff.totals()
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    screen.print(table)
    _changes(screen, "[red]No longer patched[/]", diff.lost)
    _changes(screen, "Changed", [change for change in diff.of(CHANGED) if not change.lost])
    appeared = [change.row for change in diff.of(APPEARED)]
    if appeared:
        screen.print(f"\n[bold]Appeared[/] {len(appeared)}, patched +refused:\n")
        screen.print(_counts(appeared))
        _lists(screen, appeared, refused, sites)
    _changes(screen, "Vanished", [change for change in diff.of(VANISHED) if not change.lost])
    _failed(screen, diff.new.rows)
    _not_imported(screen, diff.new)
    if not diff.changes:
        screen.print("\nno site differs")


def _backend(coverage: Coverage) -> str:
    emulated = ", CPU kernels in place of the NPU's" if coverage.backend == "emulate" else ""
    return f"backend {coverage.backend}{emulated} ({coverage.chosen})"


def _counts(rows: list[Row]) -> Table:
    from rich.table import Table

    kernels = [name for name in kernels_in(rows) if name]
    others = [state for state in STATES if state not in (PATCHED, REFUSED) and any(row.state == state for row in rows)]
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for row in rows:
        for line in (family(row), "total"):
            counts[line][row.kernel, row.state] += 1
            counts[line]["", row.state] += 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("family", overflow="fold")
    for name in (*kernels, *others):
        table.add_column(name, justify="right")
    for line in [*sorted(line for line in counts if line != "total"), "total"]:
        both = [(counts[line][kernel, PATCHED], counts[line][kernel, REFUSED]) for kernel in kernels]
        cells = [f"{done or '-'}" + (f" +{not_done}" if not_done else "   ") for done, not_done in both]
        table.add_row(line, *cells, *(str(counts[line]["", state] or "") for state in others))
    return table


def _lists(screen: Console, rows: list[Row], refused: bool, sites: bool) -> None:
    if sites:
        families: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            families[family(row)].append(row)
        for name in sorted(families):
            states = Counter(row.state for row in families[name])
            counted = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
            screen.print(f"\n[bold]{name}[/] {counted}")
            said = [
                (row.name.partition(".")[2], f"{row.kernel} {row.state}: {detail(row)}".strip(" :"))
                for row in families[name]
            ]
            screen.print(beside(said, screen.width))
    if refused and any(row.state == REFUSED for row in rows):
        screen.print()
        screen.print(listing((row for row in rows if row.state == REFUSED), screen.width))


def _changes(screen: Console, title: str, changes: list[Change]) -> None:
    if changes:
        screen.print(f"\n[bold]{title}[/] {len(changes)}")
        screen.print(beside([(change.row.name, change.words) for change in changes], screen.width))


def _failed(screen: Console, rows: list[Row]) -> None:
    if any(row.state == FAILED for row in rows):
        screen.print()
        screen.print(listing((row for row in rows if row.state == FAILED), screen.width))


def _not_imported(screen: Console, coverage: Coverage) -> None:
    if coverage.not_imported:
        screen.print(f"\n[bold]Not imported[/] {len(coverage.not_imported)}")
        screen.print(_by_reason(coverage.not_imported, screen.width), markup=False)


def _by_reason(not_imported: list[dict[str, str]], width: int) -> str:
    modules: dict[str, list[str]] = defaultdict(list)
    for failure in not_imported:
        modules[failure["reason"]].append(failure["module"].rpartition(".")[2])
    lines = []
    for reason, names in modules.items():
        lines += textwrap.wrap(f"{reason} ({len(names)})", width, initial_indent="  ", subsequent_indent="  ")
        lines += textwrap.wrap(", ".join(names), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
