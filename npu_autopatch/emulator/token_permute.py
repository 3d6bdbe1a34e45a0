"""`npu_moe_token_permute`, `npu_moe_token_unpermute` and their backwards on the CPU, as on Atlas A2/A3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_autopatch.emulator.registration import ContractError, EmulatedOp

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int32, torch.int64)
_MOST = 16_777_215  # of indices and of their values, which are sorted as fp32
_MOST_A_ROW = 512


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """``(permuted [n * k, H], sorted_indices int32 [n * k])`` for `tokens` ``[n, H]`` and `indices` ``[n, k]``.

    Each token once for each of its indices, sorted by index, stable. `sorted_indices` is the inverse permutation: the
    place in `permuted` of index ``i * k + j``. `num_out_tokens` keeps so many rows, or leaves off so many where it
    is negative. Raises `ContractError`.
    """
    op = "npu_moe_token_permute"
    _refuse_rows(op, "tokens", tokens)
    _refuse_indices(op, tokens, indices, padded_mode)
    if int(indices.min()) < 0 or int(indices.max()) >= _MOST:
        got = f"indices from {int(indices.min())} to {int(indices.max())}"
        raise ContractError(op, got, f"values from 0, below {_MOST}")
    kept = _kept(indices.numel(), num_out_tokens)
    order = indices.flatten().argsort(stable=True)
    return tokens[order[:kept] // _chosen(indices)], order.argsort().int()


def npu_moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """The gradient of `tokens`: sums over the rows of each. Raises `ContractError`.

    Of `tokens` only shape and dtype count, of `indices` only the shape.
    """
    op = "npu_moe_token_permute_grad"
    _refuse_rows(op, "tokens", tokens)
    _refuse_indices(op, tokens, indices, padded_mode)
    _refuse_order(op, sorted_indices, indices.numel())
    if grad_permuted_tokens.dtype != tokens.dtype or grad_permuted_tokens.shape[1:] != tokens.shape[1:]:
        got = f"grad_permuted_tokens {tuple(grad_permuted_tokens.shape)} {grad_permuted_tokens.dtype}"
        raise ContractError(op, got, f"rows like those of tokens, {tuple(tokens.shape)} {tokens.dtype}")
    rows = _taken(grad_permuted_tokens.double(), sorted_indices)
    gradient: Tensor = rows.unflatten(0, (-1, _chosen(indices))).sum(1).to(tokens.dtype)
    return gradient


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """``sum_j permuted_tokens[sorted_indices[i * k + j]] * probs[i, j]`` in the dtype of `permuted_tokens`.

    Without `probs` the rows are put in place only. A row that was left off counts as zero. Summed in fp64 and rounded
    once. Raises `ContractError`.
    """
    _refuse_unpermute("npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    rows = _taken(permuted_tokens.double(), sorted_indices)
    if probs is not None:
        rows = (rows.unflatten(0, probs.shape) * probs.double().unsqueeze(-1)).sum(1)
    return rows.to(permuted_tokens.dtype)


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `permuted_tokens` and of `probs`, in their dtypes. Raises `ContractError`."""
    op = "npu_moe_token_unpermute_grad"
    _refuse_unpermute(op, permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    shape = (sorted_indices.numel() // (1 if probs is None else probs.size(1)), permuted_tokens.size(1))
    if grad_unpermuted_tokens.shape != shape or grad_unpermuted_tokens.dtype != permuted_tokens.dtype:
        got = f"grad_unpermuted_tokens {tuple(grad_unpermuted_tokens.shape)} {grad_unpermuted_tokens.dtype}"
        raise ContractError(op, got, f"{shape} {permuted_tokens.dtype}")
    grad = grad_unpermuted_tokens.double()
    each = grad if probs is None else (grad.unsqueeze(1) * probs.double().unsqueeze(-1)).flatten(0, 1)
    there = sorted_indices < permuted_tokens.size(0)
    dpermuted = torch.full(permuted_tokens.shape, float("nan"), dtype=permuted_tokens.dtype)
    dpermuted[sorted_indices[there].long()] = each[there].to(permuted_tokens.dtype)
    if probs is None:
        return dpermuted, None
    rows = _taken(permuted_tokens.double(), sorted_indices).unflatten(0, probs.shape)
    return dpermuted, (rows * grad.unsqueeze(1)).sum(-1).to(probs.dtype)


def _chosen(indices: Tensor) -> int:
    return indices.size(1) if indices.dim() == 2 else 1


def _kept(total: int, num_out_tokens: int | None) -> int:
    kept = num_out_tokens or 0
    return min(kept, total) if kept > 0 else max(total + kept, 0)


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    """`rows` at `places`; zeros where a place is past the last of them."""
    taken = rows.new_zeros(places.numel(), rows.size(1))
    there = places < rows.size(0)
    taken[there] = rows[places[there].long()]
    return taken


def _refuse_rows(op: str, name: str, rows: Tensor) -> None:
    if rows.dim() != 2 or rows.numel() == 0:
        raise ContractError(op, f"{name} {tuple(rows.shape)}", "rank 2 with at least one element")
    if rows.dtype not in _FLOATS:
        raise ContractError(op, f"{name} {rows.dtype}", "float32, bfloat16 or float16")


def _refuse_indices(op: str, tokens: Tensor, indices: Tensor, padded_mode: bool) -> None:
    if padded_mode:
        raise ContractError(op, "padded_mode True", "padded_mode False")
    if indices.dtype not in _INDICES:
        raise ContractError(op, f"indices {indices.dtype}", "int32 or int64")
    if indices.dim() not in (1, 2) or indices.size(0) != tokens.size(0):
        raise ContractError(op, f"indices {tuple(indices.shape)} for tokens {tuple(tokens.shape)}", "[n, k] or [n]")
    if not 0 < _chosen(indices) <= _MOST_A_ROW:
        raise ContractError(op, f"{_chosen(indices)} indices a token", f"1 to {_MOST_A_ROW}")
    if indices.numel() >= _MOST:
        raise ContractError(op, f"{indices.numel()} indices", f"fewer than {_MOST}")


def _refuse_order(op: str, order: Tensor, total: int) -> None:
    if order.dtype != torch.int32:
        raise ContractError(op, f"sorted_indices {order.dtype}", "int32")
    if order.shape != (total,):
        raise ContractError(op, f"sorted_indices {tuple(order.shape)}", f"[{total}]")


def _refuse_unpermute(
    op: str, rows: Tensor, order: Tensor, probs: Tensor | None, padded_mode: bool, restore_shape: list[int] | None
) -> None:
    if padded_mode or restore_shape is not None:
        raise ContractError(op, "padded_mode or restore_shape", "padded_mode False and no restore_shape")
    _refuse_rows(op, "permuted_tokens", rows)
    _refuse_order(op, order, order.numel() if probs is None or order.dim() != 1 else probs.numel())
    if probs is not None:
        if probs.dim() != 2 or not 0 < probs.size(1) <= _MOST_A_ROW:
            raise ContractError(op, f"probs {tuple(probs.shape)}", f"[n, k] with k of 1 to {_MOST_A_ROW}")
        if probs.dtype not in _FLOATS:
            raise ContractError(op, f"probs {probs.dtype}", "float32, bfloat16 or float16")
    if rows.size(0) > order.numel():
        got = f"permuted_tokens {tuple(rows.shape)} with {order.numel()} sorted_indices"
        raise ContractError(op, got, "at most as many rows as sorted_indices")


def _permute_shapes(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    total = indices.numel()
    kept = total if not num_out_tokens else _kept(total, num_out_tokens)
    return tokens.new_empty(kept, tokens.size(1)), indices.new_empty(total, dtype=torch.int32)


def _permute_grad_shapes(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    return tokens.new_empty(tokens.shape)


def _unpermute_shapes(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    rows = sorted_indices.size(0) // (1 if probs is None else probs.size(1))
    return permuted_tokens.new_empty(rows, permuted_tokens.size(-1))


def _unpermute_grad_shapes(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    dprobs = None if probs is None else probs.new_empty(probs.shape)
    return permuted_tokens.new_empty(permuted_tokens.shape), dprobs


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros where there is no gradient
    ctx.shape = inputs[0].shape


def _permute_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    tokens = grad.new_empty(ctx.shape)  # of which the kernel reads the shape
    gradient = torch.ops.npu.npu_moe_token_permute_grad(tokens, grad, *ctx.saved_tensors)
    return gradient, None, None, None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    probs = inputs[2] if len(inputs) > 2 else None
    ctx.save_for_backward(None if probs is None else inputs[0], inputs[1], probs)
    ctx.shape = inputs[0].shape


def _unpermute_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    permuted, order, probs = ctx.saved_tensors
    if permuted is None:  # without probs its values are of no use
        permuted = grad.new_empty(ctx.shape)
    gradients = torch.ops.npu.npu_moe_token_unpermute_grad(permuted, grad, order, probs)
    return gradients[0], None, None if probs is None else gradients[1], None, None


OPS = (
    EmulatedOp(
        "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False)"
        " -> (Tensor, Tensor)",
        npu_moe_token_permute,
        _permute_shapes,
        backward=_permute_gradient,
        setup_context=_save_permute,
    ),
    EmulatedOp(
        "npu_moe_token_permute_grad(Tensor tokens, Tensor grad_permuted_tokens, Tensor indices, Tensor sorted_indices,"
        " bool padded_mode=False) -> Tensor",
        npu_moe_token_permute_grad,
        _permute_grad_shapes,
    ),
    EmulatedOp(
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,"
        " bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        npu_moe_token_unpermute,
        _unpermute_shapes,
        backward=_unpermute_gradient,
        setup_context=_save_unpermute,
    ),
    EmulatedOp(
        "npu_moe_token_unpermute_grad(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, Tensor sorted_indices,"
        " Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> (Tensor, Tensor)",
        npu_moe_token_unpermute_grad,
        _unpermute_grad_shapes,
    ),
)
