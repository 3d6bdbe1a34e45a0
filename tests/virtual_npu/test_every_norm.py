"""Every norm of transformers on ``npu:0``: torch_npu's schemas, Meta kernels and autograd under each fused path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.norm_sweep import DTYPES, settings_of, sweep, worse


@pytest.fixture(scope="module")
def swept() -> Any:
    return sweep("npu")


def test_every_norm_is_fused_no_less_exactly_than_its_original(swept: Any) -> None:
    rows, sites = swept
    assert len(sites) >= 211
    wrong = []
    for name, (cls, original, fused) in sites.items():
        for settings in settings_of(cls, rows[name].variant):
            found = worse(cls, original, fused, settings, torch.bfloat16, torch.bfloat16, 1.0, device="npu")
            wrong += [(name, settings, *what) for what in found]
    assert not wrong, "\n".join(map(str, wrong))


def test_each_variant_in_every_pair_of_dtypes_and_at_both_scales(swept: Any) -> None:
    """One class of each variant: what differs between them is only names."""
    rows, sites = swept
    examples = {rows[name].variant: name for name in sites}
    assert {"weightless", "gated_post_sigmoid", "one_plus", "t5", "no_upcast", "one_plus_grouped"} < set(examples)
    wrong = []
    for variant, name in examples.items():
        cls, original, fused = sites[name]
        for settings in settings_of(cls, variant):
            for x in DTYPES:
                for weight in DTYPES:
                    for scale in (1.0, 60.0):
                        found = worse(cls, original, fused, settings, x, weight, scale, device="npu")
                        wrong += [(name, settings, x, weight, scale, *what) for what in found]
    assert not wrong, "\n".join(map(str, wrong))
