"""What instances of a class hold that changes what its forward computes: found by changing it."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe import tiny
from npu_autopatch.kernels.moe.proof import Unproved

# Attributes that must be a size of the weights, with the name of the size; and those that must have one value.
Guards = tuple[tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...]]


def guards(owner: nn.Module, names: Container[str], sizes: dict[str, int], unmoved: Callable[[], bool]) -> Guards:
    """The attributes of `owner`, of those in `names`, on which the output depends; `unmoved` says if it is as before.

    Raises `Unproved` for one that no call can check.
    """
    measured: list[tuple[str, str]] = []
    absent = {**owner._parameters, **owner._buffers, **owner._modules}
    fixed: list[tuple[str, Any]] = [(name, None) for name, part in absent.items() if part is None and name in names]
    for name, value in probing.settings_of(owner).items():
        if name not in names or not _matters(owner, name, value, value in sizes.values(), unmoved):
            continue
        size = next((size for size, number in sizes.items() if number == value), None)
        if isinstance(value, int) and size and not isinstance(value, bool):
            measured.append((name, size))
        elif value is None or isinstance(value, (bool, str)):
            fixed.append((name, value))
        else:
            raise Unproved(f"its attribute {name} changes what it computes")
    return tuple(measured), tuple(fixed)


def _matters(owner: Any, name: str, value: Any, measured: bool, unmoved: Callable[[], bool]) -> bool:
    """Whether another value can make another output, silently."""
    if isinstance(value, bool):
        others: tuple[Any, ...] = (not value,)
    elif isinstance(value, int):
        others = (value - 1, value + 1) if measured else (value - 1, value + 1, 0)
    elif isinstance(value, float):
        others = (value + 0.5, 0.0)
    else:  # None, a string, a configuration: what else it may be is not known
        return not callable(value) or isinstance(value, tiny.Size)
    return any(not holding(owner, name, other, unmoved) for other in others)


def holding(owner: Any, name: str, value: Any, holds: Callable[[], bool]) -> bool:
    """What `holds` says while an attribute of `owner` has another value."""
    earlier = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return holds()
    finally:
        setattr(owner, name, earlier)
