"""Calls timed in turn, so that a ratio of two of them is taken under one load."""

from __future__ import annotations

import time
from collections.abc import Callable


def microseconds(
    calls: dict[str, Callable[..., object]], *arguments: object, rounds: int = 100, each: int = 300
) -> dict[str, float]:
    """The best mean of `each` calls, of each."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(each):
                call(*arguments)
            best[name] = min(best[name], (time.perf_counter() - start) / each * 1e6)
    return best
