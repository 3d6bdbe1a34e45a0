"""Draws of inputs, and what they tell together of what is further from fp64 than rounding explains."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from npu_autopatch.verification.comparison import Errors, typically_behind

SEED = 3
# Few at first; more where these do not acquit. The parts of a model are many, and some are behind in any draw.
MORE_SEEDS = (range(100, 108), range(108, 124))
_HOPELESS = 10.0  # times the limit: no more draws

Where = tuple[str, str]  # a site or mode, and the dtype and mode of it
Case = tuple[torch.dtype, str]


@dataclass
class Draw:
    """One draw of inputs: what is wrong whatever the inputs, and the errors of all parts."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    errors: dict[Where, Errors] = field(default_factory=lambda: defaultdict(dict))
    cases: dict[str, Case] = field(default_factory=dict)

    def behind(self, others: list[Draw]) -> tuple[Case, ...]:
        """The dtypes and modes in which something is behind."""
        names = {case for (_, case) in behind(self, others)}
        return tuple(case for name, case in self.cases.items() if name in names)

    def hopeless(self) -> bool:
        """Whether it is so far off that other inputs cannot help, or wrong in another way."""
        values = [values for part in self.errors.values() for values in part.values()]
        far = any(not mine <= _HOPELESS * (1.5 * theirs + unit) for mine, theirs, unit in values)
        return far or bool(self.problems)


def behind(first: Draw, others: list[Draw]) -> dict[Where, list[str]]:
    """What is behind in the first draw, and typically so in the others where they have it.

    The first draw only says what to look at: what it has been chosen for is no evidence.
    """
    found = {}
    for where, values in first.errors.items():
        suspects = typically_behind([values])
        rest = [draw.errors[where] for draw in others if where in draw.errors]
        seen, typical = {name for draw in rest for name in draw}, typically_behind(rest)
        words = [typical.get(name, told) for name, told in suspects.items() if name in typical or name not in seen]
        if words:
            found[where] = words
    return found
