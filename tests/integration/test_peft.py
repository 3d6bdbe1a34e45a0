"""LoRA and other adapters of peft act as they do without the patch."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

import npu_autopatch

TARGETS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "norms saved": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm", "q_norm"]},
}


def adapted(tiny_model: Any, **settings: Any) -> Any:
    """A Qwen3 whose adapter is random, and so has an effect."""
    torch.manual_seed(11)
    model = peft.get_peft_model(tiny_model("Qwen3"), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def outputs(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits with and without the adapter, and the gradient of what the adapter trains."""
    found = {"on": model(tokens).logits}
    with model.disable_adapter():
        found["off"] = model(tokens).logits
    found["on again"] = model(tokens).logits
    model(tokens, labels=tokens).loss.backward()
    found.update({f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.requires_grad})
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ["adapter first", "patch first"])
def test_lora_gives_the_same_logits_and_gradients(
    target: str, order: str, tiny_model: Any, tokens: Any, fused_calls: Any, norms: dict[str, int]
) -> None:
    expected = outputs(adapted(tiny_model, **TARGETS[target]), tokens)
    assert not torch.allclose(expected["on"], expected["off"], atol=0.1)
    early = adapted(tiny_model, **TARGETS[target])
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        found = outputs(early if order == "adapter first" else adapted(tiny_model, **TARGETS[target]), tokens)
    assert count["npu_rms_norm"] == 4 * norms["Qwen3"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name] is not None, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-3 * tensor.abs().max().item(), msg=name)
    assert any("norm" in name for name in expected) == (target == "norms saved")


def test_a_merged_adapter_gives_the_same_logits(tiny_model: Any, tokens: Any, fused_calls: Any) -> None:
    expected = adapted(tiny_model, **TARGETS["norms saved"]).merge_and_unload()(tokens).logits
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        found = adapted(tiny_model, **TARGETS["norms saved"]).merge_and_unload()(tokens).logits
    assert count["npu_rms_norm"] == 9
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_ia3_and_prompt_tuning_give_the_same_logits(tiny_model: Any, tokens: Any, fused_calls: Any) -> None:
    def logits(config: Any) -> torch.Tensor:
        torch.manual_seed(11)
        return peft.get_peft_model(tiny_model("Llama"), config)(tokens).logits

    ia3 = peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for config in (ia3, prompts):
        expected = logits(config)
        with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
            found = logits(config)
        assert count["npu_rms_norm"] == 5
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
