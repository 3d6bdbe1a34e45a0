"""What `verify` takes, what it reports, and that nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

import npu_autopatch
from npu_autopatch.settings import SettingsError
from npu_autopatch.verification.result import Verification
from npu_autopatch.verification.source import SourceError, source
from npu_autopatch.verification.verifying import verify

REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class MineConfig(PretrainedConfig):
    model_type = "mine9"

    def __init__(self, vocab_size=50000, hidden_size=2048, num_hidden_layers=24, **rest):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**rest)


class MineRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class MineForCausalLM(PreTrainedModel):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MineRMSNorm(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


def remote_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "modeling_mine9.py").write_text(REMOTE)
    classes = {"AutoConfig": "modeling_mine9.MineConfig", "AutoModelForCausalLM": "modeling_mine9.MineForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mine9", "auto_map": classes}))
    return folder


def big_config() -> Qwen3Config:
    return Qwen3Config(
        num_hidden_layers=36, hidden_size=2560, head_dim=128, num_attention_heads=32, tie_word_embeddings=True,
        attention_bias=True, rms_norm_eps=1e-5, hidden_act="silu",
    )  # fmt: skip


def test_a_config_is_made_small_and_its_settings_are_kept(tmp_path: Path) -> None:
    big_config().save_pretrained(tmp_path)
    for given in (big_config(), str(tmp_path), tmp_path / "config.json"):
        model = source(given).build(torch.float32)
        config = model.config
        assert sum(p.numel() for p in model.parameters()) < 500_000
        kept = (config.tie_word_embeddings, config.attention_bias, config.rms_norm_eps, config.hidden_act)
        assert kept == (True, True, 1e-5, "silu")
        assert model.model.layers[0].self_attn.q_proj.bias is not None


def test_full_keeps_sizes_and_weights(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=90, hidden_size=48, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24,
    )  # fmt: skip
    saved = Qwen3ForCausalLM(config)
    saved.save_pretrained(tmp_path)
    model = source(tmp_path, full=True).build(torch.float32)
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    found = verify(tmp_path, full=True, backend="emulate")
    assert found.passed and found.fused
    assert verify(saved, backend="emulate").fused == found.fused


def test_remote_code_is_run_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = remote_folder(tmp_path / "mine9")
    with pytest.raises(SourceError, match="brings code of its own: give --trust-remote-code"):
        verify(folder)
    found = verify(folder, trust_remote_code=True, backend="emulate")
    assert found.passed, found
    (site,) = found.sites
    assert site.name.endswith("MineRMSNorm") and site.fused > 0
    assert "fp32 decode: the model keeps no cache" in found.not_verified


def test_what_is_no_model_is_told_with_what_to_give(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(SourceError, match=r"that file, or one of the [1-9].* qwen3"):
        source("qwen33")
    for content, words in (
        ("{", "cannot be read"),
        ("[]", "no model type"),
        ('{"model_type": "no_such"}', "'no_such', which the installed"),
        ('{"model_type": "qwen3", "num_hidden_layers": "many"}', "qwen3|no config"),
    ):
        file.write_text(content)
        with pytest.raises(SourceError, match=words):
            source(tmp_path)


def test_it_goes_into_json_and_back_and_fits_80_columns() -> None:
    found = verify("qwen3", backend="emulate")
    content = json.loads(found.to_json())
    assert content["passed"] is True and content["problems"] == []
    assert Verification.of(content) == found
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 80
    for words in (
        "CPU kernels in place of the NPU's",
        "qwen3.Qwen3MLP",
        "separate, under gradients only",
        "fp32 decode",
    ):
        assert words in shown
    (mlp,) = (site for site in found.sites if site.name == "qwen3.Qwen3MLP")
    assert mlp.original and "prefill" in mlp.why_original and "is_grad_enabled" in mlp.why_original


def test_everything_is_as_it_was_afterwards() -> None:
    module = transformers.models.qwen3.modeling_qwen3
    before = (module.Qwen3RMSNorm.forward, module.apply_rotary_pos_emb, torch.get_rng_state())
    verify("qwen3", backend="emulate")
    assert module.Qwen3RMSNorm.forward is before[0] and module.apply_rotary_pos_emb is before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_while_the_package_is_enabled_there_is_nothing_to_compare_with() -> None:
    with npu_autopatch.patched(backend="emulate"), pytest.raises(SettingsError, match="call disable"):
        npu_autopatch.verify("qwen3")


def test_only_the_kernels_asked_for() -> None:
    found = npu_autopatch.verify("qwen3", kernels="rms_norm", skip="qwen3.Qwen3MLP", backend="emulate")
    assert {site.kernel for site in found.sites} == {"rms_norm"} and found.passed


def test_a_compiled_step_is_verified_too() -> None:
    found = npu_autopatch.verify("llama", compile=True, backend="emulate")
    assert found.passed, found
    assert found.modes[-1].name == "fp32 compiled" and found.modes[-1].error is not None


def test_a_model_with_nothing_to_fuse_is_as_it_was() -> None:
    found = verify("gpt2", backend="emulate")
    assert found.passed and not found.fused and "nothing in this model is fused" in str(found)


def test_a_model_that_takes_no_use_cache_is_run() -> None:
    """An encoder; in transformers 4 its forward has neither that argument nor others."""
    found = verify("albert")
    assert not [words for words in found.not_verified if "itself raises" in words]
    assert {"fp32 prefill", "fp32 training"} <= {mode.name for mode in found.modes}


def test_what_the_model_itself_cannot_do_is_not_verified() -> None:
    found = verify("prophetnet", backend="emulate")  # its masks overflow in fp64
    assert not found.modes and not found.passed
    assert "fp32 prefill: in fp64, the model itself gives nan or inf" in found.not_verified
