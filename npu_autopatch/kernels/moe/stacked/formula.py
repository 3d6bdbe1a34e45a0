"""Stacked experts in plain torch, each expert on every token: what a candidate of a probe computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npu_autopatch.kernels.moe.stacked.layout import Layout


class Products(NamedTuple):
    """What the first product or products make of every token, ``[E, tokens, width]``, and what is to come."""

    holder: Any
    first: Tensor
    second: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def first_products(module: nn.Module, layout: Layout, x: Tensor, batched: bool) -> Products:
    """Of `x` ``[tokens, hidden]``, those of one expert after those of another if `batched`."""
    holder = getattr(module, layout.holder) if layout.holder else module

    def weight(name: str, transposed: bool) -> Tensor:
        parameter: Tensor = getattr(holder, name)
        if layout.flattened:
            parameter = parameter.view(getattr(module, layout.flattened), -1, parameter.size(-1))
        return parameter if transposed else parameter.transpose(1, 2)

    first, down = weight(layout.first, layout.first_transposed), weight(layout.down, layout.down_transposed)
    count = down.size(0)
    rows = x.view(count, -1, x.size(-1)) if batched else x.expand(count, *x.shape)
    made = torch.bmm(rows, first[:count])
    if layout.first_bias:
        made = made + getattr(holder, layout.first_bias).unsqueeze(1)
    second = torch.bmm(rows, weight(layout.second, layout.first_transposed)) if layout.second else None
    bias = getattr(holder, layout.down_bias).unsqueeze(1) if layout.down_bias else None
    return Products(holder, made, second, down, bias)


def down_product(gated: Tensor, products: Products) -> Tensor:
    """What every expert makes of every token, ``[E, tokens, hidden]``."""
    made = torch.bmm(gated, products.down)
    return made if products.down_bias is None else made + products.down_bias


def weighted(every: Tensor, x: Tensor, ids: Tensor, weights: Tensor, dense: bool, named: int) -> Tensor:
    """The sum over the experts of each token. Of those `named`, what `every` has none of give the token back."""
    count = every.size(0)
    if not dense:
        weights = torch.zeros(x.size(0), max(named, count) + 1).scatter(1, ids, weights)
    result = torch.einsum("enh,ne->nh", every, weights[:, :count])
    return result if named == count else result + x * weights[:, count:named].sum(1, keepdim=True)
