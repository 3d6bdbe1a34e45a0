"""What an analysis found: for each mode and kind of layer its chains, each with its state and its cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

FUSED, BY_TORCH_NPU, CANDIDATE, NOT_POSSIBLE, NO_OP = STATES = (
    "fused here",
    "fused by torch_npu",
    "candidate",
    "not possible",
    "no op exists",
)
PREFILL, DECODE, TRAINING = MODES = ("prefill", "decode", "training")


@dataclass(frozen=True)
class Cost:
    """Launches, and bytes read and written by them."""

    launches: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.launches + other.launches, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.launches * times, self.bytes * times)


@dataclass(frozen=True)
class Candidate:
    """An op of torch_npu that could serve a chain.

    `prepare` is what has to be made for it, `check` the constraint to look at before, `experiment` the smallest trial
    that tells, `source` where the contract stands.
    """

    op: str
    prepare: str
    check: str
    experiment: str
    source: str


@dataclass(frozen=True)
class Judgement:
    """The state of a chain, why, and where that is written; `candidates` are the ops to try."""

    state: str
    reason: str
    source: str = ""
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Chain:
    """The ops of one block that do one thing: ``norm``, ``attention core``, ``router``...

    `block` is the module's path within its layer, empty for the layer's own code. `facts` are what was seen: sizes,
    dtypes, the kind of the scores. `ops_before` and `ops_after` count the launches by op; `sites` are ours in it.
    """

    name: str
    block: str
    before: Cost
    after: Cost
    judgement: Judgement
    ops_before: dict[str, int] = field(default_factory=dict)
    ops_after: dict[str, int] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One layer, which stands for the `count` layers of its kind; or, named ``outside the layers``, all else."""

    name: str
    kind: str
    count: int
    chains: tuple[Chain, ...]

    @property
    def before(self) -> Cost:
        """Of one such layer, unpatched."""
        return sum((chain.before for chain in self.chains), Cost())

    @property
    def after(self) -> Cost:
        """Of one such layer, patched."""
        return sum((chain.after for chain in self.chains), Cost())


@dataclass(frozen=True)
class Mode:
    """The model in ``prefill``, ``decode`` or ``training``; `input` says in words what it was given."""

    name: str
    input: str
    parts: tuple[Part, ...]

    @property
    def before(self) -> Cost:
        """Of the whole model, unpatched."""
        return sum((part.before * part.count for part in self.parts), Cost())

    @property
    def after(self) -> Cost:
        """Of the whole model, patched."""
        return sum((part.after * part.count for part in self.parts), Cost())

    @property
    def states(self) -> Counter[str]:
        """The launches, unpatched, of the whole model by the state of their chain."""
        found: Counter[str] = Counter()
        for part in self.parts:
            for chain in part.chains:
                found[chain.judgement.state] += chain.before.launches * part.count
        return found


@dataclass(frozen=True)
class Analysis:
    """What was counted and how (`counted`), and what a reader must know beside it (`notes`)."""

    model: str
    counted: str
    versions: dict[str, str]
    modes: tuple[Mode, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Analysis:
        """From what `to_json` has written."""
        modes = tuple(Mode(**{**mode, "parts": tuple(map(_part, mode["parts"]))}) for mode in content["modes"])
        return cls(**{**content, "modes": modes, "notes": tuple(content["notes"])})


def _part(content: dict[str, Any]) -> Part:
    return Part(**{**content, "chains": tuple(map(_chain, content["chains"]))})


def _chain(content: dict[str, Any]) -> Chain:
    told = content["judgement"]
    judgement = Judgement(**{**told, "candidates": _candidates(told["candidates"])})
    costs = {name: Cost(**content[name]) for name in ("before", "after")}
    return Chain(**{**content, **costs, "judgement": judgement, "sites": tuple(content["sites"])})


def _candidates(content: Iterable[dict[str, str]]) -> tuple[Candidate, ...]:
    return tuple(Candidate(**candidate) for candidate in content)
