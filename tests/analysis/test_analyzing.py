"""What `analyze` takes, what it says where something cannot be run, and that it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama import modeling_llama

import npu_autopatch
from npu_autopatch.analysis.analysing import analyze
from npu_autopatch.analysis.modes import OUTSIDE
from npu_autopatch.analysis.result import FUSED, PREFILL, TRAINING
from npu_autopatch.settings import SettingsError
from npu_autopatch.verification.source import SourceError
from tests.verification.test_verifying import remote_folder

TINY = LlamaConfig(
    vocab_size=90, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=24, max_position_embeddings=64,
)  # fmt: skip


def test_a_model_a_config_and_a_folder_are_the_same(tmp_path: Path) -> None:
    model = modeling_llama.LlamaForCausalLM(TINY)
    TINY.save_pretrained(tmp_path)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = [analyze(given, tokens=8) for given in (TINY, tmp_path, tmp_path / "config.json", model)]
    assert found[0].modes == found[1].modes == found[2].modes == found[3].modes
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    layer, outside = found[0].modes[0].parts
    assert (layer.count, layer.name, outside.name) == (3, "model.layers 0-2", OUTSIDE)
    assert any(chain.judgement.state == FUSED and chain.sites for chain in layer.chains)


def test_remote_code_is_analysed_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = remote_folder(tmp_path / "mine")
    with pytest.raises(SourceError, match="--trust-remote-code"):
        analyze(folder)
    found = analyze(folder, trust_remote_code=True, tokens=8)
    assert [mode.name for mode in found.modes] == [PREFILL, TRAINING]
    assert "decode was not run: the model keeps no cache" in found.notes
    norm = next(c for part in found.modes[0].parts for c in part.chains if any("Norm" in site for site in c.sites))
    assert norm.judgement.state == FUSED and norm.after.launches < norm.before.launches


def test_more_tokens_than_positions_are_not_run() -> None:
    found = analyze(TINY, tokens=500)
    assert found.modes[0].input == "1 x 63 tokens"
    assert any("63 tokens were run, not 500" in note for note in found.notes)


def test_code_that_asks_for_values_is_run_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward

    def asking(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        return forward(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", asking)
    found = analyze(TINY, tokens=8)
    assert found.counted.startswith("made small, 2 x 11 tokens, for its code asks for values")
    assert [mode.input.startswith("2 x") for mode in found.modes] == [True] * 3


def test_nothing_stays_behind() -> None:
    before = [dict(vars(cls)) for cls in (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, torch.nn.Module)]
    state = torch.random.get_rng_state()
    analyze(TINY, tokens=8)
    after = [dict(vars(cls)) for cls in (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, torch.nn.Module)]
    assert before == after
    assert torch.equal(state, torch.random.get_rng_state())
    assert not npu_autopatch.report().settings["active"]


def test_what_cannot_be_analysed_is_said() -> None:
    with pytest.raises(SettingsError, match="1 or more"):
        analyze(TINY, tokens=0)
    with npu_autopatch.patched(backend="emulate"), pytest.raises(SettingsError, match="disable"):
        analyze(TINY)
    with pytest.raises(SourceError, match="pixel_values"):
        analyze(AutoConfig.for_model("vit"))
