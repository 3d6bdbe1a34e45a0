"""What makes a run of `bisect` a failed one, beside its exit code."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from npu_autopatch.cli.terminal import CommandError

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?!\w|\.\d)"
# neither a part of a word nor the name of what follows, as in "nan: 0" or "nan=0.0"
_BROKEN = r"[-+]?(?:nan|inf(?:inity)?)(?![\w/]|[-.]\w|[\"']?\s*(?:=|:(?!\s+[a-z])))"
# A nan in the place of a value: at the start of a line, or after a sign that comes before values; or else after a word
# that prose would not have there, at the end of a clause or before the next word with its number.
_AFTER_A_SIGN = rf"(?:^|[=:(\[{{,|])\s*[\"']?{_BROKEN}"
_AFTER_A_WORD = rf"\b(?!(?:no|not|for|or|and|any|an?|the|of|to|if|without)\b)[\w.]+\s+{_BROKEN}"
_END = r"[\"']?\s*(?:$|[,;|()\]}]|-?\d|\w+\W{1,3}\d)"
_NOT_A_NUMBER = re.compile(rf"{_AFTER_A_SIGN}|{_AFTER_A_WORD}(?={_END})", re.IGNORECASE)


class Criterion:
    """Only the exit code counts."""

    needs_reference = False

    def of_line(self, line: str) -> str:
        """Why a run that prints `line` has failed and may be stopped; an empty string if it may go on."""
        return ""

    def of_output(self, log: Path) -> str:
        """Why a run that ended well has failed after all, by all it printed; an empty string if it has not."""
        return ""

    def take_reference(self, log: Path) -> None:
        """What the program printed without npu_autopatch. Raises `CommandError` if that is of no use."""


class NotANumber(Criterion):
    """A nan or inf printed as a number."""

    def of_line(self, line: str) -> str:
        return f"printed {' '.join(line.split())!r}" if _NOT_A_NUMBER.search(line) else ""


@dataclass
class Numbers(Criterion):
    """The numbers printed after a word differ from those printed without npu_autopatch by more than `tolerance`."""

    word: str
    tolerance: float
    reference: list[float] = field(default_factory=list)
    largest: float = 0.0
    needs_reference = True

    def take_reference(self, log: Path) -> None:
        self.reference = self._numbers(log)
        if not self.reference:
            raise CommandError(
                f"no number was printed after {self.word!r} without npu_autopatch ({log}): "
                "give a word before the numbers as --value WORD, or a command of your own as --compare CMD"
            )

    def of_output(self, log: Path) -> str:
        """As of `Criterion`; `largest` is the largest relative difference then."""
        found = self._numbers(log)
        pairs = list(zip(found, self.reference, strict=False))
        self.largest = max((_difference(a, b) for a, b in pairs), default=0.0)
        if len(found) != len(self.reference):
            return f"printed {len(found)} times {self.word}, not {len(self.reference)}"
        for number, (value, expected) in enumerate(pairs, start=1):
            if (by := _difference(value, expected)) > self.tolerance:
                return f"{self.word} {value:g}, not {expected:g} (number {number}, {by:.1e} off)"
        return ""

    def _numbers(self, log: Path) -> list[float]:
        ahead = rf"{re.escape(self.word)}[\"')\]]*\s*(?:[:=,]|is\b)?\s*[\"'(\[]*(?:tensor\()?"
        return [float(text) for text in re.findall(rf"(?i){ahead}({_NUMBER})", log.read_text(errors="replace"))]


def _difference(value: float, expected: float) -> float:
    """Relative to the larger of both; infinite if one is no number and the other is something else."""
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(expected)):
        return math.inf
    return abs(value - expected) / max(abs(value), abs(expected))


@dataclass
class Command(Criterion):
    """A command of the user's, run after each run, does not end with 0."""

    line: str
    reference: Path = Path()

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return "{reference}" in self.line

    def take_reference(self, log: Path) -> None:
        self.reference = log

    def of_output(self, log: Path) -> str:
        line = self.line if "{output}" in self.line or self.needs_reference else f"{self.line} {{output}}"
        for name, path in (("{output}", log), ("{reference}", self.reference)):
            line = line.replace(name, shlex.quote(str(path)))
        environment = {**os.environ, "NPU_AUTOPATCH": "0"}
        done = subprocess.run(
            line,
            shell=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode in (126, 127):  # the shell's own: it cannot be run
            raise CommandError(f"--compare {self.line!r} cannot be run ({done.stdout.strip()}): give a shell command")
        said = [text.strip() for text in done.stdout.splitlines() if text.strip()]
        return f"by --compare: {said[-1] if said else f'exit code {done.returncode}'}" if done.returncode else ""
