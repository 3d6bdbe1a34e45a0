"""Analyses of published models as text that can be read and compared.

``python -m tests.analysis.golden [NAME ...]`` writes them. Read what has changed before it is committed: each line is a
claim about a model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

from npu_autopatch.analysis.analysing import analyze
from npu_autopatch.analysis.result import NOT_POSSIBLE, Analysis, Chain
from npu_autopatch.analysis.table import change, part_name

DATA = Path(__file__).parents[1] / "data"
CONFIGS, GOLDEN = DATA / "configs", DATA / "analysis" / transformers.__version__
_EVERYWHERE = ("tokens", "batch")


def names() -> list[str]:
    """The published models whose analysis has been read for the installed transformers."""
    return sorted(path.stem for path in GOLDEN.glob("*.txt"))


def analysis(name: str) -> Analysis:
    """What is found of a published model, from its config."""
    return analyze(CONFIGS / f"{name}.json")


def told(found: Analysis) -> str:
    """An analysis as text, but for the versions it was made with."""
    lines = [f"{found.model}: {found.counted}"]
    for mode in found.modes:
        lines += ["", f"{mode.name}, {mode.input}: {change(mode.before, mode.after)}"]
        for part in mode.parts:
            times = f" x {part.count}" if part.count > 1 else ""
            lines.append(f"  {part_name(part)}{times}: {change(part.before, part.after)}")
            lines += [f"    {line}" for chain in part.chains for line in _told(chain)]
    return "\n".join([*lines, "", *(f"note: {note}" for note in found.notes)]) + "\n"


def _told(chain: Chain) -> list[str]:
    facts = {name: value for name, value in chain.facts.items() if name not in _EVERYWHERE}
    known = ", ".join(f"{name} {_plain(value)}" for name, value in facts.items())
    lines = [
        f"{chain.block or 'own code'}: {chain.name}: {chain.judgement.state}, "
        f"{chain.before.launches} -> {chain.after.launches}",
        f"  {known}",
    ]
    if chain.judgement.state == NOT_POSSIBLE:
        lines.append(f"  why: {chain.judgement.reason}")
    if chain.judgement.candidates:
        lines.append(f"  try: {', '.join(candidate.op for candidate in chain.judgement.candidates)}")
    return lines


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or names():
        (GOLDEN / f"{name}.txt").write_text(told(analysis(name)))
