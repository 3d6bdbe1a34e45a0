"""Every gated MLP of transformers on ``npu:0``: torch_npu's schemas, Meta kernels and autograd under the fused path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.mlp_sweep import DTYPES, sweep, worse


@pytest.fixture(scope="module")
def swept() -> Any:
    return sweep("npu")


def test_every_mlp_is_fused_no_less_exactly_than_its_original(swept: Any) -> None:
    _, sites = swept
    assert len(sites) >= 184
    wrong = []
    for name, (cls, original, fused) in sites.items():
        found = worse(cls, original, fused, torch.bfloat16, 1.0, device="npu")
        wrong += [(name, *what) for what in found]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("activation", "op"), [("silu", "npu_swiglu"), ("gelu", "npu_geglu"), ("gelu_pytorch_tanh", "npu_geglu")]
)
def test_each_variant_in_every_dtype_and_at_both_scales(swept: Any, activation: str, op: str) -> None:
    """One class of each variant: what differs between them is only names."""
    rows, sites = swept
    examples = {rows[name].variant: name for name in sites if "Dinov2" not in name and "Lfm" not in name}
    assert len(examples) == 6
    wrong = []
    for name in examples.values():
        for dtype in DTYPES:
            for scale in (1.0, 60.0):
                found = worse(*sites[name], dtype, scale, activation, op, device="npu")
                wrong += [(name, dtype, scale, *what) for what in found]
    assert not wrong, "\n".join(map(str, wrong))
