"""`npu_grouped_matmul` of floats on the CPU. Contract: aclnnGroupedMatmulV4 as on Atlas A2/A3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from npu_autopatch.emulator.registration import ContractError, EmulatedOp

_OP = "npu_grouped_matmul"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 65536
_MOST_LISTED, _MOST_STACKED = 128, 1024
_NONE, _ROWS, _SUMS = -1, 0, 2  # what the groups split: nothing, the rows of x (M), or what is summed over (K)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """``x @ weight + bias`` by group, in the dtype of `x`; `split_item` 2 and 3 give one result, 0 and 1 several.

    `group_type` 0 splits the rows of `x` ``[M, K]``; `weight` is stacked ``[E, K, N]`` or a list of ``[K, N]``. With 2
    the sum is split: `x` is the transposed view of ``[T, M]`` and `weight` ``[T, N]``, the result ``[E, M, N]``. With
    -1 there are as many of each and no groups. `group_list`, int64, has their ends, or their sizes where
    `group_list_type` is 1. Rows past the last group are not written: NaN here. Summed in fp64 and rounded once.
    Raises `ContractError`.
    """
    others = (scale, offset, antiquant_scale, antiquant_offset, per_token_scale, tuning_config, output_dtype)
    activations = (activation_input, activation_quant_scale, activation_quant_offset)
    dtypes = (x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype)
    if act_type != 0 or any(argument is not None for argument in (*others, *activations, *dtypes)):
        _refuse("an argument of quantised products", "none of them, and act_type 0, for floats")
    one = _refuse_form(x, weight, bias, group_list, split_item, group_type)
    _refuse_operands(x, weight, bias, group_type)
    sizes = _sizes(group_list, group_list_type)
    if group_type == _NONE:
        return [_product(*operands) for operands in zip(x, weight, _biases(bias, len(x)), strict=True)]
    if group_type == _SUMS:
        return _sums(x[0], weight, sizes)
    weights = list(weight[0]) if weight[0].dim() == 3 else weight
    rows = x if len(x) > 1 else _split(x[0], sizes)
    biases = bias[0].unbind(0) if bias and weight[0].dim() == 3 else bias
    products = [_product(*operands) for operands in zip(rows, weights, _biases(biases, len(weights)), strict=True)]
    if not one:
        return products
    total, width = sum(operand.size(0) for operand in x), products[0].size(1)
    result = torch.full((total, width), float("nan"), dtype=x[0].dtype)
    result[: sum(product.size(0) for product in products)] = torch.cat(products)
    return [result]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x.double() @ weight.double()
    return (product if bias is None else product + bias.double()).to(x.dtype)


def _biases(bias: Sequence[Tensor] | None, groups: int) -> Sequence[Tensor | None]:
    return bias or [None] * groups


def _split(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    if sum(sizes) > rows.size(0):
        _refuse(f"groups of {sum(sizes)} rows in all for {rows.size(0)}", "no more than there are")
    return list(rows[: sum(sizes)].split(sizes))


def _sums(x: Tensor, weight: list[Tensor], sizes: list[int]) -> list[Tensor]:
    if len(weight) > 1:
        sizes = [operand.size(0) for operand in weight]
        return [_product(a.T, b) for a, b in zip(_split(x.T, sizes), weight, strict=True)]
    pairs = zip(_split(x.T, sizes), _split(weight[0], sizes), strict=True)
    return [torch.stack([_product(a.T, b) for a, b in pairs])]


def _sizes(group_list: Tensor | None, group_list_type: int | None) -> list[int]:
    if group_list_type not in (0, 1):
        _refuse(f"group_list_type {group_list_type}", "0 for the ends of the groups, 1 for their sizes")
    if group_list is None:
        return []
    values: list[int] = group_list.tolist()
    ends = [0, *values]
    sizes = values if group_list_type == 1 else [b - a for a, b in zip(ends, values, strict=False)]
    if any(size < 0 for size in sizes):
        _refuse(f"group_list {values}", "ends that do not fall, or sizes of 0 and more")
    return sizes


def _refuse_form(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    split_item: int | None,
    group_type: int | None,
) -> bool:
    """Refuse what is no row of the op's table of forms; whether the result is one tensor."""
    if group_type not in (_NONE, _ROWS, _SUMS):
        _refuse(f"group_type {group_type}", "-1, 0 or 2, always given")
    if split_item not in (0, 1, 2, 3):
        _refuse(f"split_item {split_item}", "0 to 3")
    if not x or not weight:
        _refuse(f"{len(x)} x and {len(weight)} weight", "at least one of each")
    one, ranks = split_item in (2, 3), {operand.dim() for operand in weight}
    form = (group_type, len(x) > 1, "stacked" if ranks == {3} and len(weight) == 1 else "list", one)
    listed = ranks == {2} and (len(weight) > 1 or group_type != _ROWS)
    if group_type == _NONE:
        legal, groups = listed and not one and len(x) == len(weight), None
    elif group_type == _ROWS and len(x) > 1:
        legal, groups = listed and one and len(x) == len(weight), None if group_list is None else len(weight)
    elif group_type == _ROWS:
        legal, groups = (listed or (form[2] == "stacked" and one)), len(weight[0] if ranks == {3} else weight)
    else:
        legal, groups = listed and len(x) == 1 and one == (len(weight) == 1), -1 if one else None
    if not legal:
        got = f"{len(x)} x and {len(weight)} weight of rank {sorted(ranks)}, split_item {split_item}"
        _refuse(f"{got}, group_type {group_type}", "a form of its table, such as one x and one weight [E, K, N]")
    _refuse_groups(group_list, groups)
    count, most = (len(weight), _MOST_LISTED) if form[2] == "list" else (weight[0].size(0), _MOST_STACKED)
    if group_type == _SUMS and one:
        count, most = (0 if group_list is None else group_list.numel()), _MOST_STACKED
    if count > most:
        _refuse(f"{count} groups", f"at most {_MOST_LISTED} with a weight each, {_MOST_STACKED} of one tensor")
    if one and len({operand.size(-1) for operand in weight}) > 1:
        _refuse("weights of unequal width for one result", "one width")
    if bias is not None and (group_type == _SUMS or len(bias) != len(weight)):
        _refuse(f"{len(bias)} bias for {len(weight)} weight, group_type {group_type}", "as many, and none with 2")
    return one


