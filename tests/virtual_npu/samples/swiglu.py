"""`npu_swiglu`, `npu_geglu` and their backwards: every dtype, ranks 1 to 8, another dim, both forms of gelu."""

from __future__ import annotations

import torch

from . import Call, call

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((8,), (3, 8), (2, 3, 5, 8), (1, 2, 1, 2, 1, 2, 1, 8))
GELUS = tuple((approximate, left) for approximate in (0, 1) for left in (False, True))


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _half(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2)


def _geglu_grad(shape: tuple[int, ...], dtype: torch.dtype, approximate: int, left: bool) -> Call:
    x = _random(shape, dtype)
    a = x.float().chunk(2, -1)[not left]
    gelu = torch.nn.functional.gelu(a, approximate=("none", "tanh")[approximate]).to(dtype)
    return call(_random(_half(shape), dtype, 1), x, gelu, -1, approximate, left)


SAMPLES = {
    "npu_swiglu": [
        *(call(_random(shape, dtype), -1) for shape in SHAPES for dtype in FLOATS),
        call(_random((4, 3), torch.float32), 0),
        call(_random((4, 6), torch.float32)),
    ],
    "npu_swiglu_backward": [
        *(call(_random(_half(shape), dtype, 1), _random(shape, dtype), -1) for shape in SHAPES for dtype in FLOATS),
        call(_random((2, 3), torch.float32, 1), _random((4, 3), torch.float32), 0),
    ],
    "npu_geglu": [
        *(call(_random(shape, dtype), -1, *gelu) for shape in SHAPES for dtype in FLOATS for gelu in GELUS),
        call(_random((4, 6), torch.float32)),
        call(_random((4, 3), torch.float32), 0, 0, True),
    ],
    "npu_geglu_grad": [_geglu_grad(shape, dtype, *gelu) for shape in SHAPES for dtype in FLOATS for gelu in GELUS],
}
