"""Tiny models, a count of the fused calls, and real interpreters. torch is imported where it is used only."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"},
    "GPT2": {"n_embd": 42, "n_layer": 2, "n_head": 6},
}


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """Build a model of a family, the same each time: weights of std 0.3, norm weights random, sizes unequal."""
    import torch
    import transformers

    def build(family: str, **changes: Any) -> Any:
        config = getattr(transformers, f"{family}Config")(**{**_SIZES, **FAMILIES[family], **changes})
        with torch.random.fork_rng(devices=[]):
            model = getattr(transformers, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(config)
        return randomised(model)

    return build


def randomised(model: Any) -> Any:
    """`model` with weights drawn at std 0.3, and norm weights around what its norm has at the start."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model.eval()


@pytest.fixture
def norms() -> dict[str, int]:
    """The rms norm calls in one forward of a tiny model."""
    return {"Llama": 5, "Qwen3": 9, "Gemma2": 9, "GPT2": 0}


@pytest.fixture
def tokens() -> Any:
    """Two rows of seven token ids."""
    import torch

    return torch.randint(2, 97, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def fused_calls() -> Callable[[], Any]:
    """``with fused_calls() as count:`` counts the npu:: op calls in the block, backward included, by name."""
    from tests.counting import Fused

    @contextmanager
    def counting() -> Iterator[Any]:
        with Fused() as mode:
            yield mode.calls

    return counting


@pytest.fixture
def import_anew() -> Iterator[Callable[[str], Any]]:
    """Import the modeling module of a family as if for the first time; what was there before comes back."""
    import importlib

    earlier: dict[str, Any] = {}

    def import_(family: str) -> Any:
        name = f"transformers.models.{family}.modeling_{family}"
        present = sys.modules.pop(name, None)
        earlier.setdefault(name, present)
        return importlib.import_module(name)

    yield import_
    for name, module in earlier.items():
        package, _, attribute = name.rpartition(".")
        if module is not None:
            sys.modules[name] = module
            setattr(sys.modules[package], attribute, module)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in an interpreter of its own; keyword arguments are environment variables."""

    def run(code: str, started: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        """`started`: with what the wheel installs for start-up in place."""
        hook = PROJECT / "sitecustomize_hook"
        path = [hook / "chain", hook, PROJECT, tmp_path] if started else [PROJECT, tmp_path]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NPU_AUTOPATCH", "HF_"))}
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
        }
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**kept, **settings, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
        )

    return run
