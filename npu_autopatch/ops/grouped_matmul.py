"""`npu_grouped_matmul`: a linear layer whose rows have weights by group, with the gradient that the op lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu_autopatch.ops import token_permute
from npu_autopatch.ops.capability import Capability, detect
from npu_autopatch.ops.legality import FLOATS, PLAIN

MOST_LISTED = 128  # groups whose weights are tensors of their own
MOST_STACKED = 1024
_WIDEST = 65536


class Permute(Protocol):
    """`token_permute.permute`."""

    def __call__(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]: ...


class Unpermute(Protocol):
    """`token_permute.unpermute`."""

    def __call__(self, y: Tensor, order: Tensor, weights: Tensor | None) -> Tensor: ...


class Counts(Protocol):
    """`token_permute.counts`."""

    def __call__(self, ids: Tensor, experts: int) -> Tensor: ...


class GroupedLinear(Protocol):
    """`grouped_linear`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None = None,
        transposed: bool = False,
        tail: Tensor | None = None,
    ) -> Tensor: ...


class GroupedLinearList(Protocol):
    """`grouped_linear_list`."""

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        counts: Tensor,
        biases: Sequence[Tensor] | None = None,
        transposed: bool = False,
    ) -> Tensor: ...


class Ops(NamedTuple):
    """What experts are run with. `traces` says whether the gradients may be asked for where a compiler traces."""

    permute: Permute
    unpermute: Unpermute
    counts: Counts
    grouped_linear: GroupedLinear
    grouped_linear_list: GroupedLinearList
    traces: bool = True


def capability() -> Capability:
    """Whether `npu_grouped_matmul` can be called here with counts on the device; its gradient is our own.

    The train of July 2025 refuses the products that the gradients of weights are; its `npu_moe_token_permute` has no
    gradient, so it is declined there.
    """
    return detect("npu_grouped_matmul", ("group_list", "split_item", "group_type", "group_list_type"))


