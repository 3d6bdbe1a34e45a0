"""Models of the families most used, on the virtual NPU: every kernel is on, and the answer is the original's."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

import npu_autopatch
from tests.kernels.exact import InDouble
from tests.models.comparison import exact_outcome, outcome, trained, worse
from tests.models.families import FAMILIES, inputs, tiny

from .accounting import Counts, counted

NAMES = [
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "glm", "glm4"),
    *("gemma", "gemma2", "gemma3", "deepseek_v2", "deepseek_v3", "phi", "phi3"),
]
ONE_PROJECTION = {"glm", "glm4", "phi3"}  # of gate and up: fused without a gradient too
FORWARD = (
    *("npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_geglu"),
    *("npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute"),
)
each_family = pytest.mark.parametrize("name", NAMES)


def launched(counts: Counts) -> dict[str, int]:
    """The fused ops of the device."""
    known = {op for name in NAMES for op in FAMILIES[name].calls}
    return {op: count for op, count in counts.launches.items() if op in known}


def forwards(name: str, learning: bool) -> Counter[str]:
    """The fused calls of one forward; where nothing is `learning`, two projections of an MLP are not fused."""
    family = FAMILIES[name]
    calls = Counter({op: count for op, count in family.calls.items() if op in FORWARD})
    calls["npu_grouped_matmul"] //= 3  # the others are gradients
    if not learning and name not in ONE_PROJECTION:
        calls.update({op: family.experts - count for op, count in calls.items() if "glu" in op})
    return +calls


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_layer_is_fused_and_answer_and_gradients_are_no_worse(name, dtype):
    model, batch = tiny(name, dtype), inputs(name)
    exact = exact_outcome(model, batch)
    model.npu()
    original = outcome(model, batch)
    with npu_autopatch.patched(), counted() as counts:
        got = outcome(model, batch)
    assert launched(counts) == FAMILIES[name].calls
    assert not (found := worse(got, original, exact)), "\n".join(found)


@each_family
def test_generation_with_a_cache_gives_the_same_tokens(name):
    model, ids, steps = tiny(name).npu(), inputs(name)["input_ids"].npu(), 6
    options = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # on the left
    want = model.generate(ids, attention_mask=mask, **options)
    with npu_autopatch.patched(), counted() as counts:
        got = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(got, want)
    assert got.shape == (2, 11 + steps)
    assert launched(counts) == {op: count * steps for op, count in forwards(name, learning=False).items()}


@each_family
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_steps_of_training_with_checkpoints_are_no_worse(name, reentrant):
    model, batch, steps = tiny(name), inputs(name), 2
    with InDouble():
        exact = trained(copy.deepcopy(model).double(), batch, steps)
    model.npu()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    original = trained(model, batch, steps)
    with npu_autopatch.patched(), counted() as counts:
        got = trained(model, batch, steps)
    # computed again in the backward; a reentrant checkpoint runs first without a gradient
    calls = Counter(FAMILIES[name].calls) + forwards(name, learning=not reentrant)
    expected = Counter({op: count * steps for op, count in calls.items()})
    if "npu_rms_norm" in expected:
        expected["npu_rms_norm"] -= steps  # the last norm is in no checkpoint
    assert launched(counts) == dict(expected)
    assert not (found := worse(got, original, exact)), "\n".join(found)
