"""What the calls of patched sites did, counted while somebody asks: fused, or run by the original, and why.

Replacements have no counters. While a trace is on, each is wrapped by a function that follows the call with
`sys.settrace`: whether the original was entered, and which line of ours was the last before it, which is the condition
that turned the call away.
"""

from __future__ import annotations

import functools
import json
import linecache
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

_OURS = str(Path(__file__).parent) + "/"
GENERATED = "<npu_autopatch: "  # how the file names of code begin that is put together at run time
_WIDTH = 80


@dataclass
class Calls:
    """The calls of one site so far.

    `reasons` counts the calls that ran the original by the condition that decided so; `examples` has the tensors of
    one call for each reason, and of a fused one under ``fused``.
    """

    site: str
    kernel: str
    fused: int = 0
    original: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


class Trace:
    """The calls of every site that ran. ``print(trace)`` is a table, `to_json` the same for programs."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], Calls] = {}

    def traced(self, site: str, kernel: str, replacement: Any) -> Any:
        """`replacement`, followed and counted. What is being compiled is not followed."""
        if not isinstance(replacement, FunctionType):
            return replacement
        calls = self.calls.setdefault((site, kernel), Calls(site, kernel))
        original = getattr(replacement, "__wrapped__", None)

        @functools.wraps(replacement)
        def followed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return replacement(*args, **kwargs)
            earlier = sys.gettrace()
            outer = getattr(earlier, "__self__", None)
            follower = _Follower(original, args, outer if isinstance(outer, _Follower) else None)
            sys.settrace(follower.entered)
            try:
                return replacement(*args, **kwargs)
            finally:
                sys.settrace(earlier)
                _note(calls, follower, args, kwargs)

        followed.__npu_autopatch_followed__ = replacement  # type: ignore[attr-defined]
        if original is not None:  # by it kernels tell whose function stands in a class
            followed.__wrapped__ = original
        return followed

    def to_json(self) -> str:
        """``[{"site", "kernel", "fused", "original", "reasons": {reason: calls}, "examples": {reason: tensors}}]``."""
        return json.dumps([vars(calls) for calls in self.calls.values()], indent=1)

    def __str__(self) -> str:
        ran = [calls for calls in self.calls.values() if calls.fused or calls.original]
        lines = [f"{len(ran)} of {len(self.calls)} patched sites were called"]
        for calls in ran:
            lines.append(f"{calls.kernel}  {calls.site}: {calls.fused} fused, {calls.original} by the original")
            for reason, count in calls.reasons.most_common():
                lines += _indented(f"{count} decided by: {reason}", 4) + _indented(calls.examples[reason], 6)
            if calls.fused:
                lines += _indented(f"fused: {calls.examples['fused']}", 4)
        return "\n".join(lines)


class _Follower:
    """One call: whether it got to the original, and the last line of ours before that.

    A call from within another that is followed tells that one, too: an entry of a registry hands its original on.
    """

    def __init__(self, original: Any, args: tuple[Any, ...], outer: _Follower | None) -> None:
        self.outer = outer
        # an entry of a registry is handed the function it stands for
        originals = [original, *(argument for argument in args if isinstance(argument, FunctionType))]
        self.codes = [code for code in map(_code, originals) if code is not None]
        self.reached = False
        self.line: tuple[str, int] | None = None
        self._latest: dict[FrameType, int] = {}

    def entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        follower: _Follower | None = self
        while follower is not None:
            if code in follower.codes and not follower.reached:
                follower.reached, follower.line = True, self.line
            follower = follower.outer
        if self.reached:
            return None
        if code.co_filename.startswith((_OURS, GENERATED)) and code.co_filename != __file__:
            return self.passed
        return None

    def passed(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.reached:
            place = frame.f_code.co_filename, frame.f_lineno
            # the interpreter leaves a condition over several lines through the first of them
            backwards = frame.f_lineno < self._latest.get(frame, 0)
            self._latest[frame] = frame.f_lineno
            if not backwards and not linecache.getline(*place).lstrip().startswith("return "):
                self.line = place
        return self.passed

    @property
    def reason(self) -> str:
        if self.line is None:
            return "unknown"
        file, number = self.line
        text = linecache.getline(file, number).strip().rstrip(":")
        for word in ("if ", "or ", "and "):
            text = text.removeprefix(word)
        return f"{text or '?'} ({file.removeprefix(_OURS)}:{number})"


def _indented(text: str, by: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * by, subsequent_indent=" " * (by + 4))


def _code(function: Any) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _note(calls: Calls, follower: _Follower, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not follower.reached:
        calls.fused += 1
        calls.examples.setdefault("fused", _tensors(args, kwargs))
        return
    calls.original += 1
    calls.reasons[follower.reason] += 1
    calls.examples.setdefault(follower.reason, _tensors(args, kwargs))


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    words = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} {t.device}" for t in given]
    return ", ".join(words) or "no tensors"


def unfollowed(function: Any) -> Any:
    """What a trace has wrapped, or the function itself."""
    return getattr(function, "__npu_autopatch_followed__", function)
