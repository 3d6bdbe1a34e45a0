"""What a verification found: for the whole model in each mode, and for each site."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Largest:
    """The largest error of one part and the original's, in units in the last place of the part's largest value."""

    part: str
    ours: float
    original: float


@dataclass
class Part:
    """The model in one mode and dtype, or one site.

    `error` and `gradient` are the largest errors against fp64, ours and the original's, in units in the last place of
    the largest value; of a gradient also its name.
    """

    name: str
    error: Largest | None = None
    gradient: Largest | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class SiteResult(Part):
    """One patched site. `fused` and `original` count calls, `why_original` says in which mode and why."""

    kernel: str = ""
    variant: str = ""
    fused: int = 0
    original: int = 0
    why_original: str = ""
    seconds: tuple[float, float] | None = None


@dataclass
class Verification:
    """What was run, what was found, and what was not verified and why. ``print(verification)`` is the table."""

    model: str
    backend: str
    chosen: str
    versions: dict[str, str] = field(default_factory=dict)
    modes: list[Part] = field(default_factory=list)
    sites: list[SiteResult] = field(default_factory=list)
    not_patched: list[str] = field(default_factory=list)
    not_verified: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Each in a line that begins with the site or mode it was found in."""
        return [f"{part.name}: {words}" for part in (*self.sites, *self.modes) for words in part.problems]

    @property
    def passed(self) -> bool:
        """Something was run, and nothing is wrong."""
        return bool(self.modes) and not self.problems

    @property
    def fused(self) -> int:
        """The calls of sites that ran fused."""
        return sum(site.fused for site in self.sites)

    def to_json(self) -> str:
        """All of it, and ``passed``."""
        return json.dumps({**asdict(self), "passed": self.passed, "problems": self.problems}, indent=1)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Verification:
        """From what `to_json` has written."""
        kept = {name: value for name, value in content.items() if name not in ("passed", "problems", "modes", "sites")}
        modes = [Part(**_measured(part)) for part in content["modes"]]
        return cls(**kept, modes=modes, sites=[SiteResult(**_measured(site)) for site in content["sites"]])

    def __str__(self) -> str:
        """The table in plain text, as wide as the terminal."""
        from rich.console import Console

        screen = Console(width=shutil.get_terminal_size().columns, highlight=False, no_color=True)
        with screen.capture() as shown:
            screen.print(self)
        return shown.get().rstrip()

    def __rich__(self) -> object:
        from npu_autopatch.verification.table import shown

        return shown(self)


def _measured(part: dict[str, Any]) -> dict[str, Any]:
    there = {name: Largest(**part[name]) for name in ("error", "gradient") if part[name] is not None}
    return {**part, **there}
