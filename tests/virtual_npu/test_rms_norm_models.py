"""Models on the NPU with `rms_norm` patched: every norm is one kernel, and the answer is the original's."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch

import npu_autopatch

from .accounting import counted
from .likeness import assert_as_near_to_fp64_in_bf16, assert_the_originals_in_fp32, distance
from .tiny_models import FAMILIES, inputs, rms_norms, run, tiny

each_family = pytest.mark.parametrize("family", FAMILIES)


@contextlib.contextmanager
def norm_calls(model):
    """A list that grows by one with every call of an RMS norm of `model`."""
    calls = []
    hooks = [norm.register_forward_hook(lambda module, *_: calls.append(module)) for norm in rms_norms(model)]
    yield calls
    for hook in hooks:
        hook.remove()


def patched():
    return npu_autopatch.patched(kernels="rms_norm", backend="npu")


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_norm_is_one_kernel_forward_and_backward_and_launches_are_saved(family, dtype):
    model, batch = tiny(family).npu().to(dtype), inputs(family)
    with norm_calls(model) as calls, counted() as before:
        run(model, batch)
    with patched(), counted() as inside:
        run(model, batch)
    with counted() as after:
        run(model, batch)
    assert len(calls) >= len(rms_norms(model)) > 0
    assert inside.launches["npu_rms_norm"] == len(calls)
    assert inside.launches["npu_rms_norm_backward"] == len(calls)
    assert inside.launches.total() < before.launches.total() - 10 * len(calls)
    assert sum(inside.moved.values()) < sum(before.moved.values())
    assert inside.transfers == before.transfers, "the guard waits for the device"
    assert after.launches == before.launches


@each_family
def test_fp32_logits_and_gradients_are_the_originals(family):
    assert_the_originals_in_fp32(family, patched)


@each_family
def test_bf16_logits_and_gradients_are_as_near_to_fp64_as_the_originals(family):
    assert_as_near_to_fp64_in_bf16(family, patched)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "t5", "olmo2", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_every_patched_norm_compiles_whole_and_keeps_its_gradients(family, layout):
    norms = {type(norm): norm for norm in rms_norms(tiny(family).npu().to(torch.bfloat16))}
    for cls, norm in norms.items():
        size = norm.weight.numel()
        count = len(inspect.signature(cls.forward).parameters) - 1  # the second is a gate
        operands = [torch.randn(3, 5, size, dtype=torch.bfloat16, device="npu") for _ in range(count)]
        if layout == "transposed":
            operands = [x.transpose(0, 1) for x in operands]
        operands = [x.requires_grad_() for x in operands]

        def gradients(function, operands=operands, norm=norm):
            y = function(*operands)
            return torch.autograd.grad(y.flatten(1).square().sum(), (*operands, norm.weight))

        with patched():
            want = gradients(norm)
            with counted() as counts:
                got = gradients(torch.compile(norm, backend="aot_eager", fullgraph=True))
        assert counts.launches["npu_rms_norm"] == counts.launches["npu_rms_norm_backward"] == 1, cls.__name__
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), cls.__name__


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "t5", "glm4"])
def test_a_patched_model_compiles_whole(family):
    model, batch = tiny(family).npu(), inputs(family)
    want = run(model, batch)
    with norm_calls(model) as calls:
        run(model, batch)
    with patched():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with counted() as counts:
            got = run(compiled, batch)
    assert counts.launches["npu_rms_norm"] == len(calls)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_patched_model_recomputes_its_checkpoints(reentrant):
    model, batch = tiny("qwen3").npu().train(), inputs("qwen3")
    want = run(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with patched(), counted() as counts:
        got = run(model, batch)
    norms = len(rms_norms(model))
    assert counts.launches["npu_rms_norm"] == 2 * norms - 1  # the last norm is in no checkpoint
    assert counts.launches["npu_rms_norm_backward"] == norms
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "t5", "bamba"])
def test_a_patched_model_generates_the_same_tokens(family):
    model, ids = tiny(family).npu(), inputs(family)["input_ids"].npu()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    with norm_calls(model) as calls:
        model.generate(ids, **options)
    with patched(), counted() as counts:
        got = model.generate(ids, **options)
    assert torch.equal(got, want)
    assert counts.launches["npu_rms_norm"] == len(calls)


def test_under_autocast_the_dtypes_are_the_originals():
    model, batch = tiny("qwen3").npu(), inputs("qwen3")
    with torch.autocast("npu", dtype=torch.bfloat16):
        want = model(input_ids=batch["input_ids"].npu()).logits
        with patched(), counted() as counts:
            got = model(input_ids=batch["input_ids"].npu()).logits
    assert got.dtype == want.dtype
    assert counts.launches["npu_rms_norm"] == len(rms_norms(model))
    assert distance(got, want) < torch.finfo(torch.bfloat16).eps
