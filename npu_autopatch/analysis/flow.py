"""Which ops of a pass depend on which."""

from __future__ import annotations

from collections.abc import Iterable

from npu_autopatch.analysis.recording import Op, Recording


class Flow:
    """The ops of the forward by their number, and who reads what each makes."""

    def __init__(self, recording: Recording) -> None:
        self.ops = {op.index: op for op in recording.ops if op.forward is None}
        self.readers: dict[int, list[int]] = {index: [] for index in self.ops}
        for op in self.ops.values():
            for source in op.sources:
                if source in self.readers:
                    self.readers[source].append(op.index)

    def before(self, ops: Iterable[Op]) -> set[int]:
        """All that `ops` depend on."""
        found: set[int] = set()
        waiting = [source for op in ops for source in op.sources]
        while waiting:
            index = waiting.pop()
            if index not in found and index in self.ops:
                found.add(index)
                waiting += self.ops[index].sources
        return found

    def after(self, ops: Iterable[Op]) -> set[int]:
        """All that depends on `ops`."""
        found: set[int] = set()
        waiting = [reader for op in ops for reader in self.readers[op.index]]
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += self.readers[index]
        return found
