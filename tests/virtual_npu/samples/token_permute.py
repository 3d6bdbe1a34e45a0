"""The token ops and their backwards: dtypes of tokens and weights, of ids, rows left off, ids of one dimension."""

from __future__ import annotations

import torch

from . import Call, call

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(rows, probs) for rows in FLOATS for probs in FLOATS]
TOKENS, CHOSEN, HIDDEN = 5, 3, 6
IDS = torch.tensor([[2, 0, 4], [4, 1, 2], [0, 4, 1], [1, 2, 0], [3, 0, 2]])
ORDER = IDS.flatten().argsort(stable=True).argsort().int()


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rows(dtype: torch.dtype) -> torch.Tensor:
    return _random(TOKENS * CHOSEN, HIDDEN, dtype=dtype)


def _tokens(dtype: torch.dtype) -> torch.Tensor:
    return _random(TOKENS, HIDDEN, dtype=dtype, seed=1)


def _unpermute_grad(rows: torch.dtype, probs: torch.dtype) -> Call:
    return call(_rows(rows), _tokens(rows), ORDER, _random(TOKENS, CHOSEN, dtype=probs, seed=2))


SAMPLES = {
    "npu_moe_token_permute": [
        *(call(_tokens(dtype), ids) for dtype in FLOATS for ids in (IDS, IDS.int())),
        call(_tokens(torch.float32), IDS[:, 0]),
        *(call(_tokens(torch.float32), IDS, kept) for kept in (0, 9, -4, 99)),
    ],
    "npu_moe_token_permute_grad": [
        *(call(_tokens(dtype), _rows(dtype), ids, ORDER) for dtype in FLOATS for ids in (IDS, IDS.int())),
        call(_tokens(torch.float32), _rows(torch.float32)[:9], IDS, ORDER),
    ],
    "npu_moe_token_unpermute": [
        *(call(_rows(rows), ORDER, _random(TOKENS, CHOSEN, dtype=probs, seed=2)) for rows, probs in PAIRS),
        *(call(_rows(dtype), ORDER) for dtype in FLOATS),
    ],
    "npu_moe_token_unpermute_grad": [
        *(_unpermute_grad(*pair) for pair in PAIRS),
        call(_rows(torch.float32), _random(TOKENS * CHOSEN, HIDDEN, dtype=torch.float32, seed=1), ORDER),
    ],
}
