"""A count of the ``npu::`` calls in a block."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Fused(TorchDispatchMode):
    """Counts the calls of npu:: ops, backward included, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "npu":
            # torch_npu itself runs some of them under their name with an underscore before it
            self.calls[function.__name__.partition(".")[0].removeprefix("_")] += 1
        return function(*args, **(kwargs or {}))
