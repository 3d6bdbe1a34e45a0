"""Models on the NPU with `swiglu` patched: activation and product are one kernel, and the answer is the original's."""

from __future__ import annotations

import pytest
import torch

import npu_autopatch
from npu_autopatch.ops import swiglu as ops

from .accounting import counted
from .likeness import assert_as_near_to_fp64_in_bf16, assert_the_originals_in_fp32, distance
from .tiny_models import inputs, run, tiny

LAYERS = 2
OPS = {
    "llama": ("npu_swiglu", "npu_swiglu_backward"),
    "qwen3": ("npu_swiglu", "npu_swiglu_backward"),
    "glm4": ("npu_swiglu", "npu_swiglu_backward"),
    "gemma2": ("npu_geglu", "npu_geglu_grad"),
}
each_family = pytest.mark.parametrize("family", OPS)


def patched():
    return npu_autopatch.patched(kernels="swiglu", backend="npu")


def all_ops(counts):
    return {name: count for name, count in counts.launches.items() if "glu" in name}


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_mlp_is_one_kernel_forward_and_backward_and_moves_less(family, dtype):
    model, batch = tiny(family).npu().to(dtype), inputs(family)
    with counted() as before:
        run(model, batch)
    with patched(), counted() as inside:
        run(model, batch)
    with counted() as after:
        run(model, batch)
    forward, backward = OPS[family]
    assert all_ops(inside) == {forward: LAYERS, backward: LAYERS}
    assert inside.launches.total() < before.launches.total()
    saved = sum(before.moved.values()) - sum(inside.moved.values())
    assert saved > 0 or (saved == 0 and forward == "npu_geglu"), "npu_geglu writes the activated half too"
    assert inside.transfers == before.transfers, "the guard waits for the device"
    assert after.launches == before.launches


@each_family
def test_inference_moves_no_byte_more(family):
    model, batch = tiny(family).npu(), inputs(family)
    with torch.no_grad():
        with counted() as before:
            want = model(**batch).logits
        with patched(), counted() as inside:
            got = model(**batch).logits
    assert all_ops(inside) == ({"npu_swiglu": LAYERS} if family == "glm4" else {})
    assert sum(inside.moved.values()) <= sum(before.moved.values())
    assert distance(got, want) < 1e-5


@each_family
def test_fp32_logits_and_gradients_are_the_originals(family):
    assert_the_originals_in_fp32(family, patched)


@each_family
def test_bf16_logits_and_gradients_are_as_near_to_fp64_as_the_originals(family):
    assert_as_near_to_fp64_in_bf16(family, patched)


def test_the_gradient_of_geglu_cannot_be_traced_by_this_torch_npu():
    assert not ops.geglu_traces()


@each_family
def test_a_patched_model_compiles_whole_forward_and_backward(family):
    model, batch = tiny(family).npu(), inputs(family)
    want = run(model, batch)
    with patched():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with counted() as counts:
            got = run(compiled, batch)
    forward, backward = OPS[family]
    assert all_ops(counts) == ({forward: LAYERS, backward: LAYERS} if "swiglu" in forward else {})
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_patched_model_recomputes_its_checkpoints(reentrant):
    model, batch = tiny("qwen3").npu().train(), inputs("qwen3")
    want = run(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with patched(), counted() as counts:
        got = run(model, batch)
    assert all_ops(counts)["npu_swiglu_backward"] == LAYERS
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5


def test_generation_with_a_cache_gives_the_same_tokens():
    model = tiny("glm4").npu().eval()
    ids = torch.arange(1, 8, device="npu")[None]

    def generate():
        return model.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))

    want = generate()
    with patched(), counted() as counts:
        got = generate()
    assert torch.equal(got, want)
    assert counts.launches["npu_swiglu"] == 5 * LAYERS
