"""What is said of seven published models, chain by chain, is what a careful reader of the contracts would say."""

from __future__ import annotations

from typing import Any

import pytest

from npu_autopatch.analysis.judgements import judged
from npu_autopatch.analysis.result import (
    BY_TORCH_NPU,
    CANDIDATE,
    DECODE,
    FUSED,
    MODES,
    NO_OP,
    NOT_POSSIBLE,
    PREFILL,
    TRAINING,
)

from .test_judgements import ONE, PAST, ops, sdpa

MOE = {"experts": 128, "top_k": 8, "rows": 4096, "intermediate": 768, "width": 2048, "activation": "silu", **PAST}
MLA = {"latent": True, "kv_rank": 512, "rope_dim": 64}
LLAMA = sdpa(128)
QWEN3_NEXT = sdpa(256, heads=16, kv_heads=2)
DELTA = {"heads": 32, "key_dim": 128, "value_dim": 128, "gated_delta": True}
V32 = {**sdpa(192, heads=128, kv_heads=128, mask="bool", sparse=True, index_topk=2048), "v_dim": 128, **MLA}
V4 = sdpa(512, implementation="eager", heads=64, kv_heads=1, mask="float", sinks=True, window=128, keys=320)
GLM = sdpa(128, heads=96)
OSS = sdpa(64, implementation="eager", heads=64, mask="float", sinks=True, window=128)
STEP = {**ONE, "queries": 1, "keys": 257}
ADDED = ["add_rms_norm", "add_rms_norm_v2"]
WRITTEN = ["fused_infer_attention_score_v2", "scatter_pa_kv_cache"]
FURTHER_ROPE = ["apply_rotary_pos_emb", "mrope"]
NORMED = {"head_dim": 128, "rotated": 128, "normed": True}

