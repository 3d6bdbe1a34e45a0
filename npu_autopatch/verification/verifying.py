"""`verify`: each mode and dtype of a model, then each of its sites alone; more inputs where luck may have decided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from npu_autopatch import activation
from npu_autopatch.reporting import FAILED, PATCHED, Report, Row
from npu_autopatch.settings import SettingsError
from npu_autopatch.verification import compiled, passes, sites
from npu_autopatch.verification.comparison import Pass, errors, furthest, largest, unlike
from npu_autopatch.verification.compiled import COMPILED
from npu_autopatch.verification.draws import MORE_SEEDS, SEED, Case, Draw, behind
from npu_autopatch.verification.passes import CHECKPOINTS, MODES, TRAINING, NotPossible
from npu_autopatch.verification.result import Part, SiteResult, Verification
from npu_autopatch.verification.sites import Call, Watch, alone
from npu_autopatch.verification.source import Source, source

DTYPES = (torch.float32, torch.bfloat16)
_WORDS = 160
# what a mode is compared with, where it does not differ in what it computes: no mode of torch is active within the
# second forward of a checkpoint, so that choices could not be repeated there, nor anything be computed in fp64
_PLAIN = {CHECKPOINTS: TRAINING, COMPILED: TRAINING}
Progress = Callable[[str, float], None]


def verify(
    model_or_config: Any,
    *,
    full: bool = False,
    compile: bool = False,
    kernels: str | Iterable[str] = "all",
    skip: str | Iterable[str] = (),
    backend: str = "",
    trust_remote_code: bool = False,
    progress: Progress = lambda words, share: None,
) -> Verification:
    """Run a model unpatched and patched in fp32 and bf16, and measure both against fp64.

    `model_or_config` is a folder, a config.json, a model type, a config or a model. It is made small with random
    weights; `full` keeps its sizes and weights, as a model that is given does. `compile` adds a step of training under
    torch.compile. `backend` is ``npu`` where torch has a device, else ``emulate``. Raises `SourceError`, and
    `SettingsError` for wrong arguments and while the package is enabled.
    """
    if activation.report().settings.get("active"):
        raise SettingsError("the package is enabled, so that nothing could run unpatched: call disable() first")
    backend, chosen = (backend, "as asked for") if backend else _backend()
    given = source(model_or_config, full, trust_remote_code)
    found = Verification(given.name, backend, chosen, not_verified=list(given.not_verified))
    work = _Work(given, {"kernels": kernels, "skip": skip, "backend": backend}, compile, found)
    progress("building", 0.0)
    first = work.draw(SEED, tuple(itertools.product(DTYPES, MODES)), progress)
    others: list[Draw] = []
    for seeds in MORE_SEEDS:
        if first.hopeless() or not (cases := first.behind(others)):
            break
        for place, seed in enumerate(seeds):
            progress("other inputs", place / len(seeds))
            others.append(work.draw(seed, cases, lambda words, share: None))
    for where, words in first.problems:
        work.part(where).problems.append(words)
    for (where, case), far in behind(first, others).items():
        work.part(where).problems += [each if where == case else f"{case}, {each}" for each in far]
    return found


def _backend() -> tuple[str, str]:
    from npu_autopatch.cli import machine

    if missing := machine.why_no_torch_npu():
        return "emulate", missing
    names = machine.devices()
    return ("npu", ", ".join(names)) if names else ("emulate", "torch.npu sees no device")


class _Work:
    """The runs of one model, and where what they show is noted."""

    def __init__(self, given: Source, patching: dict[str, Any], compile: bool, found: Verification) -> None:
        self.given, self.patching, self.compile, self.found = given, patching, compile, found
        self.parts: dict[str, Part] = {}

    def part(self, name: str) -> Part:
        """The site or mode of that name."""
        return self.parts[name]

    def draw(self, seed: int, wanted: tuple[Case, ...], progress: Progress) -> Draw:
        """The `wanted` dtypes and modes on one draw of inputs, and the calls of sites alone; the compiled step, too."""
        cases = [case for case in wanted if case[1] in MODES]
        compiling = self.compile and (seed == SEED or (torch.float32, COMPILED) in wanted)
        drawn = Draw(cases={_named(case): case for case in [*cases, (torch.float32, COMPILED)]})
        dtypes = dict.fromkeys([dtype for dtype, _ in wanted])
        models = {dtype: self.given.build(dtype) for dtype in dtypes}
        batches = {dtype: passes.inputs(model, seed) for dtype, model in models.items()}
        got: dict[tuple[torch.dtype, str], Pass | Exception] = {}
        homes = {type(part).__module__ for model in models.values() for part in model.modules()}
        on_device = self.found.backend == "npu"
        device = {dtype: model.to("npu") if on_device else model for dtype, model in models.items()}
        with activation.patched(**self.patching) as report:
            with Watch(slot for slot in activation._ledger) as watch:
                for place, (dtype, mode) in enumerate(cases):
                    progress(f"{mode} in {_short(dtype)}, patched", place / len(cases) / 3)
                    watch.case = dtype, mode
                    got[dtype, mode] = _tried(passes.run, device[dtype], mode, batches[dtype])
            if compiling:
                progress("compiling, patched", 1 / 3)
                cases.append((torch.float32, COMPILED))
                got[cases[-1]] = _tried(compiled.step, device[torch.float32], batches[torch.float32])
            progress("sites", 1 / 3)
            again = [(call, _tried(alone, call)) for call in watch.calls]
            times = {id(call): sites.seconds(call) for call in watch.calls if on_device}
            if not self.parts:
                self._begin(report, homes, watch, _why(watch))
            del report  # one that is kept asks who holds what, which takes long
        for place, (dtype, mode) in enumerate(cases):
            progress(f"{mode} in {_short(dtype)}, original and fp64", (1 + place / len(cases)) / 3)
            self._compare_mode(drawn, device[dtype], dtype, mode, batches[dtype], got[dtype, mode])
        for place, (call, mine) in enumerate(again):
            progress(f"{call.site} alone", (2 + place / len(again)) / 3)
            self._compare_site(drawn, call, mine, times)
        return drawn

    def _begin(self, report: Report, homes: set[str], watch: Watch, why: dict[str, str]) -> None:
        """Take down the sites of the model's modules."""
        self.found.versions = {name: report.versions[name] for name in ("transformers", "torch", "torch_npu")}
        for row in report.sites:
            if row.module not in homes:
                continue
            if row.state == PATCHED:
                site = self._site(row, watch, why.get(row.name, ""))
                self.parts[row.name] = site
                self.found.sites.append(site)
            elif row.state == FAILED:
                self.parts[row.name] = site = SiteResult(row.name, kernel=row.kernel)
                site.problems.append(f"failed to be patched: {_last_line(row.reason)}")
                self.found.sites.append(site)
            else:
                self.found.not_patched.append(
                    f"{row.name} ({row.kernel or 'class'}, {row.state}): {_last_line(row.reason)}"
                )

    def _site(self, row: Row, watch: Watch, why: str) -> SiteResult:
        counted = [(mode, fused, n) for (site, mode, fused), n in watch.counts.items() if site == row.name]
        original = {mode: n for mode, fused, n in counted if not fused}
        modes = ", ".join(f"{n} in {mode}" for mode, n in original.items())
        return SiteResult(
            row.name,
            kernel=row.kernel,
            variant=row.variant,
            fused=sum(n for _, fused, n in counted if fused),
            original=sum(original.values()),
            why_original=f"{modes}{f'; {why}' if why else ''}",
        )

    def _compare_mode(
        self, drawn: Draw, model: Any, dtype: torch.dtype, mode: str, batch: Any, got: Pass | Exception
    ) -> None:
        name = _named((dtype, mode))
        if isinstance(got, NotPossible):
            self._not_run(name, str(got))
            return
        original = self._original(model, mode, batch, got)
        if isinstance(original, Exception):
            self._not_run(name, f"the model itself raises {_said(original)}")
            return
        if not all(value.isfinite().all() for value in original.returned.values()):
            self._not_run(name, "the model itself gives nan or inf")
            return
        if name not in self.parts:
            self.parts[name] = Part(name)
            self.found.modes.append(self.parts[name])
        if isinstance(got, Exception):
            drawn.problems.append((name, f"patched, it raises {_said(got)}"))
            return
        if mode == COMPILED and not got.calls and self.found.fused:
            drawn.problems.append((name, "no graph has a fused op"))
        exact = _tried(passes.run, model, _PLAIN.get(mode, mode), batch, got.choices, True)
        if isinstance(exact, Exception):
            self._without_reference(name, f"in fp64, the model itself raises {_said(exact)}")
            return
        if not all(value.isfinite().all() for value in exact.returned.values()):
            self._without_reference(name, "in fp64, the model itself gives nan or inf")
            return
        self._compare(drawn, name, name, got, original, exact, dtype)

    def _original(self, model: Any, mode: str, batch: Any, got: Pass | Exception) -> Pass | Exception:
        if mode == COMPILED:
            return _tried(compiled.step, model, batch)
        if isinstance(got, Exception):
            return _tried(passes.run, model, mode, batch)
        return _tried(passes.run, model, _PLAIN.get(mode, mode), batch, got.choices)

    def _compare_site(self, drawn: Draw, call: Call, mine: Pass | Exception, times: dict[int, float]) -> None:
        part = self.parts.get(call.site)
        if not isinstance(part, SiteResult):
            return  # of a module beside the model's own
        dtype, case = call.case[0], _named(call.case)
        theirs = _tried(alone, call, None if isinstance(mine, Exception) else mine.choices)
        if isinstance(theirs, Exception):
            return  # what it was given cannot be given again
        if isinstance(mine, Exception):
            drawn.problems.append((call.site, f"{case}: patched, it raises {_said(mine)}"))
            return
        if id(call) in times and part.seconds is None and call.fused:
            part.seconds = sites.seconds(call), times[id(call)]
        exact = _tried(alone, call, mine.choices, True)
        if isinstance(exact, Exception):
            self._not_run(f"{call.site} alone", f"in fp64, it raises {_said(exact)}")
            return
        self._compare(drawn, call.site, case, mine, theirs, exact, dtype)

    def _compare(
        self, drawn: Draw, where: str, case: str, got: Pass, original: Pass, exact: Pass, dtype: torch.dtype
    ) -> None:
        for words in unlike(got, original):
            drawn.problems.append((where, words if where == case else f"{case}, {words}"))
        if any(got.returned.get(n) is None or got.returned[n].shape != t.shape for n, t in original.returned.items()):
            return
        part = self.parts[where]
        answer, gradient = largest(got, original, exact, dtype)
        part.error, part.gradient = furthest((part.error, answer)), furthest((part.gradient, gradient))
        kept = drawn.errors[where, case]
        for name, values in errors(got, original, exact, dtype).items():
            kept[name] = tuple(a + b for a, b in zip(kept.get(name, (0.0, 0.0, 0.0)), values, strict=True))  # type: ignore[assignment]

    def _without_reference(self, name: str, why: str) -> None:
        """Take a mode that cannot be measured out of those that were verified."""
        self._not_run(name, why)
        if self.parts[name] in self.found.modes:
            self.found.modes.remove(self.parts[name])

    def _not_run(self, name: str, why: str) -> None:
        line = f"{name}: {why}"
        if line not in self.found.not_verified:
            self.found.not_verified.append(line)


def _why(watch: Watch) -> dict[str, str]:
    """Of each site with calls that were not fused: the conditions of ours that decided so."""
    calls = [call for call in watch.calls if not call.fused and call.case[1] != CHECKPOINTS]
    if not calls:
        return {}
    with activation.trace() as trace:
        for call in calls:
            _tried(alone, call)
    sites = {call.site for call in calls}
    found = {traced.site: traced.reasons for traced in trace.calls.values() if traced.site in sites}
    return {site: ", ".join(reasons) for site, reasons in found.items() if reasons}


def _tried(function: Callable[..., Pass], *args: Any) -> Pass | Exception:
    try:
        return function(*args)
    except Exception as error:
        return error


def _said(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= _WORDS else f"{words[:_WORDS]}..."


def _last_line(reason: str) -> str:
    return reason.strip().splitlines()[-1] if reason.strip() else ""


def _named(case: Case) -> str:
    return f"{_short(case[0])} {case[1]}"


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
