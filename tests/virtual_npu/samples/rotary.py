"""`npu_rotary_mul` and its backward: both modes, every layout and broadcast form, cos of another dtype."""

from __future__ import annotations

import torch

from . import Call, call

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = (
    ((2, 3, 5, 8), (1, 1, 5, 8)),
    ((2, 3, 5, 8), (2, 1, 5, 8)),
    ((2, 3, 5, 8), (2, 3, 5, 8)),
    ((2, 5, 3, 8), (1, 5, 1, 8)),
    ((2, 5, 3, 8), (2, 5, 1, 8)),
    ((5, 2, 3, 8), (5, 1, 1, 8)),
    ((5, 2, 3, 8), (5, 2, 1, 8)),
    ((5, 3, 8), (5, 1, 8)),
    ((5, 3, 8), (5, 3, 8)),
)
INTERLEAVE = tuple(HALF[place] for place in (0, 3, 5, 7))
FORMS = [(shape, table, "half") for shape, table in HALF] + [(s, t, "interleave") for s, t in INTERLEAVE]


def _tensors(shape: tuple[int, ...], table: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(0)
    angles = torch.randn(table, generator=source)
    return torch.randn(shape, generator=source).to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def _backward(shape: tuple[int, ...], table: tuple[int, ...], mode: str, dtype: torch.dtype) -> Call:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return call(grad, *_tensors(shape, table, dtype), mode)


SAMPLES = {
    "npu_rotary_mul": [
        *(call(*_tensors(shape, table, dtype), mode) for shape, table, mode in FORMS for dtype in FLOATS),
        call(torch.randn(2, 3, 5, 8).bfloat16(), torch.rand(1, 1, 5, 8), torch.rand(1, 1, 5, 8)),
    ],
    "npu_rotary_mul_backward": [
        _backward(shape, table, mode, dtype) for shape, table, mode in FORMS for dtype in FLOATS
    ],
}