# What a careful reader of the contracts says of each model: its chain, mode and facts, how many calls ran fused, the
# state, and the ops to try.
READ: dict[str, list[tuple[str, str, dict[str, Any], int, str, list[str]]]] = {
    "Llama-3-8B": [
        ("embedding", PREFILL, PAST, 0, BY_TORCH_NPU, []),
        ("masks and positions", PREFILL, PAST, 0, NO_OP, []),
        ("norm", PREFILL, {"width": 4096, "variants": ["round_then_mul"]}, 1, FUSED, []),
        ("residual add and norm", PREFILL, {"width": 4096, "norm_fused": True}, 1, FUSED, ADDED),
        ("residual add and norm", TRAINING, {"width": 4096, "norm_fused": True}, 1, FUSED, ADDED[:1]),
        ("QKV", PREFILL, {"projections": 3, "widths": [4096, 1024, 1024]}, 0, CANDIDATE, ["grouped_matmul"]),
        ("rope", PREFILL, {"head_dim": 128, "rotated": 128}, 2, FUSED, FURTHER_ROPE),
        ("cache write", DECODE, {"layout": "BNSD"}, 0, CANDIDATE, WRITTEN),
        ("attention core", PREFILL, LLAMA, 0, BY_TORCH_NPU, []),
        ("attention core", TRAINING, LLAMA, 0, BY_TORCH_NPU, []),
        ("attention core", DECODE, {**LLAMA, **STEP}, 0, BY_TORCH_NPU, ["fused_infer_attention_score_v2"]),
        ("output projection", PREFILL, PAST, 0, BY_TORCH_NPU, []),
        ("MLP", TRAINING, {"intermediate": 14336, "activation": "silu"}, 1, FUSED, ["swiglu"]),
        ("output head", DECODE, {"vocabulary": 128256, "width": 4096}, 0, BY_TORCH_NPU, []),
        (
            "loss",
            TRAINING,
            {"vocabulary": 128256, "rows": 510, "fp32": True},
            0,
            CANDIDATE,
            ["cross_entropy_loss", "fused_linear_online_max_sum"],
        ),
    ],
    "Qwen3-30B-A3B": [
        ("rope", DECODE, NORMED, 2, FUSED, [*FURTHER_ROPE, "qkv_rms_norm_rope_cache"]),
        ("rope", TRAINING, NORMED, 2, FUSED, FURTHER_ROPE),
        (
            "router",
            PREFILL,
            {**MOE, "score": "softmax", "renormalised": True},
            0,
            CANDIDATE,
            ["moe_gating_top_k_softmax_v2"],
        ),
        ("dispatch", PREFILL, MOE, 1, FUSED, ["moe_init_routing_v2"]),
        ("experts", PREFILL, MOE, 3, FUSED, []),
        ("experts", TRAINING, MOE, 3, FUSED, ["grouped_matmul_add_"]),
        ("combine", PREFILL, MOE, 1, FUSED, ["moe_finalize_routing"]),
    ],
    "Qwen3-Next-80B-A3B": [
        ("norm", PREFILL, {"width": 2048, "variants": ["one_plus"]}, 1, FUSED, ["gemma_rms_norm"]),
        ("residual add and norm", TRAINING, {"offset": True, "norm_fused": True}, 1, FUSED, ADDED[:1]),
        ("rope", PREFILL, {"head_dim": 256, "rotated": 64, "partial": True}, 2, FUSED, FURTHER_ROPE),
        ("attention core", PREFILL, QWEN3_NEXT, 0, BY_TORCH_NPU, []),
        ("output gate", PREFILL, PAST, 0, NO_OP, []),
        ("linear attention", PREFILL, DELTA, 0, CANDIDATE, ["chunk_gated_delta_rule"]),
        ("linear attention", TRAINING, DELTA, 0, CANDIDATE, ["chunk_gated_delta_rule"]),
        ("linear attention", DECODE, DELTA, 0, CANDIDATE, ["recurrent_gated_delta_rule"]),
        *(("causal convolution", mode, {"width": 4, "channels": 8192}, 0, NOT_POSSIBLE, []) for mode in MODES),
        ("shared expert gate", PREFILL, PAST, 0, CANDIDATE, ["moe_token_unpermute"]),
    ],
    "DeepSeek-V3.2": [
        ("QKV", DECODE, {"projections": 4, **MLA}, 0, CANDIDATE, ["mla_prolog_v3", "grouped_matmul"]),
        ("QKV", TRAINING, {"projections": 4, **MLA}, 0, CANDIDATE, ["grouped_matmul"]),
        ("rope", PREFILL, {"head_dim": 64, "rotated": 64, "interleaved": True}, 2, FUSED, ["interleave_rope", "mrope"]),
        ("cache write", DECODE, MLA, 0, CANDIDATE, ["kv_rmsnorm_rope_cache_v2", "scatter_pa_kv_cache"]),
        ("indexer", PREFILL, {"heads": 64, "head_dim": 128, "top_k": 2048}, 0, CANDIDATE, ["lightning_indexer"]),
        (
            "indexer",
            TRAINING,
            {"heads": 64, "head_dim": 128, "top_k": 2048},
            0,
            CANDIDATE,
            ["lightning_indexer", "sparse_lightning_indexer_grad_kl_loss"],
        ),
        ("attention core", TRAINING, V32, 0, BY_TORCH_NPU, ["sparse_flash_attention", "fusion_attention_v2"]),
        (
            "attention core",
            DECODE,
            {**V32, **STEP},
            0,
            BY_TORCH_NPU,
            ["sparse_flash_attention", "fused_infer_attention_score_v2"],
        ),
        (
            "router",
            TRAINING,
            {"experts": 256, "top_k": 8, "score": "sigmoid", "groups": 8, "renormalised": True},
            0,
            CANDIDATE,
            ["moe_gating_top_k"],
        ),
    ],
    "DeepSeek-V4": [
        *(
            (
                "hyper-connections",
                mode,
                {"streams": 4, "width": 4096, **PAST},
                0,
                CANDIDATE,
                ["mhc_pre", "mhc_sinkhorn", "mhc_post"],
            )
            for mode in MODES
        ),
        ("compressor", PREFILL, PAST, 0, NO_OP, []),
        ("indexer", DECODE, {"heads": 64, "head_dim": 128, "top_k": 512}, 0, CANDIDATE, ["lightning_indexer"]),
        (
            "attention core",
            TRAINING,
            {**V4, "sparse": True, "index_topk": 512},
            0,
            CANDIDATE,
            ["fusion_attention", "sparse_flash_attention"],
        ),
        ("attention core", PREFILL, V4, 0, CANDIDATE, ["fusion_attention"]),
        (
            "attention core",
            DECODE,
            {**V4, **STEP},
            0,
            CANDIDATE,
            ["fusion_attention", "fused_infer_attention_score_v2"],
        ),
        ("output projection", PREFILL, {"groups": 8, **PAST}, 0, CANDIDATE, ["transpose_batchmatmul"]),
        ("router", PREFILL, {"experts": 256, "top_k": 6, "score": "sqrtsoftplus", "renormalised": True}, 0, NO_OP, []),
        ("experts", TRAINING, {**MOE, "limit": 10.0}, 0, CANDIDATE, ["grouped_matmul", "clipped_swiglu"]),
        ("MLP", PREFILL, {"intermediate": 2048, "activation": "silu", "limit": 10.0}, 0, CANDIDATE, ["clipped_swiglu"]),
    ],
    "GLM-4.5": [
        ("QKV", PREFILL, {"projections": 3, "widths": [12288, 1024, 1024]}, 0, CANDIDATE, ["grouped_matmul"]),
        ("rope", PREFILL, {"head_dim": 128, "rotated": 64, "partial": True}, 2, FUSED, FURTHER_ROPE),
        ("attention core", TRAINING, GLM, 0, BY_TORCH_NPU, []),
        ("attention core", TRAINING, {**GLM, "mask": "bool"}, 0, BY_TORCH_NPU, ["fusion_attention"]),
        (
            "router",
            PREFILL,
            {"experts": 160, "top_k": 8, "score": "sigmoid", "groups": 1, "renormalised": True},
            0,
            CANDIDATE,
            ["moe_gating_top_k"],
        ),
    ],
    "GPT-OSS-120B": [
        ("attention core", TRAINING, OSS, 0, CANDIDATE, ["fusion_attention"]),
        (
            "attention core",
            DECODE,
            {**OSS, **STEP},
            0,
            CANDIDATE,
            ["fusion_attention", "fused_infer_attention_score_v2"],
        ),
        (
            "router",
            DECODE,
            {"experts": 128, "top_k": 4, "score": "softmax", "renormalised": True},
            0,
            CANDIDATE,
            ["moe_gating_top_k_softmax_v2"],
        ),
        ("experts", PREFILL, {**MOE, "interleaved": True}, 2, FUSED, ["clipped_swiglu"]),
        ("experts", PREFILL, {**MOE, "interleaved": True}, 0, CANDIDATE, ["grouped_matmul", "clipped_swiglu"]),
    ],
}


