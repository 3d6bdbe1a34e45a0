"""Every experts class of the interface on ``npu:0``: torch_npu's schemas, Meta kernels and autograd under each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.experts_sweep import DTYPES, sweep, worse


@pytest.fixture(scope="module")
def swept() -> Any:
    return sweep("npu")


def test_every_class_is_fused_no_less_exactly_than_its_original(swept: Any) -> None:
    _, served = swept
    assert len(served) >= 68
    wrong = []
    for name, of in served.items():
        wrong += [(name, *what) for what in worse(*of, torch.bfloat16, 1.0, device="npu")]
    assert not wrong, "\n".join(map(str, wrong))


def test_each_variant_in_every_dtype_and_at_both_scales(swept: Any) -> None:
    """One class of each variant: what differs between them is only names."""
    rows, served = swept
    examples = {rows[name].variant: name for name in served}
    assert len(examples) >= 7
    wrong = []
    for name in examples.values():
        for dtype in DTYPES:
            for scale in (1.0, 60.0):
                found = worse(*served[name], dtype, scale, device="npu")
                wrong += [(name, dtype, scale, *what) for what in found]
    assert not wrong, "\n".join(map(str, wrong))


def test_routing_weights_in_fp32_beside_tokens_in_bf16(swept: Any) -> None:
    _, served = swept
    wrong = []
    for name, of in served.items():
        wrong += [(name, *what) for what in worse(*of, torch.bfloat16, 1.0, torch.float32, device="npu")]
    assert not wrong, "\n".join(map(str, wrong))
