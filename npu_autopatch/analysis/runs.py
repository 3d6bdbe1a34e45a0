"""The runs of one model in each mode, unpatched and patched, and why calls of patched sites were not fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_autopatch import activation
from npu_autopatch.analysis import running
from npu_autopatch.analysis.recording import Recording
from npu_autopatch.analysis.result import MODES
from npu_autopatch.reporting import PATCHED

Progress = Callable[[str, float], None]


class NeedsValues(Exception):
    """A model whose code asks tensors for values; the message is where that stopped."""


class Runs:
    """What a model did: `before` and `after` by mode, a recording or why there is none.

    `rows` are the sites of its modules, `reasons` the conditions that sent calls of a site to the original, by mode
    and site. Raises `NeedsValues` and what the model raises.
    """

    def __init__(self, model: Any, batch: int, tokens: int, patching: dict[str, Any], progress: Progress) -> None:
        self.model, self.batch, self.tokens = model, batch, tokens
        self.reasons: dict[tuple[str, str], str] = {}
        self.before: dict[str, Recording | str] = {}
        self.after: dict[str, Recording | str] = {}
        given = running.inputs(model, batch, tokens)
        homes = {type(part).__module__ for part in model.modules()}
        with activation.patched(**{**patching, "kernels": "all"}) as report:
            every = [row for row in report.sites if row.module in homes]
        marked = running.sites(every)  # those of kernels left out are chains all the same
        with activation.patched(**patching) as report:
            self.rows = [row for row in report.sites if row.module in homes]
            for step, mode in enumerate(MODES):
                progress(f"{mode}, patched", 0.1 + step * 0.15)
                self.after[mode] = self.recorded(mode, given, marked)
                self.ask_why(mode, self.after[mode], given)
        for step, mode in enumerate(MODES):
            progress(f"{mode}, unpatched", 0.55 + step * 0.15)
            self.before[mode] = self.recorded(mode, given, marked)

    @property
    def asked(self) -> bool:
        """Whether the model asked for a value there was not, and was answered."""
        return any(found.asked for found in self.before.values() if isinstance(found, Recording))

    def recorded(self, mode: str, given: dict[str, Any], marked: list[running.Site]) -> Recording | str:
        """What the model did, or why it was not run. Raises `NeedsValues`."""
        try:
            return running.run(self.model, mode, given, marked)
        except running.NotRun as error:
            return str(error)
        except Exception as error:
            if next(self.model.parameters()).device.type != "meta":
                raise
            raise NeedsValues(" ".join(f"{type(error).__name__}: {error}".split())[:120]) from error

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
