"""Training as users do it, on the NPU with `rms_norm` patched."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import npu_autopatch

from .accounting import counted
from .tiny_models import inputs, rms_norms, run, tiny

STEPS = 3


def losses(model, directory, **settings):
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **settings,
    )
    rows = [{"input_ids": row, "labels": row} for row in inputs("qwen3")["input_ids"]]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        ({"optim": "adamw_torch"}, 1),
        ({"optim": "adamw_torch_npu_fused"}, 1),
        ({"gradient_accumulation_steps": 2}, 2),
        ({"bf16": True}, 1),
    ],
    ids=str,
)
def test_the_trainer_reaches_the_same_losses_in_fewer_launches(tmp_path, settings, forwards):
    with counted() as before:
        want = losses(tiny("qwen3"), tmp_path, **settings)
    with npu_autopatch.patched(kernels="rms_norm", backend="npu"), counted() as inside:
        model = tiny("qwen3")
        got = losses(model, tmp_path, **settings)
    norms = len(rms_norms(model))
    assert inside.launches["npu_rms_norm"] == inside.launches["npu_rms_norm_backward"] == STEPS * norms * forwards
    assert inside.launches.total() < before.launches.total()
    assert len(want) == STEPS
    assert want[-1] < want[0]
    assert got == pytest.approx(want, rel=torch.finfo(torch.bfloat16).eps if "bf16" in settings else 1e-5)


def test_adapters_train_through_frozen_norms():
    torch.manual_seed(0)
    model = get_peft_model(
        tiny("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    model.npu()
    want = run(model, inputs("qwen3"))
    with npu_autopatch.patched(kernels="rms_norm", backend="npu"), counted() as counts:
        got = run(model, inputs("qwen3"))
    assert counts.launches["npu_rms_norm"] == len(rms_norms(model))
    assert counts.launches["npu_rms_norm_backward"] > 0
    for a, b in zip(got, want, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-5
