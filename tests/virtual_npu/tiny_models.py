"""Tiny models of the families whose norms differ, built from their configs.

Norms are random, so that one left out or a weight dropped shows; sizes are unequal, so that a transposition shows;
weights are small enough for a model to be no chaotic map of its rounding, and every token visits every expert.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 8}),
    "glm4": ("Glm4ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {"hidden_size": 48}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 40, "d_kv": 8, "d_ff": 56, "num_heads": 6, "num_layers": 2, "decoder_start_token_id": 0},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "hidden_size": 40,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 10,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            "hidden_size": 48,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_d_state": 12,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 4,
        },
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 20}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "n_group": 2,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 10,
        },
    ),
}


def tiny(family: str) -> nn.Module:
    """An fp32 model of `family` on the CPU, the same at every call."""
    name, sizes = FAMILIES[family]
    architecture = getattr(transformers, name)
    config = architecture.config_class(**{**_SIZES, **sizes}, experts_implementation="batched_mm")
    torch.manual_seed(0)
    model = architecture(config).eval()
    with torch.no_grad():
        for module in rms_norms(model):
            offset = 1.0 if "Gemma" in type(module).__name__ or type(module).__name__ == "Qwen3NextRMSNorm" else 0.0
            module.weight.uniform_(0.5 - offset, 1.5 - offset)
    return model


def rms_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if "RMSNorm" in type(m).__name__ or type(m).__name__ == "T5LayerNorm"]


def inputs(family: str) -> dict[str, Tensor]:
    """Token ids and labels, one row padded."""
    ids = torch.randint(1, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if family != "mamba2":
        mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :5].contiguous() if family == "t5" else ids}


def run(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and the gradients of all parameters in one vector, in fp64 on the CPU."""
    model.zero_grad()
    out = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}, use_cache=False)
    out.loss.backward()
    gradients = [p.grad.flatten().cpu().double() for p in model.parameters() if p.grad is not None]
    return out.logits.detach().cpu().double(), torch.cat(gradients)
