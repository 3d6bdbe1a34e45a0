"""Whole transformers models train, generate and compile on the virtual device as they do on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from .accounting import counted

LAYERS = 2


def tiny_qwen3(dtype=torch.float32):
    """Unequal sizes and random norms, so that no transposition or dropped weight goes unseen."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


def token_ids(rows=3, length=7):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model, ids, **inputs):
    model.zero_grad()
    loss = model(ids.to(model.device), labels=ids.to(model.device), **inputs).loss
    loss.backward()
    return loss.detach().cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def assert_close(got, want):
    """Equal to 1e-5 of the largest value of each tensor."""
    (loss, gradients), (want_loss, want_gradients) = got, want
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - want_gradients[name]).abs().max() / want_gradients[name].abs().max()
        assert error < 1e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_loss_and_gradients_are_those_of_the_cpu(attention, padded):
    model, ids = tiny_qwen3(), token_ids()
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[0, :3] = not padded  # on the left, so that rows see nothing at all
    want = loss_and_gradients(model, ids, attention_mask=mask)
    model.to("npu")
    with counted() as counts:
        got = loss_and_gradients(model, ids, attention_mask=mask.npu())
    assert_close(got, want)
    fused = LAYERS if attention == "sdpa" else 0
    assert counts.launches["npu_fusion_attention_v3"] == fused
    assert counts.launches["npu_fusion_attention_grad_v3"] == fused


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model, ids = tiny_qwen3().npu().train(), token_ids()
    want = loss_and_gradients(model, ids)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with counted() as counts:
        got = loss_and_gradients(model, ids)
    assert_close(got, want)
    assert counts.launches["npu_fusion_attention_v3"] == 2 * LAYERS


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_gives_the_tokens_of_the_cpu(cache):
    model, ids = tiny_qwen3().eval(), token_ids(rows=2)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    want = model.generate(ids, **options)
    got = model.npu().generate(ids.npu(), **options)
    assert got.device.type == "npu"
    assert torch.equal(got.cpu(), want)
    assert got.shape == (2, 13)


def test_sampling_runs_on_the_device():
    model, ids = tiny_qwen3().npu().eval(), token_ids(rows=2).npu()
    assert model.generate(ids, max_new_tokens=4, do_sample=True, top_k=5, pad_token_id=0).shape == (2, 11)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_npu_fused"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_trainer_trains(tmp_path, optimizer, bf16):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        optim=optimizer,
        bf16=bf16,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    assert arguments.device.type == "npu"
    rows = [{"input_ids": row, "labels": row} for row in token_ids(rows=2)]
    trainer = Trainer(model=tiny_qwen3(), args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]


def test_torch_compile_gives_the_same_gradients():
    model, ids = tiny_qwen3().npu(), token_ids()
    want = loss_and_gradients(model, ids)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    with counted() as counts:
        got = loss_and_gradients(model, ids)
    assert_close(got, want)
    assert counts.launches["npu_fusion_attention_v3"] == LAYERS
