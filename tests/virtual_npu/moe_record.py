"""What a piece of code does to large operands, and where the host waits for the device: every op, backward included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Record(TorchDispatchMode):
    """Of tensors of `large` bytes or more: which ops read them, which make new ones, and of how many bytes.

    Views are neither read nor made. `waits` are the ops whose shape or value the host has to know, copies between the
    devices among them. `launched` counts all ops.
    """

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large = large
        self.reads: Counter[str] = Counter()
        self.made: Counter[str] = Counter()
        self.made_bytes = 0
        self.waits: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors((args, kwargs))
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0].removeprefix("_")
        known = {_place(t) for t in given}
        fresh = [t for t in _tensors(result) if _place(t) not in known]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)
        self.ops[name] += 1
        if fresh or writes or not _tensors(result):
            self.reads[name] += sum(t.nbytes >= self.large for t in given)
        made = [t for t in fresh if t.nbytes >= self.large]
        self.made[name] += len(made)
        self.made_bytes += sum(t.nbytes for t in made)
        self.waits[name] += _waits(function, name, given, _tensors(result))
        return result

    def large_ops(self) -> set[str]:
        """The ops that read or make anything large."""
        return set(+self.reads) | set(+self.made)


def _waits(function: Any, name: str, given: list[Tensor], results: list[Tensor]) -> bool:
    if name in ("index", "index_put", "index_put_"):  # tagged for the sake of these
        return any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])
    return bool(_WAITS & set(function.tags)) or len({t.device.type for t in (*given, *results) if t.dim()}) > 1


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
