"""`npu-autopatch coverage`: every modeling module of the installed transformers, and what was patched in it."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from npu_autopatch import finder
from npu_autopatch.cli import child
from npu_autopatch.cli.terminal import CommandError, console, progress
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.listing import listing, matches
from npu_autopatch.reporting import FAILED, PATCHED, REFUSED, STATES, Row
from npu_autopatch.settings import BACKENDS, Settings


@dataclass
class Coverage:
    """The report over all modules, which of them could not be imported and why, and the backend with its reason."""

    report: dict[str, Any] = field(default_factory=dict)
    not_imported: list[dict[str, str]] = field(default_factory=list)
    backend: str = ""
    chosen: str = ""

    @property
    def rows(self) -> list[Row]:
        return [Row(**site) for site in self.report["sites"]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `coverage` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "coverage",
        help="count what is patched in the installed transformers",
        description="Import every modeling module of the installed transformers in a process of its own and count "
        "patched and refused sites by family and kernel. Exit code 1 if a site failed or none was patched.",
        epilog="example: npu-autopatch coverage --family 'qwen*,glm4*' --refused",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--kernels", metavar="LIST", default="all", help="as in NPU_AUTOPATCH: names of kernels, or all,-NAME"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: npu where torch has a device, else emulate")
    parser.add_argument("--family", metavar="PATTERN", default="*", help="only families that match, such as 'qwen3*'")
    parser.add_argument("--refused", action="store_true", help="list each refused site with its reason")
    parser.add_argument("--json", action="store_true", help="the report of all modules as JSON")
    parser.set_defaults(func=_from_arguments)


def _from_arguments(arguments: argparse.Namespace) -> int:
    Settings.of(REGISTRY, arguments.kernels)
    modules = _modules(arguments.family)
    coverage = sweep(modules, arguments.kernels, arguments.backend or "")
    rows = coverage.rows
    if arguments.json:
        print(json.dumps({**coverage.report, "not_imported": coverage.not_imported}, indent=1))
    else:
        _print(coverage, rows, arguments.refused)
    states = Counter(row.state for row in rows)
    nothing = rows and not states[PATCHED]
    return 1 if states[FAILED] or nothing or len(coverage.not_imported) == len(modules) else 0


def sweep(modules: list[str], kernels: str, backend: str) -> Coverage:
    """Import `modules` in one child with the package enabled. Raises `CommandError`."""
    coverage = Coverage()
    order = json.dumps({"modules": modules, "kernels": kernels, "backend": backend})
    # Without it, torch itself does not start where torch_npu has no CANN; the child imports torch_npu.
    environment = {**os.environ, "NPU_AUTOPATCH": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONWARNINGS": "ignore"}
    with progress() as bar:
        task = bar.add_task("torch and transformers", total=len(modules))
        try:
            for message in child.messages(child.module("npu_autopatch.cli.coverage_sweep", order), environment):
                if "report" in message:
                    coverage.report = message["report"]
                elif "backend" in message:
                    coverage.backend, coverage.chosen = message["backend"], message["chosen"]
                else:
                    bar.update(task, advance=1, description=message["module"].rpartition(".")[2])
                    if message["reason"]:
                        coverage.not_imported.append(message)
        except child.ChildError as error:
            raise CommandError(f"the modules could not be imported ({error}): see npu-autopatch doctor") from None
    return coverage


def _modules(family: str) -> list[str]:
    """The modeling modules of the families that match. Raises `CommandError`."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError("transformers is not installed: pip install transformers")
    root = Path(spec.submodule_search_locations[0])
    files = sorted(root.glob("models/**/modeling_*.py"))
    names = [".".join(("transformers", *file.relative_to(root).with_suffix("").parts)) for file in files]
    families = {name: name.split(".")[2] for name in names if finder.watched(name)}
    chosen = [name for name, its_family in families.items() if matches(its_family, family)]
    if not chosen:
        known = sorted(set(families.values()))
        close = difflib.get_close_matches(family.strip("*"), known, 5, 0.4) or [*known[:3], *known[-2:]]
        raise CommandError(f"no family matches {family!r}: choose from the {len(known)} such as {', '.join(close)}")
    return chosen


def _print(coverage: Coverage, rows: list[Row], refused: bool) -> None:
    from rich.table import Table

    screen = console()
    versions = coverage.report["versions"]
    kernels_of = ", CPU kernels in place of the NPU's" if coverage.backend == "emulate" else ""
    screen.print(f"transformers {versions['transformers']}, backend {coverage.backend}{kernels_of} ({coverage.chosen})")
    screen.print("sites patched +refused:\n", markup=False)
    kernels = [name for name in REGISTRY if any(row.kernel == name for row in rows)]
    others = [state for state in STATES if state not in (PATCHED, REFUSED) and any(row.state == state for row in rows)]
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for row in rows:
        for line in (row.name.partition(".")[0], "total"):
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
    if counts:
        screen.print(table)
    if refused:
        screen.print()
        screen.print(listing((row for row in rows if row.state == REFUSED), screen.width))
    if FAILED in others:
        screen.print()
        screen.print(listing((row for row in rows if row.state == FAILED), screen.width))
    if coverage.not_imported:
        screen.print(f"\n[bold]Not imported[/] {len(coverage.not_imported)}")
        screen.print(_by_reason(coverage.not_imported, screen.width), markup=False)
    total = counts["total"]
    summed = [f"{name} {total[name, PATCHED]} patched, {total[name, REFUSED]} refused" for name in kernels]
    screen.print(f"\n{'; '.join(summed) or 'no site found'}")


def _by_reason(not_imported: list[dict[str, str]], width: int) -> str:
    modules: dict[str, list[str]] = defaultdict(list)
    for failure in not_imported:
        modules[failure["reason"]].append(failure["module"].rpartition(".")[2])
    lines = []
    for reason, names in modules.items():
        lines += textwrap.wrap(f"{reason} ({len(names)})", width, initial_indent="  ", subsequent_indent="  ")
        lines += textwrap.wrap(", ".join(names), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
