"""`npu_rms_norm` and its backward: every legal pair of dtypes, ranks 1 to 8, a gamma of one and two dimensions."""

from __future__ import annotations

import torch

from . import Call, call

PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
)
SHAPES = (((8,), (8,)), ((3, 8), (8,)), ((2, 3, 5, 8), (8,)), ((2, 3, 5, 8), (5, 8)), ((1, 2, 1, 2, 1, 2, 1, 8), (8,)))


def _forward(shape: tuple[int, ...], normed: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> Call:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=source).to(dtypes[0])
    return call(x, torch.rand(normed, generator=source).add(0.5).to(dtypes[1]), 1e-5)


def _backward(shape: tuple[int, ...], normed: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> Call:
    (x, gamma, epsilon), _ = _forward(shape, normed, dtypes)
    dims = tuple(range(-len(normed), 0))
    rstd = x.float().square().mean(dims, keepdim=True).add(epsilon).rsqrt()
    return call(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype), x, gamma, rstd)


SAMPLES = {
    "npu_rms_norm": [
        *(_forward(shape, normed, dtypes) for shape, normed in SHAPES for dtypes in PAIRS),
        call(torch.randn(2, 8), torch.ones(8)),
        call(torch.randn(0, 8), torch.ones(8)),
    ],
    "npu_rms_norm_backward": [
        _backward(shape, normed, dtypes) for shape, normed in SHAPES if len(shape) > 1 for dtypes in PAIRS
    ],
}
