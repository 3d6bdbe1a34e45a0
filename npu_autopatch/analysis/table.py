"""An analysis for people: readable in 80 columns, with or without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from npu_autopatch.analysis.result import (
    BY_TORCH_NPU,
    CANDIDATE,
    FUSED,
    NO_OP,
    NOT_POSSIBLE,
    STATES,
    Analysis,
    Chain,
    Cost,
    Mode,
    Part,
)

STYLES = {FUSED: "green", BY_TORCH_NPU: "cyan", CANDIDATE: "yellow", NOT_POSSIBLE: "red", NO_OP: "bright_black"}


def shown(found: Analysis) -> RenderableType:
    """Each mode with its kinds of layers, what could be tried, what cannot be, and the notes."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    blocks: list[RenderableType] = [Text(f"{found.model}, {versions}"), Text(f"counted: {found.counted}")]
    for mode in found.modes:
        blocks += [Text(""), *_mode(mode)]
    blocks += _tries(found)
    if found.notes:
        blocks += [Text("\nnotes", "bold"), *(_indented(note) for note in found.notes)]
    return Group(*blocks)


def _mode(mode: Mode) -> Iterator[RenderableType]:
    yield Text.assemble((mode.name, "bold"), f": {mode.input}")
    yield Text(f"the whole model: {change(mode.before, mode.after)}")
    total = mode.before.launches or 1
    shares = ", ".join(f"{mode.states[s] / total:.0%} {s}" for s in STATES if mode.states[s])
    yield Text(f"of the launches {shares}")
    for part in mode.parts:
        yield Text("")
        yield Text.assemble((part_name(part), "bold"), f"\n{change(part.before, part.after)}{_each(part)}")
        yield _chains(part.chains)


def _chains(chains: Iterable[Chain]) -> Table:
    """A line for each chain and state, all its blocks together."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("chain", overflow="fold", min_width=16)
    table.add_column("launches", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold", min_width=19)
    together: dict[tuple[str, str], list[Chain]] = {}
    for chain in chains:
        together.setdefault((chain.name, chain.judgement.state), []).append(chain)
    for (name, state), same in together.items():
        before = sum((chain.before for chain in same), Cost())
        after = sum((chain.after for chain in same), Cost())
        ops = dict.fromkeys(op for chain in same for op in served_by(chain))
        words = Text.assemble(
            (state, STYLES[state]), f": {', '.join(op.removeprefix('npu_') for op in ops)}" if ops else ""
        )
        times = f" ({len(same)})" if len(same) > 1 else ""
        launches = _pair(before.launches, after.launches)
        table.add_row(name + times, launches, _moved(before, after), words)
    return table


def _tries(found: Analysis) -> Iterator[RenderableType]:
    """The ops that could be tried, and what the contracts forbid."""
    chains: dict[str, dict[str, None]] = {}
    forbidden: dict[str, dict[str, None]] = {}
    for mode in found.modes:
        for part in mode.parts:
            for chain in part.chains:
                for candidate in chain.judgement.candidates:
                    chains.setdefault(candidate.op, {})[chain.name] = None
                if chain.judgement.state == NOT_POSSIBLE:
                    forbidden.setdefault(chain.judgement.reason, {})[chain.name] = None
    if chains:
        yield Text("\ncould be tried (what to prepare and check: --markdown or --html)", "bold")
    for op, names in chains.items():
        yield _indented(f"{op}: {', '.join(names)}")
    if forbidden:
        yield Text("\nnot possible", "bold")
    for reason, names in forbidden.items():
        yield _indented(f"{', '.join(names)}: {reason}")


def part_name(part: Part) -> str:
    """Which layers, and of what kind."""
    return f"{part.name} ({part.kind})" if part.kind else part.name


def _each(part: Part) -> str:
    return f" a layer, {part.count} layers" if part.count > 1 else ""


def served_by(chain: Chain) -> list[str]:
    """The ops of torch_npu that run in a chain; of one that has none, those that could."""
    ran = [name.removeprefix("npu::") for name in chain.ops_after if name.startswith("npu::")]
    ran = [name for name in ran if not name.endswith("_backward")]
    if chain.judgement.state == CANDIDATE:
        return [candidate.op for candidate in chain.judgement.candidates]
    return ran


def change(before: Cost, after: Cost) -> str:
    """Launches and bytes, before and after."""
    return f"{before.launches} -> {after.launches} launches, {size(before.bytes)} -> {size(after.bytes)}"


def size(count: int) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"


def _pair(before: object, after: object) -> str:
    return f"{before} -> {after}" if before != after else str(before)


def _moved(before: Cost, after: Cost) -> str:
    """Bytes before and after, in one unit."""
    told, unit = size(max(before.bytes, after.bytes)).split()
    share = max(before.bytes, after.bytes) or 1
    scaled = [f"{float(told) * cost.bytes / share:.4g}" for cost in (before, after)]
    return f"{_pair(*scaled)} {unit}"


def _indented(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)
