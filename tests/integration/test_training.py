"""Training and generation with whole models: the unpatched run's losses, weights, tokens and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_autopatch

STEPS = 3


def train(
    model: Any, tokens: torch.Tensor, checkpointing: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the weights after."""
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["Gemma2", "Qwen3"])
@pytest.mark.parametrize(
    "checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=["plain", "reentrant", "not"]
)
def test_three_steps_equal_the_unpatched(
    family: str, checkpointing: Any, tiny_model: Any, tokens: Any, fused_calls: Any, norms: dict[str, int]
) -> None:
    losses, weights = train(tiny_model(family), tokens, checkpointing)
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        found, changed = train(tiny_model(family), tokens, checkpointing)
    recomputed = norms[family] - 1 if checkpointing else 0  # all but the last norm
    assert count["npu_rms_norm"] == STEPS * (norms[family] + recomputed)
    assert count["npu_rms_norm_backward"] == STEPS * norms[family]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    assert changed.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(changed[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    initial = dict(tiny_model(family).named_parameters())
    assert all(not torch.equal(initial[name], weight) for name, weight in changed.items() if "norm" in name)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_greedy_generation_with_a_cache_gives_the_same_tokens(
    family: str, tiny_model: Any, tokens: Any, fused_calls: Any, norms: dict[str, int]
) -> None:
    def generate() -> Any:
        return tiny_model(family).generate(
            tokens, max_new_tokens=8, do_sample=False, use_cache=True, attention_mask=tokens.ne(0)
        )

    expected = generate()
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        found = generate()
    assert torch.equal(found, expected)
    assert expected.shape == (2, 15)
    assert count["npu_rms_norm"] == 8 * norms[family]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double"])
def test_a_model_cast_after_the_patch_gives_what_it_gave(
    family: str, change: str, tiny_model: Any, tokens: Any, fused_calls: Any, norms: dict[str, int]
) -> None:
    expected = getattr(tiny_model(family), change)()(tokens).logits
    with npu_autopatch.patched(backend="emulate"):
        model = tiny_model(family)
        model(tokens)
        with fused_calls() as count:
            found = getattr(model, change)()(tokens).logits
    assert found.dtype == expected.dtype
    assert count["npu_rms_norm"] == (0 if change == "double" else norms[family])
    assert change != "double" or not count
    tolerance = {"half": 1e-2, "bfloat16": 1e-1, "float": 1e-4, "double": 0.0}[change] * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_autocast_gives_every_module_the_dtype_it_gave(
    family: str, tiny_model: Any, tokens: Any, fused_calls: Any, norms: dict[str, int]
) -> None:
    def dtypes() -> tuple[list[tuple[str, torch.dtype]], torch.Tensor]:
        model, seen = tiny_model(family), []
        for name, module in model.named_modules():
            if "RMSNorm" in type(module).__name__ or isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda m, i, o, name=name: seen.append((name, o.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradients = {(name, p.grad.dtype) for name, p in model.named_parameters()}
        return [*seen, *sorted(gradients)], loss.detach()

    expected, loss = dtypes()
    assert {dtype for _, dtype in expected} == {torch.float32, torch.bfloat16}
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        found, fused_loss = dtypes()
    assert found == expected
    assert count["npu_rms_norm"] == count["npu_rms_norm_backward"] == norms[family]
    torch.testing.assert_close(fused_loss, loss, rtol=2e-2, atol=0)


@pytest.mark.parametrize("frozen", ["norm", "all but the norms"])
def test_frozen_weights_get_no_gradient_and_the_others_the_same(
    frozen: str, tiny_model: Any, tokens: Any, fused_calls: Any
) -> None:
    def gradients() -> dict[str, Any]:
        model = tiny_model("Gemma2")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(("norm" in name) != (frozen == "norm"))
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        found = gradients()
    assert count["npu_rms_norm"] == 9
    assert any(grad is None for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            assert found[name].dtype == grad.dtype
            torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-3 * grad.abs().max().item(), msg=name)


def test_a_teacher_and_a_student_differ_by_the_block_they_run_in(
    tiny_model: Any, tokens: Any, fused_calls: Any
) -> None:
    teacher, student = tiny_model("Llama"), tiny_model("Qwen3")
    with fused_calls() as count:
        with torch.no_grad():
            teacher(tokens)
        with npu_autopatch.patched(backend="emulate"):
            student(tokens)
        with torch.inference_mode():
            teacher(tokens)
    assert count["npu_rms_norm"] == 9
