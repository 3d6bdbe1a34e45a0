"""`npu-autopatch ops`: the operators of torch_npu, their documentation, and what npu_autopatch does with them."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from npu_autopatch.cli.ops_catalogue import FILES, REGISTRATION, TABLE, Catalogue, Op, catalogue
from npu_autopatch.cli.terminal import CommandError, console
from npu_autopatch.listing import beside

if TYPE_CHECKING:
    from rich.console import Console

_PREFIXES = ("torch.ops.", "torch_npu.", "npu.", "npu::")
_SOURCES = {REGISTRATION: "as registered", FILES: "from the files of torch_npu", TABLE: "from our table"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `ops` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "ops",
        help="list, show and search the operators of torch_npu",
        description="The operators of the installed torch_npu: signature, documentation, whether there is a gradient, "
        "and what npu_autopatch uses them for. Without torch_npu, those that npu_autopatch knows.",
        epilog="example: npu-autopatch ops show npu_grouped_matmul",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="list|show|search", required=True)
    for name, words, example, func in (
        ("list", "every operator: its purpose, kernel and gradient", "list", _list),
        ("show", "all there is to say of one operator", "show npu_grouped_matmul", _show),
        ("search", "operators by words in names and texts", "search expert softmax", _search),
    ):
        action = actions.add_parser(
            name,
            help=words,
            description=f"{words[0].upper()}{words[1:]}.",
            epilog=f"example: npu-autopatch ops {example}",
            allow_abbrev=False,
        )
        if name == "show":
            action.add_argument("name", metavar="NAME", help="the operator: npu_rms_norm, torch_npu.npu_rms_norm")
        if name == "search":
            action.add_argument("words", metavar="WORD", nargs="+", help="all of them must be found, in any case")
        action.add_argument("--json", action="store_true", help="the same as JSON")
        action.set_defaults(func=func, parser=action)


def _list(arguments: argparse.Namespace) -> int:
    found = catalogue(os.environ)
    if arguments.json:
        _print_json(found, list(found.ops.values()))
        return 0
    screen = console()
    _print_source(screen, found)
    blocks: dict[str, list[Op]] = {"Used by a kernel": [], "Known to npu_autopatch": [], "Others": []}
    absent: list[Op] = []
    for op in found.ops.values():
        if op.installed is False:
            absent.append(op)
        else:
            title = "Used by a kernel" if op.used_by else "Known to npu_autopatch" if op.entries else "Others"
            blocks[title].append(op)
    blocks["Known, but not in this torch_npu"] = absent
    for title, ops in blocks.items():
        if ops:
            screen.print(f"\n[bold]{title}[/] {len(ops)}")
            screen.print(beside([(op.name, _summary(op)) for op in ops], screen.width))
    screen.print(f"\n{len(found.ops) - len(absent)} operators; gradient: torch_npu differentiates it")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    found = catalogue(os.environ)
    op = _named(found, arguments.name)
    if arguments.json:
        print(json.dumps({**_described(found), **_described_op(op), "documentation": op.documentation}, indent=1))
    else:
        screen = console()
        _print_source(screen, found)
        _print_op(screen, found, op)
    return 0


def _search(arguments: argparse.Namespace) -> int:
    words = [word for text in arguments.words for word in text.casefold().split()]
    if not words:
        raise CommandError("there is no word to search for: give one or more, such as norm")
    found = catalogue(os.environ)
    ranked = []
    for op in found.ops.values():
        ours = f"{op.name} {' '.join(_words(op))}".casefold()
        texts = (op.name.casefold(), ours, f"{ours} {op.documentation.casefold()}")
        rank = next((rank for rank, text in enumerate(texts) if all(word in text for word in words)), None)
        if rank is not None:
            ranked.append((rank, op))
    hits = [op for _, op in sorted(ranked, key=lambda pair: pair[0])]
    if arguments.json:
        _print_json(found, hits)
        return 0
    screen = console()
    _print_source(screen, found)
    if hits:
        screen.print()
        screen.print(beside([(op.name, _summary(op)) for op in hits], screen.width))
    screen.print(f"\n{len(hits)} of {len(found.ops)} operators have {' and '.join(words)}", markup=False)
    return 0


def _named(found: Catalogue, given: str) -> Op:
    """The operator of that name, however it was written. Raises `CommandError`."""
    name = given
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = name.partition("(")[0].partition(".")[0]
    for candidate in (name, f"npu_{name}"):
        if candidate in found.ops:
            return found.ops[candidate]
    bare = {known.removeprefix("npu_"): known for known in found.ops}
    close = [bare[short] for short in difflib.get_close_matches(name.removeprefix("npu_"), bare, 5, 0.5)]
    choose = f"close are {', '.join(close)}" if close else "npu-autopatch ops list has them all"
    raise CommandError(f"there is no operator {given!r} among the {len(found.ops)} here: {choose}")


def _words(op: Op) -> Iterator[str]:
    for entry in op.entries:
        yield from (entry.brief, entry.computes, *entry.limits, entry.gradient, entry.use, *entry.used_by)


def _summary(op: Op) -> str:
    """What a line of a list says of it: its kernels, its purpose, and whether it has a gradient."""
    purpose = op.entries[0].brief if op.entries else "documented" if op.documentation else ""
    gradient = {True: "gradient", False: "", None: "gradient unknown"}[op.differentiable]
    words = "; ".join(filter(None, (purpose, gradient)))
    return f"{', '.join(op.used_by)}: {words}" if op.used_by else words


def _print_source(screen: Console, found: Catalogue) -> None:
    ours = f"our own table, a snapshot of {found.table.snapshot}"
    emulated = "what the kernels call is emulated on the CPU"
    if not found.version:
        said = f"{found.missing}: this is {ours}; {emulated}"
    elif found.missing:
        why = found.missing.removeprefix("torch_npu cannot be imported: ")
        said = (
            f"torch_npu {found.version} cannot be imported here ({why}): signatures and documentation are read from "
            f"its files, gradients from {ours}; {emulated}"
        )
    else:
        said = f"torch_npu {found.version}: signatures and gradients as registered, documentation from its files"
    screen.print(said, markup=False)


def _print_op(screen: Console, found: Catalogue, op: Op) -> None:
    screen.print(f"\n[bold]{op.name}[/]")
    screen.print(beside(list(_lines(found, op)), screen.width))
    if op.documentation:
        screen.print(f"\n[bold]Documentation[/] of torch_npu {found.version}\n")
        # in Chinese, which not every terminal can show
        text = op.documentation.encode(screen.encoding, "replace").decode(screen.encoding)
        screen.print(text, markup=False, overflow="fold")
    elif found.version:
        screen.print(f"\ntorch_npu {found.version} has no documentation of it", markup=False)


def _lines(found: Catalogue, op: Op) -> Iterator[tuple[str, str]]:
    """Subject and words; what is said again of another overload is named by it."""
    if op.installed is False:
        yield "missing", f"torch_npu {found.version} has no such operator"
    for signature in op.signatures:
        yield "signature", signature
    if op.signatures:
        yield "", f"({_SOURCES[op.signatures_from]})"
    told = {True: "yes", False: "no", None: "unknown"}[op.differentiable]
    source = f" ({_SOURCES[op.differentiable_from]})" if op.differentiable_from else ""
    of = [entry.gradient for entry in op.entries if entry.name == op.name]
    yield "gradient", ": ".join((f"{told}{source}", *of))
    for entry in op.entries:
        if entry.name != op.name:
            yield "", ""
            yield "overload", entry.name
            yield "gradient", entry.gradient
        yield "computes", entry.computes
        for number, limit in enumerate(entry.limits):
            yield "" if number else "limits", limit
        yield "devices", entry.hardware
        yield "since", f"train {entry.since} ({', '.join(found.table.trains[entry.since])})"
        for number, (train, change) in enumerate(entry.changes):
            yield "" if number else "changed", f"train {train}: {change}"
        if entry.used_by:
            yield "used by", f"kernel {', '.join(entry.used_by)}: {entry.use}"
        else:
            yield "use", entry.use
        if entry.emulated:
            yield "emulated", "by the backend emulate, on CPU tensors"
    for signature in op.signatures:
        if op.entries and not any(entry.knows(signature) for entry in op.entries):
            yield "note", f"{signature.partition('(')[0]} is not as in any train we know; the above may not hold"


def _print_json(found: Catalogue, ops: list[Op]) -> None:
    print(json.dumps({**_described(found), "ops": [_described_op(op) for op in ops]}, indent=1))


def _described(found: Catalogue) -> dict[str, Any]:
    return {
        "torch_npu": found.version or None,
        "not_imported": found.missing or None,
        "snapshot": found.table.trains,
    }


def _described_op(op: Op) -> dict[str, Any]:
    known = [
        {**asdict(entry), "since": entry.since, "changes": dict(entry.changes), "signature": entry.signature}
        for entry in op.entries
    ]
    whole = {**asdict(op), "documented": bool(op.documentation), "used_by": op.used_by, "known": known}
    del whole["documentation"], whole["entries"]
    return whole
