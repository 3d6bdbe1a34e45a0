"""Blocks of other forms than a decoder of today: where their chains are, and what is said of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import transformers

from npu_autopatch.analysis.analysing import analyze
from npu_autopatch.analysis.result import (
    BY_TORCH_NPU,
    CANDIDATE,
    DECODE,
    FUSED,
    MODES,
    NO_OP,
    PREFILL,
    TRAINING,
    Analysis,
    Chain,
)
from npu_autopatch.verification.small import small_config

SIZES = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", {**SIZES, "intermediate_size": 80, "embedding_size": 32}),
    "bert": ("BertConfig", {**SIZES, "intermediate_size": 80, "is_decoder": False}),
    "cohere": ("CohereConfig", {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "use_qk_norm": True}),
    "gemma2": ("Gemma2Config", {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 32}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "intermediate_size": 80}),
    "gpt2": ("GPT2Config", {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 80}),
    "granite": ("GraniteConfig", {**SIZES, "intermediate_size": 80, "residual_multiplier": 0.5}),
    "mt5": ("MT5Config", {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 80, "num_layers": 2, "num_heads": 4}),
    "nemotron": ("NemotronConfig", {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 16}),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 80, "word_embed_proj_dim": 64}),
    "qwen3": ("Qwen3Config", {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 128}),
    "stablelm": ("StableLmConfig", {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2}),
    "t5": ("T5Config", {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 80, "num_layers": 2, "num_heads": 4}),
}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


@functools.cache
def analysis(family: str) -> Analysis:
    name, settings = CONFIGS[family]
    return analyze(getattr(transformers, name)(**settings), tokens=24)


def chains(family: str, mode: str, name: str) -> list[Chain]:
    (found,) = (it for it in analysis(family).modes if it.name == mode)
    return [chain for part in found.parts for chain in part.chains if chain.name == name]


def told(family: str, mode: str, name: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """Of the chains of that name: block, state, and the ops to try."""
    return {
        (it.block, it.judgement.state, tuple(c.op.removeprefix("npu_") for c in it.judgement.candidates))
        for it in chains(family, mode, name)
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_products_stand_in_chains_that_multiply_and_nothing_is_left_over(family: str) -> None:
    adding = ("embedding", "norm", "residual add", "residual add and norm", "dropout", "other")
    for mode in MODES:
        if mode not in {it.name for it in analysis(family).modes}:
            continue  # encoders decode nothing
        assert not chains(family, mode, "other")
        found = [it for name in adding for it in chains(family, mode, name) if not it.facts.get("projected")]
        assert not [it for it in found if PRODUCTS & set(it.ops_before)]
        assert all(PRODUCTS & set(it.ops_before) for it in chains(family, mode, "MLP"))
        assert all("aten::add" in it.ops_before for it in chains(family, mode, "residual add"))


@pytest.mark.parametrize("mode", [PREFILL, DECODE, TRAINING])
def test_an_addition_that_a_layer_norm_reads_has_one_op_for_both_with_a_gradient(mode: str) -> None:
    layer_norms = {"input_layernorm", "post_attention_layernorm"}
    found = {it.block: it for it in chains("stablelm", mode, "residual add and norm")}
    assert layer_norms < set(found)
    for it in found.values():
        assert it.judgement.state == CANDIDATE
        (candidate,) = it.judgement.candidates
        assert candidate.op == "npu_add_layer_norm" and "autograd.Function" not in candidate.prepare
    assert ("decoder layer has to hand on" in found["input_layernorm"].judgement.candidates[0].prepare) is True
    assert (
        "decoder layer has to hand on" in found["post_attention_layernorm"].judgement.candidates[0].prepare
    ) is False
    assert not chains("stablelm", mode, "norm")


def test_a_norm_beside_the_mlp_reads_no_addition() -> None:
    """In a parallel block the two norms read one sum: with the first of them it is one chain."""
    assert told("gpt_neox", PREFILL, "residual add and norm") == {
        ("input_layernorm", CANDIDATE, ("add_layer_norm",)),
        ("post_attention_layernorm", CANDIDATE, ("add_layer_norm",)),
        ("gpt_neox.final_layer_norm", CANDIDATE, ("add_layer_norm",)),
    }


def test_a_projection_beside_attention_is_its_output_and_its_module_may_add_the_residual() -> None:
    assert told("bert", PREFILL, "output projection") == {("attention.output", BY_TORCH_NPU, ())}
    assert told("bert", TRAINING, "residual add and norm") == {
        ("attention.output.LayerNorm", CANDIDATE, ("add_layer_norm",)),
        ("output.LayerNorm", CANDIDATE, ("add_layer_norm",)),
    }


@pytest.mark.parametrize(
    ("family", "block", "op"),
    [("bert", "", "gelu"), ("opt", "", "relu"), ("gpt_neox", "mlp", "gelu"), ("t5", "layer.1.DenseReluDense", "relu")],
)
def test_a_plain_mlp_is_one_op_in_inference_and_three_kernels_in_training(family: str, block: str, op: str) -> None:
    assert (block, CANDIDATE, ("ffn",)) in told(family, PREFILL, "MLP")
    chain = next(it for it in chains(family, PREFILL, "MLP") if it.block == block)
    assert f"'{op}'" in chain.judgement.candidates[0].experiment
    assert chain.before.launches == 3 and chain.facts["intermediate"] == 80 and chain.facts["gated"] is False
    assert (block, BY_TORCH_NPU, ()) in told(family, TRAINING, "MLP")


def test_gelu_written_out_is_known_with_a_gate_and_without() -> None:
    assert told("gpt2", PREFILL, "MLP") == {("mlp", CANDIDATE, ("gelu", "ffn"))}
    assert told("gpt2", TRAINING, "MLP") == {("mlp", CANDIDATE, ("gelu",))}
    assert ("layer.1.DenseReluDense", CANDIDATE, ("geglu", "gelu_mul")) in told("mt5", PREFILL, "MLP")
    assert "approximate=1" in chains("mt5", PREFILL, "MLP")[0].judgement.candidates[0].prepare


def test_the_parts_of_a_layer_that_stand_in_a_list_are_found() -> None:
    named = {
        (it.block, it.name) for name in ("norm", "residual add and norm", "QKV") for it in chains("t5", PREFILL, name)
    }
    assert {
        ("layer.0.layer_norm", "norm"),
        ("layer.1.layer_norm", "residual add and norm"),
        ("layer.2.layer_norm", "residual add and norm"),
        ("layer.1.EncDecAttention", "QKV"),
    } <= named
    assert len(chains("t5", PREFILL, "embedding")) == 1 and chains("t5", PREFILL, "embedding")[0].before.launches == 2


def test_a_dropout_is_one_launch_and_no_gate() -> None:
    """As torch_npu runs it; its gradient is one more."""
    (projection,) = chains("gpt2", TRAINING, "output projection")
    assert (projection.ops_before["aten::native_dropout"], projection.ops_before["aten::native_dropout_backward"]) == (
        1,
        1,
    )
    assert not chains("gpt2", TRAINING, "output gate")
    assert told("t5", TRAINING, "dropout") == {
        ("encoder.dropout", BY_TORCH_NPU, ()),
        ("decoder.dropout", BY_TORCH_NPU, ()),
    }
    assert not any(
        "dropout" in op for name in ("dropout", "MLP") for it in chains("gpt2", PREFILL, name) for op in it.ops_before
    )


def test_norms_on_q_and_k_rotation_and_cache_are_one_op_where_its_sizes_are_theirs() -> None:
    (rope,) = chains("qwen3", DECODE, "rope")
    assert rope.judgement.state == FUSED and rope.facts["normed"] is True
    assert "npu_qkv_rms_norm_rope_cache" in [it.op for it in rope.judgement.candidates]
    for family, mode in (("qwen3", TRAINING), ("stablelm", DECODE)):
        (rope,) = chains(family, mode, "rope")
        assert "npu_qkv_rms_norm_rope_cache" not in [it.op for it in rope.judgement.candidates]


def test_a_projection_of_the_embedding_belongs_to_it() -> None:
    assert told("albert", PREFILL, "embedding") == {
        ("", BY_TORCH_NPU, ()),
        ("encoder.embedding_hidden_mapping_in", BY_TORCH_NPU, ()),
    }
    (projection,) = (it for it in chains("albert", PREFILL, "embedding") if it.block)
    assert "product" in projection.judgement.reason and projection.before.launches == 1


@pytest.mark.skipif(not hasattr(transformers, "AXK2Config"), reason="this transformers has no norm with such a gate")
def test_a_gate_behind_a_norm_is_an_mlp() -> None:
    found = {
        (chain.block, chain.name): chain.judgement.state
        for part in analyze(small_config("axk2"), tokens=24).modes[0].parts
        for chain in part.chains
    }
    assert found["input_layernorm.norm", "norm"] == FUSED
    assert ("input_layernorm", "MLP") in found and ("input_layernorm", "norm") not in found


def test_logits_that_are_capped_belong_to_the_head_and_cannot_be_left_out() -> None:
    (head,) = chains("gemma2", PREFILL, "output head")
    assert head.before.launches == 4 and "no op caps them" in head.judgement.reason
    assert not chains("gemma2", PREFILL, "loss") and not chains("gemma2", DECODE, "loss")
    assert told("gemma2", TRAINING, "output head") == {("lm_head", BY_TORCH_NPU, ())}
    assert told("gemma2", TRAINING, "loss") == {("", CANDIDATE, ("cross_entropy_loss",))}
    assert "fused_linear_online_max_sum" in str(told("qwen3", TRAINING, "loss"))


def test_a_layer_norm_written_out_is_no_rms_norm() -> None:
    assert told("cohere", PREFILL, "norm") == {
        ("self_attn.q_norm", CANDIDATE, ("layer_norm_eval",)),
        ("self_attn.k_norm", CANDIDATE, ("layer_norm_eval",)),
    }
    for mode in (PREFILL, TRAINING):
        found = chains("cohere", mode, "residual add and norm")
        assert found and {it.judgement.candidates[0].op for it in found} == {"npu_add_layer_norm"}


def test_a_squared_relu_is_none() -> None:
    (chain,) = chains("nemotron", PREFILL, "MLP")
    assert chain.judgement.state == NO_OP and "squared relu" in chain.judgement.reason


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no such gate")
def test_what_an_activation_is_multiplied_with_is_a_gate_wherever_it_comes_from() -> None:
    """The input that each layer has of its own, in Gemma 4."""
    found = [
        chain
        for part in analyze(small_config("gemma4_text"), tokens=24).modes[0].parts
        for chain in part.chains
        if chain.name == "MLP" and not chain.block
    ]
    assert found and {it.op for chain in found for it in chain.judgement.candidates} == {"npu_geglu", "npu_gelu_mul"}


@pytest.mark.skipif(not hasattr(transformers, "GraniteSWAConfig"), reason="this transformers has no such list")
def test_a_list_of_tables_is_no_list_of_layers() -> None:
    found = [chain for part in analyze(small_config("granite_swa"), tokens=24).modes[0].parts for chain in part.chains]
    assert {"masks and positions", "rope"} <= {chain.name for chain in found} and "other" not in {c.name for c in found}


def test_the_gradient_of_a_view_belongs_to_the_call_it_is_taken_in() -> None:
    """The halves of a rotation are views: what their gradients cost goes with the rotation."""
    (rope,), (projections,) = chains("qwen3", TRAINING, "rope"), chains("qwen3", TRAINING, "QKV")
    assert rope.ops_before["aten::slice_backward"] == 8 and "aten::slice_backward" not in projections.ops_before
    assert {"npu::npu_rotary_mul", "npu::npu_rotary_mul_backward"} <= set(rope.ops_after)
    assert "aten::slice_backward" not in rope.ops_after