def _refuse_groups(group_list: Tensor | None, groups: int | None) -> None:
    """`groups`: how many there must be; -1 for any number, None for no list at all."""
    if groups is None or group_list is None:
        if (groups is None) != (group_list is None):
            _refuse(f"{'no' if group_list is None else 'a'} group_list", "one where x is one tensor that is split")
        return
    if group_list.dtype != torch.int64 or group_list.dim() != 1:
        _refuse(f"group_list {group_list.dtype} of rank {group_list.dim()}", "int64 of rank 1")
    if groups != -1 and group_list.numel() != groups:
        _refuse(f"group_list of {group_list.numel()} for {groups} weights", "one number a weight")


def _refuse_operands(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group_type: int | None) -> None:
    dtypes = {operand.dtype for operand in (*x, *weight)}
    if len(dtypes) > 1 or x[0].dtype not in _FLOATS:
        _refuse(f"x and weight of {sorted(map(str, dtypes))}", "one of float32, bfloat16 and float16 for all")
    if any(not (operand.dim() == 2 or (group_type == _NONE and 2 < operand.dim() < 7)) for operand in x):
        _refuse(f"x of rank {[operand.dim() for operand in x]}", "rank 2, or up to 6 with group_type -1")
    if any(operand.numel() == 0 for operand in (*x, *weight)):
        _refuse("an empty x or weight", "M, K and N of 1 and more")
    turned = [_turned(operand) for operand in weight]
    if any(_turned(operand) != (group_type == _SUMS) for operand in x):
        _refuse(f"x with strides {[operand.stride() for operand in x]}", "a transposed view with group_type 2 only")
    if any(turned) and (group_type == _SUMS or not all(turned)):
        _refuse(f"weight with strides {[w.stride() for w in weight]}", "all transposed or none, none with group_type 2")
    whole = x[0].size(1) if len(x) == 1 else None
    ks = [operand.size(-2) for operand in weight]
    got = [sum(ks)] if group_type == _SUMS else ks
    if any(k != (operand.size(-1) if whole is None else whole) for k, operand in zip(got, x * len(got), strict=False)):
        _refuse(f"x {[tuple(t.shape) for t in x]} with weight {[tuple(t.shape) for t in weight]}", "the same K")
    for operand in (*x, *weight):
        inner = operand.size(-2 if _turned(operand) else -1)
        if inner >= _WIDEST:
            _refuse(f"an operand whose inner axis is {inner}", f"less than {_WIDEST}")
    taken = torch.float32 if x[0].dtype == torch.bfloat16 else x[0].dtype
    for offset, operand in zip(bias or (), weight, strict=False):
        if offset.dtype != taken:
            _refuse(f"bias {offset.dtype} with x {x[0].dtype}", str(taken))
        if offset.shape != (*operand.shape[:-2], operand.size(-1)):
            _refuse(f"bias {tuple(offset.shape)} with weight {tuple(operand.shape)}", "a row [N] a weight")


def _turned(operand: Tensor) -> bool:
    """Whether the device takes `operand` for a transposed view, which it reads as it lies."""
    rows, columns = operand.shape[-2:]
    if operand.stride(-2) != 1 or operand.stride(-1) != rows or (rows == 1 and columns == 1):
        return False
    return operand.dim() < 3 or operand.stride(-3) == rows * columns


def _refuse(got: str, takes: str) -> NoReturn:
    raise ContractError(_OP, got, takes)


def _shapes(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    one, width = split_item in (2, 3), weight[0].size(-1)
    if group_type == _SUMS and one and group_list is not None:
        return [x[0].new_empty(group_list.size(0), x[0].size(0), width)]
    if group_type == _SUMS:
        return [x[0].new_empty(x[0].size(0), operand.size(1)) for operand in weight]
    if group_type == _NONE:
        return [a.new_empty(*a.shape[:-1], b.size(1)) for a, b in zip(x, weight, strict=True)]
    if group_type != _ROWS:
        _refuse(f"group_type {group_type}", "-1, 0 or 2, always given")
    if not one:
        _refuse("a trace of several results", "split_item 2 or 3: the sizes of groups are not known when it is traced")
    return [x[0].new_empty(sum(operand.size(0) for operand in x), width)]


_SCHEMA = (
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]"
)

OPS = (EmulatedOp(_SCHEMA, npu_grouped_matmul, _shapes),)
