"""Sweeps of one or several versions of transformers, or what differs between two, as Markdown for documents."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from npu_autopatch.cli.coverage_diff import APPEARED, CHANGED, VANISHED, Change, Diff
from npu_autopatch.cli.coverage_report import Coverage, detail, family, kernels_in
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.reporting import PATCHED, STATES, Row

HEAD = """\
# Coverage of transformers

What `npu-autopatch coverage` finds in every modeling module. A site is a class or function that may be what a kernel
fuses; it is patched once its replacement has reproduced it, and refused with a reason otherwise. A family that is not
listed has no site, or could not be imported. Written by `npu-autopatch coverage --markdown`.

- `3 +1`: three sites patched, one not.
- `round_then_mul`, `half` and the like are variants: what the site was found to compute. `2 half`: two sites of it.
- "Under gradients only": the op runs where a gradient will be needed, and the original elsewhere.

`npu-autopatch coverage --sites` lists every site of the transformers installed; `--diff` compares it with another.
"""


def document(coverages: list[Coverage], sites: bool) -> str:
    """The totals of all, and a part for each; with every `sites` by name, or by family."""
    kernels = kernels_in(row for coverage in coverages for row in coverage.rows)
    header = ["transformers", "families", *kernels, "patched", "not patched"]
    totals = _table(header, (total(coverage, kernels) for coverage in coverages), numbers=True)
    return "\n".join([HEAD, "## Totals\n", totals, *(part(coverage, sites) for coverage in coverages)])


def total(coverage: Coverage, kernels: list[str]) -> list[str]:
    """The cells of one version in the table of totals."""
    rows = coverage.rows
    counts = Counter((row.kernel, row.state == PATCHED) for row in rows)
    cells = [_count(counts[kernel, True], counts[kernel, False]) for kernel in kernels]
    patched = sum(row.state == PATCHED for row in rows)
    families = len({family(row) for row in rows})
    return [coverage.transformers, str(families), *cells, str(patched), str(len(rows) - patched)]


def part(coverage: Coverage, sites: bool) -> str:
    """What is patched in one version, family by family, and each other site with its reason."""
    rows = coverage.rows
    said = [f"## transformers {coverage.transformers}\n", _families(rows)]
    if sites:
        said += ["### Sites\n", _sites(rows)]
    said += _not_patched(rows)
    if coverage.not_imported:
        said += ["### Not imported\n", _not_imported(coverage.not_imported)]
    return "\n".join(said)


def diff_document(diff: Diff, sites: bool) -> str:
    """The totals then and now, and every change."""
    said = [f"# {diff.title}\n"]
    if diff.caution:
        said.append(f"Not asked for the same: {_escaped(diff.caution)}\n")
    header, lines = diff.totals()
    said.append(_table(header, lines, numbers=True))
    for title, changes in (
        ("No longer patched", diff.lost),
        ("Changed", [change for change in diff.of(CHANGED) if not change.lost]),
        ("Vanished", [change for change in diff.of(VANISHED) if not change.lost]),
    ):
        if changes:
            said += [f"## {title}\n", _changes(changes)]
    appeared = [change.row for change in diff.of(APPEARED)]
    if appeared:
        said += ["## Appeared\n", _families(appeared), *(["### Sites\n", _sites(appeared)] if sites else [])]
        said += _not_patched(appeared)
    if diff.new.not_imported:
        said += ["### Not imported\n", _not_imported(diff.new.not_imported)]
    return "\n".join(said)


def _families(rows: list[Row]) -> str:
    """A line for each family: the variants patched for each kernel, and how many sites are not patched."""
    kernels = kernels_in(rows)
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[family(row), row.kernel].append(row)
    names = sorted({family(row) for row in rows})
    lines = ([name, *(_variants(cells[name, kernel]) for kernel in kernels)] for name in names)
    return _table(["family", *kernels], lines)


def _variants(rows: list[Row]) -> str:
    counts = Counter(row.variant for row in rows if row.state == PATCHED)
    said = [_escaped(variant) if times == 1 else f"{times} {_escaped(variant)}" for variant, times in counts.items()]
    others = sum(row.state != PATCHED for row in rows)
    return " ".join(filter(None, ["; ".join(said), f"+{others}" if others else ""]))


def _sites(rows: list[Row]) -> str:
    ordered = sorted(rows, key=lambda row: row.name)
    lines = ([f"`{row.name}`", row.kernel, row.state, _escaped(detail(row))] for row in ordered)
    return _table(["site", "kernel", "state", "variant or reason"], lines)


def _not_patched(rows: list[Row]) -> list[str]:
    """For each state but patched a heading, and a line for each kernel and reason with its sites."""
    said = []
    for state in STATES[1:]:
        reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
        for row in rows:
            if row.state == state:
                reasons[row.kernel, detail(row)].append(f"`{row.name}`")
        if reasons:
            order = [*REGISTRY]
            ordered = sorted(reasons, key=lambda one: (order.index(one[0]) if one[0] in order else -1, one[1]))
            lines = ([one[0], _escaped(one[1]), ", ".join(sorted(reasons[one]))] for one in ordered)
            said += [f"### {state.capitalize()}\n", _table(["kernel", "reason", "sites"], lines)]
    return said


def _not_imported(missing: list[dict[str, str]]) -> str:
    return _table(["module", "reason"], ([f"`{one['module']}`", _escaped(one["reason"])] for one in missing))


def _changes(changes: list[Change]) -> str:
    return _table(["site", "change"], ([f"`{change.row.name}`", _escaped(change.words)] for change in changes))


def _count(patched: int, others: int) -> str:
    return f"{patched} +{others}" if others else str(patched)


def _table(header: list[str], lines: Iterable[list[str]], numbers: bool = False) -> str:
    """`numbers`: all columns but the first are aligned to the right."""
    rule = ["---", *("--:" if numbers else "---" for _ in header[1:])]
    cells = (["", *(f" {cell} " if cell else " " for cell in line), ""] for line in (header, rule, *lines))
    return "\n".join([*map("|".join, cells), ""])


def _escaped(words: str) -> str:
    """So that no character of `words` is taken for Markdown."""
    return re.sub(r"([\\`*<|\[]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", " ".join(words.split()))
