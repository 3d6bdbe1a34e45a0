"""`npu_grouped_matmul`: rows and sums by group, stacks and lists of weights, transposed views, bias, empty groups."""

from __future__ import annotations

from typing import Any

import torch

from . import Call, call

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS, K, N, EXPERTS = 7, 6, 10, 3
COUNTS = torch.tensor([2, 0, 4])


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _rows(dtype: torch.dtype, listed: bool, turned: bool, biased: bool) -> Call:
    shape = (EXPERTS, N, K) if turned else (EXPERTS, K, N)
    stack = _random(*shape, dtype=dtype)
    stack = stack.transpose(1, 2) if turned else stack
    taken = torch.float32 if dtype is torch.bfloat16 else dtype
    bias = _random(EXPERTS, N, dtype=taken)
    split: dict[str, Any] = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}
    if biased:
        split["bias"] = list(bias) if listed else [bias]
    return call([_random(ROWS, K, dtype=dtype)], list(stack) if listed else [stack], **split)


def _sums(dtype: torch.dtype) -> Call:
    x = _random(ROWS, K, dtype=dtype).t()
    return call([x], [_random(ROWS, N, dtype=dtype)], group_list=COUNTS, split_item=3, group_type=2, group_list_type=1)


_KINDS = [(listed, turned, biased) for listed in (False, True) for turned in (False, True) for biased in (False, True)]

SAMPLES = {
    "npu_grouped_matmul": [
        *(_rows(dtype, *kind) for dtype in FLOATS for kind in _KINDS),
        *(_sums(dtype) for dtype in FLOATS),
        call(
            [_random(ROWS, K, dtype=torch.float32)],
            [_random(EXPERTS, K, N, dtype=torch.float32)],
            group_list=COUNTS.cumsum(0),
            split_item=3,
            group_type=0,
        ),
        call(
            [_random(2, K, dtype=torch.float32), _random(3, K, dtype=torch.float32)],
            [_random(K, N, dtype=torch.float32), _random(K, N, dtype=torch.float32)],
            split_item=2,
            group_type=0,
        ),
        call(
            [_random(2, K, dtype=torch.float32), _random(3, N, dtype=torch.float32)],
            [_random(K, N, dtype=torch.float32), _random(N, K, dtype=torch.float32)],
            split_item=0,
            group_type=-1,
        ),
    ],
}
