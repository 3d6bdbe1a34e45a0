"""Ops that torch_npu runs under another name than the one its callers use.

In 2.13 `npu_moe_token_unpermute` runs `_npu_moe_token_unpermute`, which also returns what its backward needs, and
the backward passes of both token ops are `*_grad_v2`. The emulator has one kernel for each of them, under the
callers' name; so has the accounting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.emulator.registration import EmulatedOp

from .device import serve


def serve_rerouted(ops: Iterable[EmulatedOp], library: torch.library.Library) -> None:
    """Serve the kernels of `ops` under torch_npu's other names too, unless `ops` has an op of that name."""
    kernels = {op.name: op.kernel for op in ops}
    for name, (public, adapted) in _OTHER_NAMES.items():
        if public in kernels and name not in kernels:
            serve(name, adapted(kernels[public]), library, label=public)


def _unpermute(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def unpermute(permuted_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return kernel(permuted_tokens, *args, **kwargs), permuted_tokens

    return unpermute


def _unpermute_grad(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def unpermute_grad(
        grad: Tensor,
        sorted_indices: Tensor,
        rows: int,
        dtype: torch.dtype,
        probs: Tensor | None = None,
        padded_mode: bool = False,
        restore_shape: list[int] | None = None,
        permuted_tokens: Tensor | None = None,
    ) -> Any:
        if permuted_tokens is None:  # without probs their values are of no use
            permuted_tokens = torch.empty(rows, grad.shape[-1], dtype=dtype)
        return kernel(permuted_tokens, grad, sorted_indices, probs, padded_mode, restore_shape)

    return unpermute_grad


def _permute_grad(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def permute_grad(
        grad: Tensor, sorted_indices: Tensor, rows: int, dtype: torch.dtype, top_k: int, padded_mode: bool = False
    ) -> Tensor:
        tokens = torch.empty(rows, grad.shape[-1], dtype=dtype)  # of both, only the shape is of use
        indices = torch.empty(rows, top_k, dtype=torch.int32)
        return kernel(tokens, grad, indices, sorted_indices, padded_mode)

    return permute_grad


_OTHER_NAMES: dict[str, tuple[str, Callable[..., Any]]] = {
    "_npu_moe_token_unpermute": ("npu_moe_token_unpermute", _unpermute),
    "npu_moe_token_unpermute_grad_v2": ("npu_moe_token_unpermute_grad", _unpermute_grad),
    "npu_moe_token_permute_grad_v2": ("npu_moe_token_permute_grad", _permute_grad),
}