@pytest.mark.parametrize(
    ("chain", "mode", "facts", "fused", "state", "tried"),
    [pytest.param(*row, id=f"{model}-{row[0]}-{row[1]}") for model, rows in READ.items() for row in rows],
)
def test_the_models_get_what_a_reader_of_the_contracts_would_say(
    chain: str, mode: str, facts: dict[str, Any], fused: int, state: str, tried: list[str]
) -> None:
    judgement = judged(chain, mode, {**ONE, **facts} if mode == DECODE else {**PAST, **facts}, fused, 0, "")
    assert (judgement.state, ops(judgement)) == (state, tried)


def test_sinks_and_windows_are_told_where_they_go() -> None:
    (fusion,) = judged("attention core", TRAINING, OSS, 0, 0, "").candidates
    assert "sink, fp32 [heads]: from train 2026-01 on" in fusion.prepare and "pre_tockens=127" in fusion.prepare
    sparse = judged("attention core", TRAINING, {**V4, "sparse": True, "index_topk": 512}, 0, 0, "").candidates[1]
    assert "not taken on Atlas A2 and A3" in sparse.check and "128 keys of the window" in sparse.prepare


def test_sparse_attention_says_when_it_can_win() -> None:
    sparse = judged("attention core", TRAINING, V32, 0, 0, "").candidates[0]
    assert "more keys than the 2048 chosen (here 256 keys)" in sparse.check
    assert "return_softmax_lse=True" in sparse.prepare
