"""The model types with experts, small: what their default configs lack, and variants of how they route."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from npu_autopatch.verification import small, small_sizes

V5 = int(transformers.__version__.partition(".")[0]) >= 5
OLD = transformers.__version__.startswith(("4.", "5.0."))
_EXPERTS = {"moe_intermediate_size": 40}
_GEMMA = {**_EXPERTS, "enable_moe_block": True, "num_experts": small_sizes.EXPERTS, "top_k_experts": small_sizes.TOP_K}


def _sections(*parts: int, **more: Any) -> dict[str, Any]:
    rotary = {"rope_type": "default", "mrope_section": list(parts), **more}
    return {"rope_parameters": {**rotary, "rope_theta": 10000.0}} if V5 else {"rope_scaling": rotary}


@dataclass(frozen=True)
class Family:
    """A model type, and what is changed in its config."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)


_PLAIN = [
    "afmoe",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "glm4_moe",
    "glm4_moe_lite",
    "glm5_next_text",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hy_v3",
    "hy_v4",
    "hy_v4_vl_text",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mistral4",
    "mistral_large4_text",
    "mixtral",
    "muse_spark_text",
    "nemotron_h",
    "nllb-moe",
    "olmoe",
    "openai_privacy_filter",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe_text",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
    "switch_transformers",
    "unlimited_ocr_text",
    "zaya",
]
_CHANGED: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 88, "moe_num_experts": small_sizes.EXPERTS, "moe_top_k": small_sizes.TOP_K}
        | ({"hidden_size": small_sizes.HIDDEN} if V5 else {}),
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": _GEMMA,
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": small_sizes.TOP_K},
    "dots1": {
        "n_routed_experts": small_sizes.EXPERTS,
        "num_experts_per_tok": small_sizes.TOP_K,
        "n_shared_experts": 1,
        "n_group": small_sizes.GROUPS,
        "topk_group": small_sizes.TOP_GROUPS,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {"head_dim": 40},
    "ernie4_5_vl_moe_text": _sections(3, 3, 2),
    "gemma4_text": _GEMMA,
    "glm4v_moe_text": _sections(2, 1, 1, partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] if OLD else ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": small_sizes.HEAD, "num_experts": small_sizes.EXPERTS, "moe_topk": small_sizes.TOP_K},
    "jetmoe": {"pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen3_vl_moe_text": _sections(6, 5, 5) | {"pad_token_id": 0},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": small_sizes.HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": small_sizes.WINDOW},
}
_GROUPED = {"topk_method": "group_limited_greedy", "n_group": small_sizes.GROUPS, "topk_group": small_sizes.TOP_GROUPS}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2, groups": ("deepseek_v2", _GROUPED),
    "mixtral, jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "qwen2_moe, renormalised": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_moe, renormalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, one expert a token": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "mixtral, every expert": ("mixtral", {"num_experts_per_tok": small_sizes.EXPERTS}),
    "mixtral, gelu": ("mixtral", {"hidden_act": "gelu"}),
    # by default this one asks for its own loop, which stays as it is
    "openai_privacy_filter, grouped": ("openai_privacy_filter", {"experts_implementation": "grouped_mm"}),
}
FAMILIES: dict[str, Family] = {
    **{name: Family(name) for name in _PLAIN},
    **{name: Family(name, changes) for name, changes in _CHANGED.items()},
    **{name: Family(*variant) for name, variant in _VARIANTS.items()},
}
# what transformers itself cannot run, and why
_BROKEN = {
    ("dbrx", "5.0.0"): "its router takes rows as wide as its experts",
    ("deepseek_v2, groups", "5.0.0"): "its router reads an attribute that it lacks",
    ("doge", "4.57.6"): "its attention with dropout gives a tuple",
    ("doge", "5.0.0"): "its attention with dropout gives a tuple",
}
_NO_ROUTER_LOGITS = {
    ("jetmoe", "4.57.6"): "the loss reads an attribute that the model lacks",
    ("nllb-moe", "4.57.6"): "they are looked for where the output has none",
    ("flex_olmo", "5.0.0"): "none are recorded",
    ("granitemoe", "5.0.0"): "none are recorded",
    ("granitemoehybrid", "5.0.0"): "none are recorded",
    ("granitemoeshared", "5.0.0"): "none are recorded",
    ("jetmoe", "5.0.0"): "the loss reads an attribute that the model lacks",
    ("qwen3_next", "5.0.0"): "those of a dense layer are recorded, too",
}
PRESENT = [
    name
    for name, family in sorted(FAMILIES.items())
    if family.model_type in CONFIG_MAPPING and (name, transformers.__version__) not in _BROKEN
]


def tiny(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of a family in eval mode, the same at every call."""
    return small.small_model(FAMILIES[name].model_type, dtype, **{**FAMILIES[name].changes, **changes})


def inputs(model: Any, rows: int = 2, tokens: int = 11, seed: int = 3) -> dict[str, Any]:
    """What a model takes, of `rows` rows."""
    ids = torch.randint(4, 80, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if isinstance(codec := getattr(model, "codec_embedding", None), torch.nn.Embedding):  # it reads what others embed
        batch |= {"inputs_embeds": codec(batch.pop("input_ids")).detach()}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids[:, :5].contiguous()
    return batch


def with_labels(name: str, model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` with labels where the model has a loss, and a wish for its auxiliary part where it has one."""
    if not type(model).__name__.endswith(("ForCausalLM", "ForConditionalGeneration")):
        return batch
    batch = {**batch, "labels": batch["decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"]}
    balanced = any(hasattr(model.config, option) for option in ("router_aux_loss_coef", "aux_loss_coef"))
    if balanced and (name, transformers.__version__) not in _NO_ROUTER_LOGITS:
        batch["output_router_logits"] = True
    return batch
