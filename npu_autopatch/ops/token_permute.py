"""`npu_moe_token_permute` and `npu_moe_token_unpermute`: rows sorted by expert and back, and how many each has."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_autopatch.ops.capability import Capability, detect
from npu_autopatch.ops.legality import FLOATS, PLAIN

_IDS = (torch.int32, torch.int64)
# ids are sorted as fp32; of more than 512 a row there is no kernel
_MOST_IDS, _MOST_CHOSEN = 16_777_215, 512


def capability() -> Capability:
    """Whether both ops can be called here, with a gradient."""
    permute = detect("npu_moe_token_permute", ("indices",))
    for found in (permute, detect("npu_moe_token_unpermute", ("sorted_indices", "probs"))):
        if not found.available:
            return found
        if not found.differentiable:
            return Capability(found.op, f"{found.op} of this torch_npu has no gradient", False)
    return permute


def takes_mixed() -> bool:
    """Whether the gradient of routing weights has their dtype where the rows have another.

    Before the train of April 2026 it was written into memory of the rows' dtype.
    """
    rows = torch.empty(1, 1, dtype=torch.bfloat16, device="meta")
    order = torch.empty(1, dtype=torch.int32, device="meta")
    weights = torch.empty(1, 1, device="meta")
    gradients = torch.ops.npu.npu_moe_token_unpermute_grad.default(rows, rows, order, weights)
    return gradients[1].dtype is torch.float32


def gives_its_input() -> bool:
    """Whether the op that autograd calls returns its rows beside the result, as torch_npu's does since October 2026.

    Compiled code may not: torch warns of it where a graph first runs, raises in CI, and will always raise.
    """
    rows = torch.empty(1, 1, device="meta")
    order = torch.empty(1, dtype=torch.int32, device="meta")
    if not torch._C._jit_get_schemas_for_operator("npu::_npu_moe_token_unpermute"):
        return False
    results = torch.ops.npu._npu_moe_token_unpermute.default(rows, order, torch.empty(1, 1, device="meta"))
    return any(result is rows for result in results)


def legal(x: Tensor, ids: Tensor, weights: Tensor | None) -> bool:
    """Whether the ops take the plain rows `x` of `ids` ``[n, k]``, and bring them back by `weights` ``[n, k]``."""
    return (
        type(ids) in PLAIN
        and x.dtype in FLOATS
        and ids.dtype in _IDS
        and ids.dim() == 2
        and 0 < ids.numel() < _MOST_IDS
        and ids.size(1) <= _MOST_CHOSEN
        and ids.device == x.device
        and (
            weights is None
            or (
                type(weights) in PLAIN
                and weights.dtype in FLOATS
                and weights.shape == ids.shape
                and weights.device == x.device
            )
        )
    )


def permute(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `x` ``[n, H]`` once for each of their `ids` ``[n, k]``, sorted by id: ``[n * k, H]``, and the order.

    The order is int32 ``[n * k]``: where in the result the row of each id, taken row by row, stands. The sort is
    stable.
    """
    rows, order = torch.ops.npu.npu_moe_token_permute.default(x, ids)
    return rows, order


def unpermute(y: Tensor, order: Tensor, weights: Tensor | None, mixed: bool = False, compiles: bool = True) -> Tensor:
    """The rows of `y` ``[n * k, H]`` back in place, each times its weight in `weights` ``[n, k]``, summed: ``[n, H]``.

    Without weights they are only put in place. The result has the dtype of `y`; to it the weights are taken first
    unless `mixed`, that is `takes_mixed`. Where it is being compiled and the op does not, it is computed in torch.
    """
    if not compiles and torch.compiler.is_compiling():
        return _unpermuted(y, order, weights)
    if weights is not None and not mixed:
        weights = weights.to(y.dtype)
    together: Tensor = torch.ops.npu.npu_moe_token_unpermute.default(y, order, weights)
    return together


def counts(ids: Tensor, experts: int) -> Tensor:
    """How many of `ids` are each of ``0 .. experts - 1``: int64, on their device, which the host does not wait for.

    Ids past the experts are not counted. The CPU counts floats only; fp32 is exact for as many as can be permuted.
    Each id is then the middle of its bin, so that one expert, too, has a range and not that of the data.
    """
    ids = ids.detach()
    if ids.device.type == "cpu" or experts == 1:
        return torch.histc(ids.float(), experts, -0.5, experts - 0.5).long()
    return torch.histc(ids, experts, 0, experts - 1).long()


def _permuted(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    sequence = ids.flatten().argsort(stable=True)
    return x[sequence // ids.size(1)], sequence.argsort().int()


def _unpermuted(y: Tensor, order: Tensor, weights: Tensor | None) -> Tensor:
    rows = y[order.long()]
    if weights is None:
        return rows
    wide = torch.promote_types(torch.float32, y.dtype)
    each = rows.to(wide).unflatten(0, weights.shape) * weights.to(wide).unsqueeze(-1)
    together: Tensor = each.sum(1).to(y.dtype)
    return together


# What the ops compute, in torch, with its gradients: fp32 inside, one rounding at the end.
REFERENCE = (_permuted, _unpermuted, counts)
