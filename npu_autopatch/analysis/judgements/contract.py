"""An op held against a case: its hard limits, and the candidate it is where none is broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.result import BY_TORCH_NPU, CANDIDATE, FUSED, NO_OP, NOT_POSSIBLE, Candidate, Judgement
from npu_autopatch.cli.ops_table import Entry, table

FLOATS = ("float16", "bfloat16", "float32")
HALVES = ("float16", "bfloat16")
TIMED = "Time both over 100 calls between two torch.npu.Event, after 10 to warm up."
_SNAPSHOT = "torch_npu 2.13, train 2026-10"
# From this train on an op is young enough to be missing from a torch_npu in use.
_SETTLED = "2025-10"
_AGAIN = "run the model's own code again in the backward, as checkpointing does, and differentiate that"


def contract(*ops: str) -> str:
    """The source of what is said of ops: their contracts."""
    return f"op contract of {' and '.join(ops)} ({_SNAPSHOT})"


def documentation(op: str) -> str:
    """The source of what only the documentation of an op says."""
    return f"documentation of {op} in the wheel of torch_npu 2.13.0"


@dataclass(frozen=True)
class Limit:
    """One hard constraint. `kept` is None where the fact it needs is not known; `fill` is what zeros must pad."""

    takes: str
    has: str
    kept: bool | None
    fill: str = ""

    def __str__(self) -> str:
        return f"{self.takes} ({f'here {self.has}' if self.has else 'not known here'})"


def at_most(value: int | None, limit: int, noun: str) -> Limit:
    """`noun` of `limit` or less."""
    return Limit(f"{noun} of at most {limit}", _text(value), None if value is None else value <= limit)


def below(value: int | None, limit: int, noun: str) -> Limit:
    """`noun` of less than `limit`."""
    return Limit(f"{noun} below {limit}", _text(value), None if value is None else value < limit)


def at_least(value: int | None, limit: int, noun: str) -> Limit:
    """`noun` of `limit` or more."""
    return Limit(f"{noun} of at least {limit}", _text(value), None if value is None else value >= limit)


def one_of(value: int | None, allowed: tuple[int, ...], noun: str) -> Limit:
    """One of the numbers allowed of `noun`."""
    numbers = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
    return Limit(f"{numbers} {noun}", _text(value), None if value is None else value in allowed)


def exactly(value: int | None, size: int, noun: str) -> Limit:
    """`noun` of one size."""
    return Limit(f"{noun} {size}", _text(value), None if value is None else value == size)


def filled(value: int | None, size: int, noun: str) -> Limit:
    """`noun` of exactly `size`, up to which zeros can fill a smaller one."""
    fill = f"{noun} {value} filled with zeros to {size}" if value is not None and value < size else ""
    return Limit(f"{noun} {size}", _text(value), None if value is None else value <= size, fill)


def multiple(value: int | None, of: int, noun: str, fills: bool = False) -> Limit:
    """`noun` that is a multiple of `of`, up to which zeros can fill another if `fills`."""
    even = None if value is None else value % of == 0
    fill = f"{noun} {value} filled with zeros to {-(-value // of) * of}" if fills and value and not even else ""
    return Limit(f"{noun} in multiples of {of}", _text(value), even or bool(fill) if value is not None else None, fill)


def divides(part: int | None, whole: int | None, noun: str) -> Limit:
    """`noun`: the first number divides the second."""
    if part is None or whole is None:
        return Limit(noun, "", None)
    return Limit(noun, f"{whole} and {part}", part > 0 and whole % part == 0)


@dataclass(frozen=True)
class Attempt:
    """An op to try, in words for a reader.

    `gradient` is the one to write in training where the op has none; empty where none is needed.
    """

    op: str
    prepare: str
    experiment: str
    check: str = ""
    limits: tuple[Limit, ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    gradient: str = _AGAIN
    source: str = ""

    @property
    def entry(self) -> Entry:
        """What our table has on the op."""
        return table().entries[self.op]

    @property
    def where(self) -> str:
        """The source of its limits."""
        return self.source or contract(self.op)

    @property
    def broken(self) -> list[str]:
        """The limits that the facts break, each as a clause."""
        return [f"{self.op} takes {it.takes}; this one has {it.has}" for it in self.limits if it.kept is False]

    def candidate(self, case: Case) -> Candidate:
        """What a reader needs to try it."""
        prepare = [self.prepare, *(f"{limit.fill[0].upper()}{limit.fill[1:]}." for limit in self.limits if limit.fill)]
        if case.dtype not in self.dtypes:
            prepare.append(f"A cast from {case.dtype} to {self.dtypes[-1]}, and its rounding to be accounted for.")
        if case.training and self.gradient and not self.entry.differentiable_since:
            prepare.append(f"A gradient of its own, in an autograd.Function: {self.gradient}.")
        check = [f"It takes {limit}." for limit in self.limits if not limit.fill]
        check += [
            self.check,
            *_age(self.entry, case.training and bool(self.gradient)),
            f"Devices: {self.entry.hardware}.",
        ]
        return Candidate(self.op, _joined(prepare), _joined(check), self.experiment, self.where)


def candidates(case: Case, attempts: Iterable[Attempt]) -> tuple[Candidate, ...]:
    """The attempts that no known fact forbids."""
    return tuple(attempt.candidate(case) for attempt in attempts if not attempt.broken)


def fused(case: Case, kernel: str, *further: Attempt) -> Judgement:
    """Our own kernel serves it; `further` are ops that spare more."""
    ran = f"Runs fused by {kernel}: {case.fused} {'call' if case.fused == 1 else 'calls'}"
    rest = f", and {case.original} ran the original" if case.original else ""
    why = f": {case.refused}" if rest and case.refused else ""
    return Judgement(FUSED, f"{ran}{rest}{why}.", "", candidates(case, further))


def tried(case: Case, why: str, *attempts: Attempt) -> Judgement:
    """A candidate if one attempt is left; not possible, with the limits broken, if none is."""
    found = candidates(case, attempts)
    if not found:
        clauses = [clause for attempt in attempts for clause in attempt.broken]
        sources = dict.fromkeys(attempt.where for attempt in attempts)
        return Judgement(NOT_POSSIBLE, f"{'; '.join(clauses)}.", "; ".join(sources))
    reason = f"{why} Not fused here: {case.refused}." if case.refused else why
    return Judgement(CANDIDATE, reason, found[0].source, found)


def by_torch_npu(case: Case, why: str, source: str, *further: Attempt) -> Judgement:
    """Torch_npu runs it as one kernel already; `further` are ops that spare more."""
    return Judgement(BY_TORCH_NPU, why, source, candidates(case, further))


def no_op(why: str, source: str = f"the ops of {_SNAPSHOT}: npu-autopatch ops list") -> Judgement:
    """No op computes it; `why` says which comes nearest."""
    return Judgement(NO_OP, why, source)


def _age(entry: Entry, training: bool) -> list[str]:
    told = []
    if entry.since > _SETTLED:
        told.append(f"It exists from train {entry.since} on (torch_npu {', '.join(table().trains[entry.since])}).")
    changes = list(entry.schemas.items())
    told += [
        f"It is missing from train {gone} until {back}."
        for (gone, schema), (back, again) in pairwise(changes)
        if schema is None and again
    ]
    if training and entry.differentiable_since is None:
        told.append("torch_npu gives it no gradient, in most trains silently.")
    elif training and entry.differentiable_since and entry.differentiable_since > _SETTLED:
        told.append(f"It has a gradient from train {entry.differentiable_since} on.")
    return told


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _joined(sentences: list[str]) -> str:
    return " ".join(filter(None, sentences))
