"""An analysis as Markdown, for a review: every chain with its state and reason, every candidate with its experiment."""

from __future__ import annotations

from collections.abc import Iterator

from npu_autopatch.analysis.result import STATES, Analysis, Candidate, Mode, Part
from npu_autopatch.analysis.table import change, part_name, served_by, size


def markdown(found: Analysis) -> str:
    """The whole analysis, in one document."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Analysis) -> Iterator[str]:
    yield f"# {_text(found.model)}: what is fused, and what could be"
    yield ""
    yield ", ".join(f"{name} {version}" for name, version in found.versions.items()) + "."
    yield f"Counted: {_text(found.counted)}. Launches and bytes are those of one forward, or one step of training."
    for mode in found.modes:
        yield from _mode(mode)
    yield from _candidates(found)
    if found.notes:
        yield from ("", "## Notes", "")
        yield from (f"- {_text(note)}" for note in found.notes)


def _mode(mode: Mode) -> Iterator[str]:
    yield from ("", f"## {mode.name.capitalize()}", "")
    yield f"{mode.input}. The whole model: {change(mode.before, mode.after)}."
    total = mode.before.launches or 1
    shares = (f"{mode.states[s] / total:.1%} {s}" for s in STATES if mode.states[s])
    yield f"Of the launches before: {', '.join(shares)}."
    for part in mode.parts:
        yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    times = f", a layer; {part.count} layers" if part.count > 1 else ""
    yield from ("", f"### {_text(part_name(part))}", "", f"{change(part.before, part.after)}{times}.", "")
    yield "| block | chain | launches | bytes | state | ops | why |"
    yield "|---|---|---|---|---|---|---|"
    for chain in part.chains:
        launches = f"{chain.before.launches} -> {chain.after.launches}"
        moved = f"{size(chain.before.bytes)} -> {size(chain.after.bytes)}"
        source = f" ({chain.judgement.source})" if chain.judgement.source else ""
        ops = ", ".join(f"`{op}`" for op in served_by(chain))
        cells = [chain.block, chain.name, launches, moved, chain.judgement.state, ops, chain.judgement.reason + source]
        yield f"| {' | '.join(_text(cell) for cell in cells)} |"


def _candidates(found: Analysis) -> Iterator[str]:
    seen: dict[Candidate, dict[str, None]] = {}
    for mode in found.modes:
        for part in mode.parts:
            for chain in part.chains:
                for candidate in chain.judgement.candidates:
                    seen.setdefault(candidate, {})[f"{chain.name} in {mode.name}"] = None
    if seen:
        yield from ("", "## Candidates")
    for candidate, where in seen.items():
        yield from ("", f"### `{candidate.op}`: {_text(', '.join(where))}", "")
        yield f"- prepare: {_text(candidate.prepare)}"
        yield f"- check: {_text(candidate.check)}"
        yield f"- smallest experiment: {_text(candidate.experiment)}"
        yield f"- source: {_text(candidate.source)}"


def _text(words: str) -> str:
    """Words that Markdown shows as they are, in one line of a table."""
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
