"""Serves aten on the virtual device: every op that torch_npu gives a kernel gets the CPU's kernel instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import accounting
from .device import device_kernel, serve
from .device_memory import host_view, like_on_device, on_device

# torch_npu's own: allocation, views, and the choice of the attention kernel.
KEPT = frozenset(
    {
        *("empty.memory_format", "empty_strided", "resize_", "is_pinned", "_pin_memory", "record_stream"),
        *("as_strided", "view", "_reshape_alias", "unfold", "alias", "detach"),
        *("set_", "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset"),
        *("scaled_dot_product_attention", "_fused_sdp_choice"),
    }
)


def serve_aten(library: torch.library.Library) -> None:
    """Register the device kernels of aten."""
    for name, op in _with_device_kernel():
        if name not in KEPT:
            library.impl(name, device_kernel(name.partition(".")[0], op, op), "PrivateUse1", allow_override=True)
    serve("matmul_backward", _matmul_backward, library)
    serve("linear_backward", _linear_backward, library)
    serve("histc", _histc, library)
    for name, function in (("_to_copy", _to_copy), ("clone", _clone), ("empty_like", _empty_like)):
        library.impl(name, function, "PrivateUse1", allow_override=True)
    # torch_npu's formula for it is its own kernel, which there is none of
    library.impl("one_hot", torch.library.fallthrough_kernel, "AutogradPrivateUse1", allow_override=True)


def serve_casts(library: torch.library.Library) -> None:
    """torch_npu's own names for a cast."""
    for name in ("_npu_dtype_cast", "npu_dtype_cast", "_npu_dtype_cast_backward", "npu_dtype_cast_backward"):
        serve(name, lambda x, dtype: x.to(dtype, copy=True), library)


def _with_device_kernel() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        if packet is not None:  # torch_npu registers a few kernels for names without a schema
            yield name, getattr(packet, overload or "default")


def _matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    if b.dim() == 2:  # as op-plugin does it: all rows at once
        rows, grads = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
        return grad @ b.mT if mask[0] else None, rows.mT @ grads if mask[1] else None
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(-1) if b.dim() == 1 else b
    grad = grad.unsqueeze(-2) if a.dim() == 1 else grad
    grad = grad.unsqueeze(-1) if b.dim() == 1 else grad
    da = torch.matmul(grad, right.mT).sum_to_size(left.shape).reshape(a.shape) if mask[0] else None
    db = torch.matmul(left.mT, grad).sum_to_size(right.shape).reshape(b.shape) if mask[1] else None
    return da, db


def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (
        (grads @ weight).reshape(x.shape) if mask[0] else None,
        grads.T @ rows if mask[1] else None,
        grads.sum(0) if mask[2] else None,
    )


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return torch.histc(x.float(), bins, min, max).to(x.dtype)  # the CPU's takes no integers


# The strides of these results are part of their contract.


def _to_copy(x: Tensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    out = torch.ops.aten._to_copy(_host(x), dtype=dtype, memory_format=memory_format)
    if (device or x.device).type != "npu" or not on_device(x):
        accounting.transfer("_to_copy")
        return like_on_device(out) if (device or x.device).type == "npu" else out
    out = like_on_device(out)
    accounting.launch("_to_copy", [x], [out])
    return out


def _clone(x: Tensor, *, memory_format: Any = None) -> Tensor:
    out = like_on_device(torch.ops.aten.clone(_host(x), memory_format=memory_format))
    accounting.launch("clone", [x], [out])
    return out


def _empty_like(x: Tensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    like = torch.empty_like(_host(x), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device or x.device)


def _host(x: Tensor) -> Tensor:
    return host_view(x) if on_device(x) else x
