"""Trains a small Qwen3 on the bytes of a text with the Hugging Face Trainer. It knows nothing of npu_autopatch.

Usage: train.py TEXT FOLDER STEPS SEED {device|cpu}. Writes a JSON line for each step, and one that counts the fused
ops of the second step (the first if there is one only), as torch's own profiler saw them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

LENGTH = 128  # bytes in an example

text, folder, steps, seed, where = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
content = torch.tensor(list(text.read_bytes()))
pieces = [content[start : start + LENGTH] for start in range(0, len(content) - LENGTH, LENGTH)]
examples = [{"input_ids": piece, "labels": piece} for piece in pieces]


class Watch(TrainerCallback):
    """Profiles one step."""

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == min(1, steps - 1):
            self.profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == min(2, steps):
            self.profiler.stop()
            ops = {event.key: event.count for event in self.profiler.key_averages() if event.key.startswith("npu::")}
            print(json.dumps({"ops": ops}))


def tell(model: Any, inputs: Any, output: Any) -> None:
    """The loss as it is; the Trainer logs it rounded."""
    print(json.dumps({"loss": output.loss.item()}), flush=True)


set_seed(seed)
config = Qwen3Config(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=LENGTH,
)
model = Qwen3ForCausalLM(config)
model.register_forward_hook(tell)
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=steps,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=10,
    seed=seed,
    report_to="none",
    logging_strategy="no",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=where == "cpu",
)
Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Watch()]).train()
