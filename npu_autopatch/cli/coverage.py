"""`npu-autopatch coverage`: every modeling module of the installed transformers, and what was patched in it."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from npu_autopatch import finder
from npu_autopatch.cli import child, coverage_markdown, coverage_tables
from npu_autopatch.cli.coverage_diff import compare
from npu_autopatch.cli.coverage_report import Coverage
from npu_autopatch.cli.terminal import CommandError, progress
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.listing import matches
from npu_autopatch.reporting import FAILED, PATCHED
from npu_autopatch.settings import BACKENDS, Settings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `coverage` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "coverage",
        help="count what is patched in the installed transformers",
        description="Import every modeling module of the installed transformers in a process of its own and count "
        "patched and refused sites by family and kernel. Exit code 1 if a site failed or none was patched; with --diff "
        "also if a site that was patched is refused or failed now, or not found in the same transformers.",
        epilog="example: npu-autopatch coverage --json > old.json, then, after an upgrade of transformers, "
        "npu-autopatch coverage --diff old.json --refused",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--kernels", metavar="LIST", default="all", help="as in NPU_AUTOPATCH: names of kernels, or all,-NAME"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: npu where torch has a device, else emulate")
    parser.add_argument("--family", metavar="PATTERN", default="*", help="only families that match, such as 'qwen3*'")
    parser.add_argument("--refused", action="store_true", help="list each refused site with its reason")
    parser.add_argument("--sites", action="store_true", help="list each site by family: state, and variant or reason")
    parser.add_argument("--diff", metavar="OLD.json", help="what differs from an earlier --json")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="the report of all modules as JSON")
    output.add_argument(
        "--markdown", metavar="OTHER.json", nargs="*", help="as Markdown, with the earlier --json of other versions"
    )
    parser.set_defaults(func=_from_arguments)


def _from_arguments(arguments: argparse.Namespace) -> int:
    Settings.of(REGISTRY, arguments.kernels)
    if arguments.diff is not None and arguments.markdown:
        raise CommandError("--diff compares two reports: give --markdown no files with it")
    old = Coverage.read(arguments.diff) if arguments.diff is not None else None
    others = [Coverage.read(path) for path in arguments.markdown or ()]
    modules = _modules(arguments.family)
    coverage = sweep(modules, arguments.kernels, arguments.backend or "")
    coverage.family = arguments.family
    lost = False
    if old:
        diff = compare(old, coverage, _package())
        lost = bool(diff.lost)
        if arguments.json:
            print(diff.to_json())
        elif arguments.markdown is not None:
            print(coverage_markdown.diff_document(diff, arguments.sites), end="")
        else:
            coverage_tables.show_diff(diff, arguments.refused, arguments.sites)
    elif arguments.json:
        print(coverage.to_json())
    elif arguments.markdown is not None:
        print(coverage_markdown.document([coverage, *others], arguments.sites), end="")
    else:
        coverage_tables.show(coverage, arguments.refused, arguments.sites)
    states = Counter(row.state for row in coverage.rows)
    nothing = states and not states[PATCHED]
    return 1 if lost or states[FAILED] or nothing or len(coverage.not_imported) == len(modules) else 0


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


def _package() -> Path:
    """The folder of the installed transformers. Raises `CommandError`."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError("transformers is not installed: pip install transformers")
    return Path(spec.submodule_search_locations[0])


def _modules(family: str) -> list[str]:
    """The modeling modules of the families that match. Raises `CommandError`."""
    root = _package()
    files = sorted(root.glob("models/**/modeling_*.py"))
    names = [".".join(("transformers", *file.relative_to(root).with_suffix("").parts)) for file in files]
    families = {name: name.split(".")[2] for name in names if finder.watched(name)}
    chosen = [name for name, its_family in families.items() if matches(its_family, family)]
    if not chosen:
        known = sorted(set(families.values()))
        close = difflib.get_close_matches(family.strip("*"), known, 5, 0.4) or [*known[:3], *known[-2:]]
        raise CommandError(f"no family matches {family!r}: choose from the {len(known)} such as {', '.join(close)}")
    return chosen
