"""What the device did: kernel launches, bytes moved and copies between host and device, by op name."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Counts:
    """`launches` and `moved` (bytes read and written) of device kernels, `transfers` between host and device."""

    launches: collections.Counter[str] = field(default_factory=collections.Counter)
    moved: collections.Counter[str] = field(default_factory=collections.Counter)
    transfers: collections.Counter[str] = field(default_factory=collections.Counter)


_open: list[Counts] = []


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what the code inside does on the device, its backward threads included. Nests."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open[:] = [other for other in _open if other is not counts]


def launch(op: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
    """Count one kernel. A kernel that writes nothing, or only empty tensors, is not launched."""
    stored = sum(_bytes(tensor) for tensor in written)
    if stored:
        loaded = sum(_bytes(tensor) for tensor in read)
        for counts in _open:
            counts.launches[op] += 1
            counts.moved[op] += loaded + stored


def transfer(op: str) -> None:
    """Count one copy between host and device: no kernel, but the host may wait for it."""
    for counts in _open:
        counts.transfers[op] += 1


def _bytes(tensor: torch.Tensor) -> int:
    elements = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1  # an expanded dimension is read once
    return elements
