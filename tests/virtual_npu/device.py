"""How a function over CPU tensors becomes a kernel of the virtual device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import accounting
from .device_memory import contiguous_on_device, host_view, on_device

_COPIES = frozenset({"copy_", "_copy_from", "_copy_from_and_resize"})
_WAITS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def serve(name: str, function: Callable[..., Any], library: torch.library.Library, *, label: str | None = None) -> None:
    """Make `function`, which takes and returns CPU tensors, the device kernel of the op `name` of `library`.

    What it mutates, it mutates on the device; what it returns becomes a new contiguous NPU tensor, unless it
    shares memory with an argument and the schema says so. Each call is accounted as one launch of `label`, or of
    the op's own name.
    """
    base, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, library.ns), base), overload or "default")
    library.impl(name, device_kernel(label or base, function, op), "PrivateUse1", allow_override=True)


@contextlib.contextmanager
def serving(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`serve` an ``npu::`` op while the code inside runs."""
    with torch.library._scoped_library("npu", "IMPL") as library:
        serve(name, function, library)
        yield


def device_kernel(label: str, function: Callable[..., Any], op: torch._ops.OpOverload) -> Callable[..., Any]:
    """`function` over host views of its NPU arguments, accounted as `label`."""
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    mutated = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    overwritten = {a.name for a in arguments if a.is_out} | ({"self"} if label in _COPIES else set())
    aliases = any(result.alias_info is not None for result in op._schema.returns)
    waits = bool(_WAITS & set(op.tags)) and label != "index"  # tagged for the sake of boolean indices

    def kernel(*args: Any, **kwargs: Any) -> Any:
        views: list[tuple[Tensor, Tensor]] = []
        fresh: list[Tensor] = []

        def to_host(value: Any) -> Any:
            if on_device(value):
                views.append((host_view(value), value))
                return views[-1][0]
            if isinstance(value, torch.device) and value.type == "npu":
                return torch.device("cpu")
            return value

        def from_host(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for view, original in views:
                if value is view:
                    return original
                if aliases and value.numel() and _same_memory(value, view):
                    place = value.storage_offset(), value.size(), value.stride()
                    if value.dtype is original.dtype:
                        return original.as_strided(*place[1:], place[0])
                    # complex seen as real, or the other way round
                    return torch.empty(0, dtype=value.dtype, device="npu").set_(original.untyped_storage(), *place)
            fresh.append(contiguous_on_device(value))
            return fresh[-1]

        host_kwargs = {name: over(to_host, value) for name, value in kwargs.items() if name != "pin_memory"}
        out = over(from_host, function(*over(to_host, args), **host_kwargs))
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [*fresh, *(t for name in mutated if name in given for t in tensors(given[name]))]
        if label == "npu_grouped_matmul" and given.get("group_type") == 0 and given.get("group_list") is not None:
            given["weight"] = _weights_of_groups_with_rows(given)
        read = [t for name, value in given.items() if name not in overwritten for t in tensors(value)]
        if waits or (label in _COPIES and not all(on_device(t) for t in (*read, *written))):
            accounting.transfer(label)
        else:
            accounting.launch(label, read, written)
        return out

    return kernel


def _weights_of_groups_with_rows(given: dict[str, Any]) -> list[Tensor]:
    """Of the weights, stacked in one tensor or listed, those that the op reads: a group without rows is passed over."""
    weights, sizes = given["weight"], host_view(given["group_list"])
    hit = (sizes if given.get("group_list_type") == 1 else sizes.diff(prepend=sizes.new_zeros(1))) > 0
    if len(weights) == len(hit):
        return [weight for weight, with_rows in zip(weights, hit.tolist(), strict=True) if with_rows]
    return [weight[: int(hit.sum())] for weight in weights]


def over(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to its leaves; lists and tuples are the only containers of an op."""
    if isinstance(value, list):
        return [over(function, item) for item in value]
    if isinstance(value, tuple):
        return tuple(over(function, item) for item in value)
    return function(value)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
