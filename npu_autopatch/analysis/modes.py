"""From the runs of a model the chains of each of its layers, each with its cost, its facts and its judgement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from npu_autopatch.analysis import chains, layers, naming, placing
from npu_autopatch.analysis.facts import facts
from npu_autopatch.analysis.judgements import judged
from npu_autopatch.analysis.recording import Op, Recording
from npu_autopatch.analysis.result import DECODE, MODES, PREFILL, TRAINING, Chain, Cost, Mode, Part
from npu_autopatch.analysis.runs import Runs
from npu_autopatch.analysis.seen import Seen
from npu_autopatch.reporting import PATCHED, Row

OUTSIDE = "outside the layers"
_SITE = {"norm": "rms_norm", "residual add and norm": "rms_norm", "rope": "rope", "MLP": "swiglu"}
_SITE |= dict.fromkeys(("dispatch", "experts", "combine"), "moe")


@dataclass
class _Group:
    """The ops of one chain in one block of one layer."""

    before: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)


class Modes:
    """The modes of `runs` that were run; of `alike` layers, one stands for all."""

    def __init__(self, runs: Runs, alike: layers.Alike) -> None:
        self.runs, self.alike = runs, alike
        self.model, self.batch, self.tokens = runs.model, runs.batch, runs.tokens
        self.kinds: dict[str, str] = {}  # of each layer in words, as it is in the first mode

    def __iter__(self) -> Iterator[Mode]:
        for mode in MODES:
            before, after = self.runs.before[mode], self.runs.after[mode]
            if isinstance(before, Recording) and isinstance(after, Recording):
                yield self.mode(mode, before, after)

    def mode(self, mode: str, before: Recording, after: Recording) -> Mode:
        """One mode: its layers, each for its kind, and what is outside of them."""
        groups: dict[str, dict[tuple[str, str], _Group]] = defaultdict(lambda: defaultdict(_Group))
        for recording, side in ((before, "before"), (after, "after")):
            for op, place in zip(recording.ops, placing.placed(recording), strict=True):
                if not place.layer or place.layer in self.alike:
                    getattr(groups[place.layer][place.block, place.chain], side).append(op)
        tokens = self.batch if mode == DECODE else self.batch * self.tokens
        crossing = _crossing(before)
        parts = []
        for layer in sorted(groups, key=lambda name: (not name, *naming.order(name))):
            found = [
                self.chain(mode, tokens, layer, block, name, group, groups[layer], crossing)
                for (block, name), group in groups[layer].items()
            ]
            numbers = self.alike.get(layer, ())
            name = f"{layer.rpartition('.')[0]} {naming.ranges(numbers)}" if layer else OUTSIDE
            kind = self.kinds.setdefault(layer, naming.kind(found)) if layer else ""
            parts.append(Part(name, kind, len(numbers) if layer else 1, tuple(found)))
        told = {
            PREFILL: f"{self.batch} x {self.tokens} tokens",
            DECODE: f"{self.batch} x 1 token after {self.tokens}",
            TRAINING: f"{self.batch} x {self.tokens} tokens, forward and backward",
        }
        return Mode(mode, told[mode], tuple(parts))

    def chain(
        self,
        mode: str,
        tokens: int,
        layer: str,
        block: str,
        name: str,
        group: _Group,
        beside: dict[tuple[str, str], _Group],
        crossing: set[int],
    ) -> Chain:
        """One chain, with what is known of it and what can be said."""
        forward = _forward(group.before) or group.before or group.after
        kernel = _SITE.get(name, "")
        named = (
            {s.name for op in (*group.before, *group.after) for s in op.scopes if s.kind == kernel} if kernel else set()
        )
        rows = [row for row in self.runs.rows if row.name in named and row.kernel == kernel]
        fused = sum(op.fused for op in group.after if op.forward is None)
        seen = Seen(
            name,
            forward,
            _module(self.model, layer, block),
            _within(block, beside),
            tuple(row.variant for row in rows if row.state == PATCHED),
            self.batch,
            tokens,
            any(op.index in crossing for op in forward),
            bool(fused),
        )
        original = len({s.number for op in group.after for s in op.scopes if s.kind == kernel}) if not fused else 0
        known = facts(seen)
        return Chain(
            name,
            block,
            _cost(group.before),
            _cost(group.after),
            judged(name, mode, known, fused, original, self.refused(mode, rows) if not fused else ""),
            _by_name(group.before),
            _by_name(group.after),
            tuple(row.name for row in rows),
            known,
        )

    def refused(self, mode: str, rows: list[Row]) -> str:
        """Why sites were not fused: refused, skipped, or turned away by a condition of ours."""
        guarded = {row.name: self.runs.reasons.get((mode, row.name), "") for row in rows if row.state == PATCHED}
        words = [guarded.get(row.name, row.reason) for row in rows]
        return "; ".join(dict.fromkeys(word for word in words if word))


def _crossing(recording: Recording) -> set[int]:
    """The ops that a layer begins with what another has ended with: additions read by the next layer's norm."""
    return {
        op.index
        for op in recording.ops
        if chains.norms(op)
        and any(
            layers.layer_of(recording.ops[source].module) != layers.layer_of(op.module)
            and recording.ops[source].name == "aten::add"
            for source in op.sources
        )
    }


def _module(model: Any, layer: str, block: str) -> Any:
    path = ".".join(part for part in (layer, block) if part)
    return model.get_submodule(path)


def _within(block: str, groups: dict[tuple[str, str], _Group]) -> dict[str, list[Op]]:
    """The ops of each chain of a block, those of the blocks within it where it has none of its own."""
    own = {name: _forward(group.before) for (home, name), group in groups.items() if home == block}
    inner: dict[str, list[Op]] = {}
    for (home, name), group in groups.items():
        if not block or home.startswith(f"{block}."):
            inner.setdefault(name, []).extend(_forward(group.before))
    return {**inner, **own}


def _forward(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.forward is None]


def _cost(ops: list[Op]) -> Cost:
    return Cost(sum(op.launches for op in ops), sum(op.bytes for op in ops))


def _by_name(ops: list[Op]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for op in ops:
        counts[op.name] += op.launches
    return dict(counts.most_common())
