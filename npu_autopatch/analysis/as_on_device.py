"""What torch runs otherwise without a device, as a device runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AsOnDevice(TorchFunctionMode):
    """Attention and dropout as the one op a device has for each; torch takes the one apart without values, and the
    other on the CPU.

    Attention runs within `scope()`.
    """

    def __init__(self, scope: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        with self._scope():
            if args[0].device.type == "meta" if args else kwargs["query"].device.type == "meta":
                return _attention(*args, **kwargs)
            return function(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return torch.nn.functional.dropout(input, p, training, inplace)
    result: Tensor = torch.ops.aten.native_dropout(input, p, training)[0]
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    result: Tensor = op(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return result


def anywhere(begin: Callable[..., None]) -> Callable[..., None]:
    """autocast that may be named the device without values, too: models switch it off on that of their input."""

    @functools.wraps(begin)
    def within(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    return within
