"""`analyze`: a model run with few layers of each kind, unpatched and patched; its ops become chains, each judged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from npu_autopatch import activation
from npu_autopatch.analysis import chains, layers, naming, running
from npu_autopatch.analysis.facts import facts
from npu_autopatch.analysis.judgements import judged
from npu_autopatch.analysis.recording import Op, Recording
from npu_autopatch.analysis.result import DECODE, MODES, PREFILL, TRAINING, Analysis, Chain, Cost, Mode, Part
from npu_autopatch.analysis.seen import Seen
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.reporting import PATCHED, Row
from npu_autopatch.settings import Settings, SettingsError
from npu_autopatch.verification import small
from npu_autopatch.verification.source import Architecture, SourceError, architecture

OUTSIDE = "outside the layers"
TOKENS, BATCH = 4096, 1
SMALL_TOKENS, SMALL_BATCH = 11, 2
Progress = Callable[[str, float], None]
_SITE = {"norm": "rms_norm", "residual add and norm": "rms_norm", "rope": "rope", "MLP": "swiglu"}
_SITE |= dict.fromkeys(("dispatch", "experts", "combine"), "moe")


def analyze(
    model_or_config: Any,
    *,
    tokens: int = TOKENS,
    batch: int = BATCH,
    kernels: str | Iterable[str] = "all",
    skip: str | Iterable[str] = (),
    trust_remote_code: bool = False,
    progress: Progress = lambda words, share: None,
) -> Analysis:
    """Take a model apart into the chains of ops a fused op can serve, with the launches and bytes of each.

    `model_or_config` is a folder, a config.json, a model type, a config or a model; of a model only its config is
    used. It runs at its real sizes, in bf16, `batch` sequences of `tokens`, on tensors without values; where its code
    asks for values, made small and with values on the CPU. Raises `SourceError`, and `SettingsError` for wrong
    arguments and while the package is enabled.
    """
    if tokens < 1 or batch < 1:
        raise SettingsError(f"tokens is {tokens} and batch {batch}: give numbers of 1 or more")
    if activation.report().settings.get("active"):
        raise SettingsError("the package is enabled, so that nothing could run unpatched: call disable() first")
    Settings.of(REGISTRY, kernels, skip)
    given = architecture(model_or_config, trust_remote_code)
    notes: list[str] = []
    longest = getattr(given.config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < tokens + 1:
        notes = [f"{longest - 1} tokens were run, not {tokens}: the model has {longest} positions"]
        tokens = longest - 1
    patching = {"kernels": kernels, "skip": skip, "backend": "emulate"}
    progress("building", 0.0)
    try:
        try:
            model, alike = layers.fewer(given.config, given.cls)
            work = _Work(model, alike, batch, tokens, patching, progress)
            counted = f"its own sizes in bf16, {batch} x {tokens} tokens, on tensors without values"
        except _NeedsValues as error:
            model, alike = _made_small(given)
            work = _Work(model, alike, SMALL_BATCH, SMALL_TOKENS, patching, progress)
            counted = f"made small, {SMALL_BATCH} x {SMALL_TOKENS} tokens, for its code asks for values ({error})"
    except running.NotRun as error:
        raise SourceError(f"{given.name} cannot be analysed: {error}") from error
    except (SourceError, SettingsError):
        raise
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise SourceError(f"{given.name} cannot be run ({words})") from error
    notes += [*(f"not analysed: {words}" for words in given.left_out), *work.notes]
    return Analysis(given.name, counted, _versions(), tuple(work.modes), tuple(notes))


class _NeedsValues(Exception):
    """A model whose code asks tensors for values; the message is where that stopped."""


def _made_small(given: Architecture) -> tuple[Any, layers.Alike]:
    config = small.smaller(given.config)
    model = small.as_loaded(small.randomise(given.cls(config)), torch.bfloat16)
    return model, layers.alike(model)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("npu-autopatch", "transformers", "torch", "torch_npu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass
class _Group:
    """The ops of one chain in one block of one layer."""

    before: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)


class _Work:
    """The runs of one model, unpatched and patched, and the modes that come of them."""

    def __init__(
        self,
        model: Any,
        alike: layers.Alike,
        batch: int,
        tokens: int,
        patching: dict[str, Any],
        progress: Progress,
    ) -> None:
        self.model, self.alike, self.batch, self.tokens = model, alike, batch, tokens
        self.notes: list[str] = []
        self.reasons: dict[tuple[str, str], str] = {}
        self.kinds: dict[str, str] = {}  # of each layer in words, as it is in the first mode
        given = running.inputs(model, batch, tokens)
        homes = {type(part).__module__ for part in model.modules()}
        with activation.patched(**{**patching, "kernels": "all"}) as report:
            every = [row for row in report.sites if row.module in homes]
        marked = running.sites(every)  # those of kernels left out are chains all the same
        with activation.patched(**patching) as report:
            self.rows = [row for row in report.sites if row.module in homes]
            after = {}
            for step, mode in enumerate(MODES):
                progress(f"{mode}, patched", 0.1 + step * 0.15)
                after[mode] = self.recorded(mode, given, marked)
                self.ask_why(mode, after[mode], given)
        before = {}
        for step, mode in enumerate(MODES):
            progress(f"{mode}, unpatched", 0.55 + step * 0.15)
            before[mode] = self.recorded(mode, given, marked)
        self.modes = []
        for mode in MODES:
            one, other = before[mode], after[mode]
            if isinstance(one, Recording) and isinstance(other, Recording):
                self.modes.append(self.mode(mode, one, other))
            else:
                self.notes.append(f"{mode} was not run: {one if not isinstance(one, Recording) else other}")
        asked = max((found.asked for found in before.values() if isinstance(found, Recording)), default=0)
        if asked:
            self.notes.append(
                "where the model's code asks whether something holds for all tokens (no padding, one sequence a row) "
                "the answer was yes"
            )
        if any(
            "aten::_grouped_mm" in chain.ops_before for mode in self.modes for p in mode.parts for chain in p.chains
        ):
            self.notes.append(
                "torch's grouped product counts as a launch for each group that has rows: torch_npu has no kernel for "
                "it, and torch itself runs one product a group"
            )

    def recorded(self, mode: str, given: dict[str, Any], marked: list[running.Site]) -> Recording | str:
        """What the model did, or why it was not run. Raises `_NeedsValues`."""
        try:
            return running.run(self.model, mode, given, marked)
        except running.NotRun as error:
            return str(error)
        except Exception as error:
            if next(self.model.parameters()).device.type != "meta":
                raise
            raise _NeedsValues(" ".join(f"{type(error).__name__}: {error}".split())[:120]) from error

    def ask_why(self, mode: str, found: Recording | str, given: dict[str, Any]) -> None:
        """Which of our conditions sent calls of patched sites to the original, where some were."""
        if isinstance(found, str) or not self.unfused(found):
            return
        with activation.trace() as trace:
            running.run(self.model, mode, given, [])
        for call in trace.calls.values():
            if call.reasons:
                self.reasons[mode, call.site] = ", ".join(dict.fromkeys(call.reasons))

    def unfused(self, found: Recording) -> bool:
        """Whether a patched site had a call without a fused op."""
        patched = {row.name for row in self.rows if row.state == PATCHED}
        calls: dict[int, bool] = {}
        for op in found.ops:
            for scope in op.scopes:
                if scope.name in patched:
                    calls[scope.number] = calls.get(scope.number, False) or op.fused
        return not all(calls.values())

    def mode(self, mode: str, before: Recording, after: Recording) -> Mode:
        """One mode: its layers, each for its kind, and what is outside of them."""
        groups: dict[str, dict[tuple[str, str], _Group]] = defaultdict(lambda: defaultdict(_Group))
        for recording, side in ((before, "before"), (after, "after")):
            for op, place in zip(recording.ops, chains.placed(recording), strict=True):
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
        rows = [row for row in self.rows if row.name in named and row.kernel == kernel]
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
        told = {
            row.name: self.reasons.get((mode, row.name), "") if row.state == PATCHED else row.reason for row in rows
        }
        words = told.values()
        return "; ".join(dict.fromkeys(word for word in words if word))


def _crossing(recording: Recording) -> set[int]:
    """The ops that a layer begins with what another has ended with: additions read by the next layer's norm."""
    return {
        op.index
        for op in recording.ops
        if op.within("rms_norm")
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
    inner = {name: group for (home, name), group in groups.items() if home.startswith(f"{block}.")}
    own = {name: group for (home, name), group in groups.items() if home == block}
    return {name: _forward(group.before) for name, group in {**inner, **own}.items()}


def _forward(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.forward is None]


def _cost(ops: list[Op]) -> Cost:
    return Cost(sum(op.launches for op in ops), sum(op.bytes for op in ops))


def _by_name(ops: list[Op]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for op in ops:
        counts[op.name] += op.launches
    return dict(counts.most_common())