def traces() -> bool:
    """Whether a compiler can trace the gradients of weights: before April 2026 the op's Meta kernel refused them."""
    rows, sizes = torch.empty(1, 1, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    try:
        _products_by_group(rows, rows, sizes)
    except RuntimeError:
        return False
    return True


@functools.cache
def op() -> Ops:
    """The ops of this process; asked for once both capabilities are there."""
    mixed, compiles = token_permute.takes_mixed(), not token_permute.gives_its_input()
    unpermute = functools.partial(token_permute.unpermute, mixed=mixed, compiles=compiles)
    return Ops(token_permute.permute, unpermute, token_permute.counts, grouped_linear, grouped_linear_list, traces())


def legal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the op takes the rows `x` with `weight`, forward and backward: a stacked one of rank 3, a listed of 2."""
    return (
        type(x) in PLAIN
        and type(weight) in PLAIN
        and x.dtype in FLOATS
        and weight.dtype is x.dtype
        and weight.device == x.device
        and weight.dim() in (2, 3)
        and 0 < weight.size(-1) < _WIDEST
        and 0 < weight.size(-2) < _WIDEST
        and (weight.dim() == 2 or 0 < weight.size(0) <= MOST_STACKED)
        and weight.is_contiguous()
        and x.numel() > 0
        and (bias is None or (type(bias) in PLAIN and bias.dtype is x.dtype and bias.device == x.device))
    )


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
    tail: Tensor | None = None,
) -> Tensor:
    """``x @ weight[e].T + bias[e]`` for the rows of each group ``e``: ``[M, N]``, with gradients where needed.

    `x` is ``[M, K]``, sorted by group; `counts`, int64 ``[E]``, says how many rows each group has. `weight` is
    ``[E, N, K]``, or ``[E, K, N]`` if `transposed`, and of the dtype of `x`; `bias` ``[E, N]``. `tail`, bool
    ``[M, 1]``, marks the rows past the last group: they are zero in the result and in the gradient of `x`.
    """
    return _grouped_linear(x, (weight,), counts, () if bias is None else (bias,), transposed, tail)


def grouped_linear_list(
    x: Tensor,
    weights: Sequence[Tensor],
    counts: Tensor,
    biases: Sequence[Tensor] | None = None,
    transposed: bool = False,
) -> Tensor:
    """`grouped_linear` with a weight ``[N, K]``, or ``[K, N]`` if `transposed`, and a bias ``[N]`` of each group."""
    if len(weights) == 1:  # a list of one is a stack to the op
        bias = None if biases is None else biases[0].unsqueeze(0)
        return grouped_linear(x, weights[0].unsqueeze(0), counts, bias, transposed)
    return _grouped_linear(x, tuple(weights), counts, () if biases is None else tuple(biases), transposed, None)


def _grouped_linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    counts: Tensor,
    biases: tuple[Tensor, ...],
    transposed: bool,
    tail: Tensor | None,
) -> Tensor:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases)):
        apply: Callable[..., Tensor] = _GroupedLinear.apply
        return apply(x, counts, tail, transposed, len(weights), *weights, *biases)
    return _rows_by_group(x, weights if transposed else _turned(weights), counts, biases, tail)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Tensor, tail: Tensor | None, transposed: bool, listed: int, *parameters: Tensor
    ) -> Tensor:
        weights, biases = parameters[:listed], parameters[listed:]
        of_x, of_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5 : 5 + listed])
        ctx.save_for_backward(counts, x if of_weights else None, tail if of_x else None, *(weights if of_x else ()))
        ctx.transposed, ctx.listed, ctx.biases = transposed, listed, len(biases)
        return _rows_by_group(x, weights if transposed else _turned(weights), counts, biases, tail)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        counts, x, tail, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        dx: Tensor | None = None
        if needed[0]:
            dx = _rows_by_group(dy, _turned(weights) if ctx.transposed else weights, counts, (), tail)
        dweights: Sequence[Tensor | None] = [None] * ctx.listed
        if any(needed[5 : 5 + ctx.listed]):
            stacked = _products_by_group(x, dy, counts) if ctx.transposed else _products_by_group(dy, x, counts)
            dweights = _each(stacked, ctx.listed)
        dbiases: Sequence[Tensor | None] = [None] * ctx.biases
        if any(needed[5 + ctx.listed :]):
            sums = _products_by_group(dy, dy.new_ones(dy.size(0), 1), counts).squeeze(-1)
            dbiases = _each(sums, ctx.biases)
        return dx, None, None, None, None, *dweights, *dbiases


def _each(stacked: Tensor, parameters: int) -> Sequence[Tensor]:
    """The gradients of `parameters`, one stack of them or a list, from a stack; autograd drops what nobody needs."""
    return (stacked,) if parameters == 1 else stacked.unbind(0)


def _rows_by_group(
    x: Tensor, weights: Sequence[Tensor], counts: Tensor, biases: Sequence[Tensor], tail: Tensor | None
) -> Tensor:
    """`x` times its group's of `weights`, which are stacked ``[E, K, N]`` or each ``[K, N]``."""
    if x.size(0) == 0:
        return x.new_empty(0, weights[0].size(-1))
    y: Tensor = torch.ops.npu.npu_grouped_matmul.default(
        [_dense(x)],
        list(weights),
        bias=_as_taken(biases, x.dtype) if biases else None,
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
    )[0]
    return y if tail is None else y.masked_fill_(tail, 0)


def _products_by_group(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """``left.T @ right`` over the rows of each group, stacked; zeros for one without rows."""
    if left.size(0) == 0:
        return left.new_zeros(counts.size(0), left.size(1), right.size(1))
    products: Tensor = torch.ops.npu.npu_grouped_matmul.default(
        [_dense(left).t()], [_dense(right)], group_list=counts, split_item=3, group_type=2, group_list_type=1
    )[0]
    return products


def _turned(weights: Sequence[Tensor]) -> list[Tensor]:
    """Views that the op reads as they lie in memory."""
    return [weight.mT for weight in weights]


def _dense(rows: Tensor) -> Tensor:
    """`rows` one after the other. One alone may have any stride, by which the op would take it for transposed."""
    return rows.contiguous() if rows.size(0) > 1 else rows.reshape(-1).unsqueeze(0)


def _as_taken(biases: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`biases` in the dtype in which the op takes them to rows of `dtype`."""
    taken = torch.float32 if dtype is torch.bfloat16 else dtype
    if biases[0].dtype is taken:
        return list(biases)
    return [biases[0].to(taken)] if len(biases) == 1 else list(torch.stack(list(biases)).to(taken).unbind(0))


def _reference(
    x: Tensor,
    weights: Sequence[Tensor],
    counts: Tensor,
    biases: Sequence[Tensor] | None = None,
    transposed: bool = False,
) -> Tensor:
    wide = torch.promote_types(torch.float32, x.dtype)
    sizes: list[int] = counts.tolist()
    sizes.append(x.size(0) - sum(sizes))
    *groups, tail = x.to(wide).split(sizes)
    products = [
        rows @ (weight if transposed else weight.t()).to(wide) for rows, weight in zip(groups, weights, strict=True)
    ]
    if biases is not None:
        products = [product + bias.to(wide) for product, bias in zip(products, biases, strict=True)]
    products.append(x.new_zeros(tail.size(0), products[0].size(1), dtype=wide))
    return torch.cat(products).to(x.dtype)


def _stacked_reference(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
    tail: Tensor | None = None,
) -> Tensor:
    return _reference(x, weight.unbind(0), counts, None if bias is None else bias.unbind(0), transposed)


# What the ops compute, in torch, with its gradients: fp32 inside, one rounding at the end, zeros past the last group.
REFERENCE = Ops(*token_permute.REFERENCE, _stacked_reference, _reference)
