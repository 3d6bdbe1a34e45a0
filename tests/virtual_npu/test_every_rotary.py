"""Every rotary function of transformers on ``npu:0``: torch_npu's schema, Meta kernel and autograd under each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.rotary_sweep import Case, Rotary, arguments, cases, sweep, worse


@pytest.fixture(scope="module")
def swept() -> list[Rotary]:
    return sweep("npu")[1]


def test_every_function_is_fused_no_less_exactly_than_its_original(swept: list[Rotary]) -> None:
    assert len(swept) >= 238
    wrong = []
    for rotary in swept:
        for ranks in rotary.variant.ranks:
            case = Case(torch.bfloat16, torch.bfloat16, ranks=ranks, unsqueeze=rotary.variant.unsqueeze)
            wrong += [(rotary.name, case, *what) for what in worse(rotary, case, device="npu")]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(map(str, wrong[:20]))


def test_each_variant_in_every_way_of_calling(swept: list[Rotary]) -> None:
    """One function of each variant: dtypes, scales, batches, strides, parts, one token."""
    examples = {(str(r.variant), r.variant.compute, r.variant.result, r.variant.ranks): r for r in swept}
    wrong = []
    for rotary in examples.values():
        for case in cases(rotary):
            wrong += [(rotary.name, case, *what) for what in worse(rotary, case, device="npu")]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(map(str, wrong[:20]))


def test_cpu_tensors_in_an_npu_process_run_the_original(swept: list[Rotary], fused_calls: Any) -> None:
    from transformers.models.llama import modeling_llama

    import npu_autopatch

    (llama,) = [rotary for rotary in swept if rotary.name == "llama.apply_rotary_pos_emb"]
    bound = arguments(llama, Case())
    with npu_autopatch.patched(kernels="rope"), fused_calls() as count:
        found = modeling_llama.apply_rotary_pos_emb(**bound)
        assert count == {}
        modeling_llama.apply_rotary_pos_emb(**{name: value.to("npu") for name, value in bound.items()})
        assert count == {"npu_rotary_mul": 2}
    assert all(torch.equal(got, right) for got, right in zip(found, llama.original(**bound), strict=True))
