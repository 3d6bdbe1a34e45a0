"""What is known of one chain of a model, as the judgements read it; a fact may always be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_autopatch.analysis.result import DECODE, TRAINING


@dataclass(frozen=True)
class Case:
    """One chain in one mode: its facts, the calls that ran fused and original, and why some were refused."""

    chain: str
    mode: str
    facts: Mapping[str, Any]
    fused: int = 0
    original: int = 0
    refused: str = ""

    @property
    def training(self) -> bool:
        """Whether gradients are needed."""
        return self.mode == TRAINING

    @property
    def decoding(self) -> bool:
        """Whether one token a sequence is run, with a cache."""
        return self.mode == DECODE

    def number(self, fact: str) -> int | None:
        """A whole number; None if it is not known. ``sequence`` is that of the tokens of one of the batch."""
        value = self.facts.get(fact)
        if fact == "sequence" and value is None:
            tokens, batch = self.number("tokens"), self.number("batch")
            return tokens // batch if tokens and batch else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def flag(self, fact: str) -> bool | None:
        """Yes or no; None if it is not known."""
        value = self.facts.get(fact)
        return None if value is None else bool(value)

    def word(self, fact: str) -> str:
        """A word; empty if it is not known."""
        value = self.facts.get(fact)
        return "" if value is None else str(value)

    def counted(self, fact: str, noun: str = "") -> str:
        """The number and what it counts: ``8 experts``, or ``all its experts``."""
        value = self.number(fact)
        noun = noun or fact.replace("_", " ")
        return f"all its {noun}" if value is None else f"{value} {noun}"

    def told(self, fact: str) -> str:
        """The number as text, or where it is to be had."""
        value = self.number(fact)
        return f"its {fact.replace('_', ' ')}" if value is None else str(value)

    def shape(self, *sizes: str | int) -> str:
        """A shape as text, each size a number or the name of a fact."""
        told = (str(size) if isinstance(size, int) else self.told(size).removeprefix("its ") for size in sizes)
        return f"[{', '.join(told)}]"

    @property
    def dtype(self) -> str:
        """The dtype as torch spells it, bfloat16 where it is not known."""
        return self.word("dtype").removeprefix("torch.") or "bfloat16"
