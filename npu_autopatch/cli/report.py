"""`npu-autopatch report`: a report that NPU_AUTOPATCH_REPORT has written, as a table or filtered."""

from __future__ import annotations

import argparse
import json
from typing import Any

from npu_autopatch.cli.terminal import CommandError, console
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.listing import listing, matches
from npu_autopatch.reporting import STATES, Report, Row

_EXPECTED = "give a file written by NPU_AUTOPATCH_REPORT"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `report` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "report",
        help="show a report that a run has written",
        description="Show what happened to every site of a run, from the file NPU_AUTOPATCH_REPORT has written.",
        epilog="example: npu-autopatch report report.json --state refused --site 'glm4*'",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="the JSON file")
    parser.add_argument("--state", choices=STATES, help="only sites in this state")
    parser.add_argument("--kernel", metavar="NAME", help=f"only sites of this kernel: {', '.join(REGISTRY)}")
    parser.add_argument("--site", metavar="PATTERN", help="only sites, or families, that match: 'qwen3*' or '*MLP'")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(func=show)


def show(arguments: argparse.Namespace) -> int:
    """Print the sites asked for."""
    content, rows = read(arguments.file)
    kernels = sorted({*REGISTRY, *(row.kernel for row in rows if row.kernel)})
    if arguments.kernel is not None and arguments.kernel not in kernels:
        raise CommandError(f"kernel {arguments.kernel!r} is unknown: choose from {', '.join(kernels)}")
    rows = [
        row
        for row in rows
        if arguments.state in (None, row.state)
        and arguments.kernel in (None, row.kernel)
        and (arguments.site is None or matches(row.name, arguments.site))
    ]
    report = Report(rows, content.get("settings", {}), content.get("versions", {}))
    if arguments.json:
        print(json.dumps({**content, **json.loads(report.to_json())}, indent=1))
        return 0
    screen = console()
    if rows:
        screen.print(listing(rows, screen.width))
    counted = {**{state: report.count(state) for state in STATES}, "ended": report.ended}
    counts = ", ".join(f"{count} {state}" for state, count in counted.items() if count)
    screen.print(f"{len(rows)} of {len(content['sites'])} sites{': ' if rows else ''}{counts}")
    return 0


def read(path: str, expected: str = _EXPECTED) -> tuple[dict[str, Any], list[Row]]:
    """The file's content and its sites; `expected` says what to give. Raises `CommandError`."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror}): {expected}") from None
    except ValueError:
        raise CommandError(f"{path} is no JSON: {expected}") from None
    try:
        rows = [Row(**site) for site in content["sites"]]
        valid = all(row.state in STATES and all(map(_of_its_type, vars(row).items())) for row in rows)
    except (TypeError, KeyError):
        valid = False
    if not valid:
        raise CommandError(f"{path} is JSON, but no report: {expected}")
    return content, rows


def _of_its_type(item: tuple[str, object]) -> bool:
    name, value = item
    return isinstance(value, bool if name == "ended" else str)
