"""Tiny models of many families, from their configs: weights of std 0.3, random norms, every size another.

What each runs in one pass is worked out here from its config: norms, rotations and gated products, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.conftest import randomised

V5 = int(transformers.__version__.partition(".")[0]) >= 5
LAYERS, EXPERTS = 2, 4
VOCABULARY = 97
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 42,
    "intermediate_size": 58,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "experts_implementation": "batched_mm",  # grouped_mm takes sizes that are multiples of 8 only
}
_EVEN = {"hidden_size": 96}  # where a head is hidden_size / num_attention_heads wide


@dataclass(frozen=True)
class Family:
    """An architecture, what its config has besides the usual sizes, and the fused calls of one pass.

    `rotations` are of one tensor each. `gated` are products of an MLP. `experts` are the layers that have them, written
    in one of the `_FORMS`. `gelu`: they are of gelu. `batch` names the inputs it takes. `scale` is what weights
    of std 0.3 are multiplied by.
    """

    architecture: str
    sizes: dict[str, Any] = field(default_factory=dict)
    norms: int = 0
    rotations: int = 2 * LAYERS
    gated: int = LAYERS
    experts: int = 0
    form: str = "modules or stacked"
    gelu: bool = False
    batch: str = "text"
    scale: float = 1.0

    @property
    def calls(self) -> dict[str, int]:
        """The fused calls of a forward with a gradient, and as many of the backward."""
        form = _FORMS[self.form]
        gated = self.gated + form.get("gated", 0) * self.experts
        found = {"npu_rms_norm": self.norms, "npu_rotary_mul": self.rotations}
        found["npu_geglu" if self.gelu else "npu_swiglu"] = gated
        found |= {_BACKWARD[name]: count for name, count in found.items()}
        found["npu_grouped_matmul"] = form.get("products", 0) * self.experts  # of forward and backward
        for op in ("npu_moe_token_permute", "npu_moe_token_unpermute"):
            found[op] = found[f"{op}_grad"] = form.get("permuted", 0) * self.experts
        return {name: count for name, count in found.items() if count}

    @property
    def exists(self) -> bool:
        return hasattr(transformers, self.architecture)


# what one layer of experts runs: a product has as many again for the gradients of its input and its weights
_FORMS: dict[str, dict[str, int]] = {
    "modules or stacked": {"products": 6 if V5 else 9, "permuted": 1, "gated": 1},
    "biased": {"products": 8, "permuted": 1},  # and for those of both biases; its gate is none of the op's
    "batched": {"gated": 1},  # one torch.bmm for all tokens and experts
    "linears": {"products": 6},  # sorted by the model itself
}
_LINEARS = "linears" if transformers.__version__.startswith(("4.", "5.0.")) else "modules or stacked"
_BACKWARD = {
    "npu_rms_norm": "npu_rms_norm_backward",
    "npu_rotary_mul": "npu_rotary_mul_backward",
    "npu_swiglu": "npu_swiglu_backward",
    "npu_geglu": "npu_geglu_grad",
}
_BLOCK = 2 * LAYERS + 1  # norms of the usual decoder: two a layer and the last
_EACH_HEAD = 2 * LAYERS  # norms of queries and keys
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 22}
_LOCAL = {"num_experts_per_tok": 2, "num_local_experts": EXPERTS}
_DENSE_FIRST = {**_MOE, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 2}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_LATENT = {
    **_DENSE_FIRST,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_T5 = {
    "d_model": 42,
    "d_kv": 10,
    "d_ff": 58,
    "num_layers": LAYERS,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 24,
    "mamba_d_state": 12,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_VISION = {
    "depth": LAYERS,
    "num_heads": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TEXT = {**_SIZES, "hidden_size": 96}
_SECTIONS = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]}


def _images(rotary: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    tokens |= {"image_start_token_id": 92, "image_end_token_id": 93}
    name = "rope_parameters" if V5 else "rope_scaling"
    rotary = {**rotary, "rope_theta": 10000.0} if V5 else rotary
    return {"text_config": {**_TEXT, **text, name: rotary}, "vision_config": {**_VISION, **vision}, **tokens}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", norms=_BLOCK),
    "qwen2": Family("Qwen2ForCausalLM", _EVEN, norms=_BLOCK),
    "qwen3": Family("Qwen3ForCausalLM", norms=_BLOCK + _EACH_HEAD),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**_EVEN, **_MOE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 26},
        norms=_BLOCK,
        experts=LAYERS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_MOE, "num_experts": EXPERTS},
        norms=_BLOCK + _EACH_HEAD,
        gated=0,
        experts=LAYERS,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {**_LINEAR, **_MOE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 26},
        norms=_BLOCK + 1 + 2,  # the gated norm of the linear layer, queries and keys of the other
        rotations=2,
        experts=LAYERS,
    ),
    "mistral": Family("MistralForCausalLM", norms=_BLOCK),
    "mixtral": Family("MixtralForCausalLM", _LOCAL, norms=_BLOCK, gated=0, experts=LAYERS),
    "ministral": Family("MinistralForCausalLM", norms=_BLOCK),
    "gemma": Family("GemmaForCausalLM", norms=_BLOCK, gelu=True),
    "gemma2": Family("Gemma2ForCausalLM", {"query_pre_attn_scalar": 8}, norms=_BLOCK + 2 * LAYERS, gelu=True),
    "gemma3": Family("Gemma3ForCausalLM", _MIXED, norms=_BLOCK + 2 * LAYERS + _EACH_HEAD, gelu=True),
    "glm": Family("GlmForCausalLM", norms=_BLOCK),
    "glm4": Family("Glm4ForCausalLM", norms=_BLOCK + 2 * LAYERS),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {**_DENSE_FIRST, "use_qk_norm": True},
        norms=_BLOCK + _EACH_HEAD,
        experts=1,
    ),
    "cohere": Family("CohereForCausalLM", _EVEN),
    "cohere2": Family("Cohere2ForCausalLM", _MIXED, rotations=2),  # full attention knows no position
    "phi": Family("PhiForCausalLM", _EVEN, gated=0),
    "phi3": Family("Phi3ForCausalLM", _EVEN, norms=_BLOCK),
    "phimoe": Family(
        "PhimoeForCausalLM",
        {**_EVEN, **_LOCAL, "num_local_experts": 2},  # its router takes two, always
        norms=2 * LAYERS if transformers.__version__ == "5.0.0" else 0,  # layer norms in the releases around it
        gated=0,
        experts=LAYERS,
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _LATENT, norms=_BLOCK + 2 * LAYERS, experts=1),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _LATENT, norms=_BLOCK + 2 * LAYERS, experts=1),
    "ernie4_5": Family("Ernie4_5ForCausalLM", norms=_BLOCK),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_intermediate_size": 22,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
        },
        norms=_BLOCK,
        experts=1,
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", _EVEN, gated=0),
    "gptj": Family("GPTJForCausalLM", {**_EVEN, "rotary_dim": 8}, gated=0),
    "codegen": Family("CodeGenForCausalLM", {**_EVEN, "num_attention_heads": 4, "rotary_dim": 8}, gated=0),
    "gpt_oss": Family("GptOssForCausalLM", {**_LOCAL, **_MIXED}, norms=_BLOCK, gated=0, experts=LAYERS, form="biased"),
    "olmo": Family("OlmoForCausalLM", _EVEN),
    "olmo2": Family("Olmo2ForCausalLM", _EVEN, norms=_BLOCK + _EACH_HEAD),
    "olmo3": Family("Olmo3ForCausalLM", {**_EVEN, **_MIXED}, norms=_BLOCK + _EACH_HEAD),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {**_EVEN, **_MOE, "num_experts": EXPERTS},
        norms=_BLOCK + _EACH_HEAD,
        gated=0,
        experts=LAYERS,
    ),
    "granite": Family("GraniteForCausalLM", {**_EVEN, "attention_multiplier": 0.25}, norms=_BLOCK),
    "helium": Family("HeliumForCausalLM", _EVEN, norms=_BLOCK),
    "starcoder2": Family("Starcoder2ForCausalLM", _EVEN, gated=0),
    "stablelm": Family("StableLmForCausalLM", {**_EVEN, "partial_rotary_factor": 0.25}),
    "nemotron": Family("NemotronForCausalLM", {**_EVEN, "partial_rotary_factor": 0.5}, gated=0),
    "persimmon": Family("PersimmonForCausalLM", {**_EVEN, "partial_rotary_factor": 0.5}, gated=0),
    "smollm3": Family("SmolLM3ForCausalLM", {**_EVEN, "no_rope_layers": [1, 0]}, norms=_BLOCK, rotations=2),
    "seed_oss": Family("SeedOssForCausalLM", norms=_BLOCK),
    "exaone4": Family("Exaone4ForCausalLM", {**_EVEN, **_MIXED}, norms=_BLOCK + _EACH_HEAD, rotations=2),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 62, "no_rope_layers": [1, 0], "moe_layers": [1]},
        norms=_BLOCK + 2,
        rotations=2,
        experts=1,
        form="batched",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-silu"},
        norms=_BLOCK + 3 * LAYERS + 1,
        rotations=0,
        gated=2 * LAYERS,
        batch="text to text",
        scale=0.3,  # products of queries and keys are not divided by anything
    ),
    "mt5": Family(
        "MT5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu_pytorch_tanh"},
        norms=_BLOCK + 3 * LAYERS + 1,
        rotations=0,
        gated=2 * LAYERS,
        gelu=True,
        batch="text to text",
        scale=0.3,  # products of queries and keys are not divided by anything
    ),
    "umt5": Family(
        "UMT5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu"},
        norms=_BLOCK + 3 * LAYERS + 1,
        rotations=0,
        gated=0,  # its gelu is none of the op's
        batch="text to text",
        scale=0.3,  # products of queries and keys are not divided by anything
    ),
    "moshi": Family("MoshiForCausalLM", {**_EVEN, "ffn_dim": 58}, norms=_BLOCK),
    "moonshine": Family(
        "MoonshineForConditionalGeneration",
        {
            **_EVEN,
            "encoder_num_hidden_layers": LAYERS,
            "decoder_num_hidden_layers": LAYERS,
            "encoder_num_attention_heads": 6,
            "encoder_num_key_value_heads": 6,
            "decoder_num_key_value_heads": 6,
            "num_key_value_heads": 6,
            "decoder_num_attention_heads": 6,
            "partial_rotary_factor": 0.5,
        },
        rotations=4 * LAYERS,  # encoder and decoder; attention between them knows no position
        batch="sound",
    ),
    "modernbert": Family("ModernBertForMaskedLM", _EVEN, gelu=True, batch="any text"),
    "esm": Family(
        "EsmForMaskedLM",
        {**_EVEN, "position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False},
        gated=0,
        batch="any text",
    ),
    "dinov3_vit": Family(
        "DINOv3ViTModel",
        {
            **_EVEN,
            "use_gated_mlp": True,
            "hidden_act": "silu",
            "image_size": 16,
            "patch_size": 4,
            "num_register_tokens": 3,
        },
        batch="pixels",
    ),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", norms=_BLOCK + _EACH_HEAD),
    "apertus": Family("ApertusForCausalLM", _EVEN, norms=_BLOCK + _EACH_HEAD, gated=0),
    "arcee": Family("ArceeForCausalLM", norms=_BLOCK, gated=0),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {**_EVEN, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        norms=_BLOCK + 2,
        rotations=2,
    ),
    "bamba": Family("BambaForCausalLM", {**_EVEN, **_MAMBA, "attn_layer_indices": [1]}, norms=_BLOCK + 1, rotations=2),
    "jamba": Family(
        "JambaForCausalLM",
        {
            **_EVEN,
            **_MOE,
            "num_experts": EXPERTS,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        norms=_BLOCK + 3,  # of the step and of both matrices of the state
        rotations=0,
        gated=1,
        experts=1,
    ),
    "diffllama": Family("DiffLlamaForCausalLM", {**_EVEN, "num_key_value_heads": 2}, norms=_BLOCK),
    "dots1": Family("Dots1ForCausalLM", {**_DENSE_FIRST, "n_shared_experts": 1}, norms=_BLOCK + _EACH_HEAD, experts=1),
    "emu3": Family("Emu3ForCausalLM", _EVEN, norms=_BLOCK),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        {**_EVEN, **_MOE, "num_experts": EXPERTS},
        norms=_BLOCK + _EACH_HEAD,
        gated=0,
        experts=LAYERS,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        {**_EVEN, **_LOCAL, "attention_multiplier": 0.25},
        norms=_BLOCK,
        gated=0,
        experts=LAYERS,
        form=_LINEARS,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        {**_EVEN, **_LOCAL, "shared_intermediate_size": 26, "attention_multiplier": 0.25},
        norms=_BLOCK,
        experts=LAYERS,
        form=_LINEARS,
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaForCausalLM",
        {**_EVEN, "block_types": ["recurrent", "attention"]},
        norms=_BLOCK,
        rotations=2,
        gelu=True,
    ),
    "vaultgemma": Family("VaultGemmaForCausalLM", {"query_pre_attn_scalar": 8, **_MIXED}, norms=_BLOCK, gelu=True),
    "minimax": Family(
        "MiniMaxForCausalLM",
        {**_LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
        norms=_BLOCK + 1,
        rotations=2,
        gated=0,
        experts=LAYERS,
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        _images(_SECTIONS, {}, {"embed_dim": 24, "hidden_size": 96}),
        norms=_BLOCK,
        rotations=4 * LAYERS,
        batch="pictures",
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        _images(
            _SECTIONS,
            {},
            {
                "hidden_size": 24,
                "out_hidden_size": 96,
                "intermediate_size": 34,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        ),
        norms=_BLOCK + 2 * LAYERS + 1,
        rotations=4 * LAYERS,
        gated=2 * LAYERS,
        batch="pictures",
    ),
    "glm4v": Family(
        "Glm4vForConditionalGeneration",
        _images(_SECTIONS, {}, {"hidden_size": 24, "out_hidden_size": 96, "intermediate_size": 34, "image_size": 16}),
        norms=_BLOCK + 2 * LAYERS + 2 * LAYERS + 2,
        rotations=4 * LAYERS,
        gated=2 * LAYERS,
        batch="pictures",
    ),
}


def tiny(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The model of a family in eval mode, the same at every call.

    In a narrower dtype than fp32 every token visits every expert: which are the best of few is no question of rounding.
    """
    family = FAMILIES[name]
    architecture = getattr(transformers, family.architecture)
    sizes = {**(_SIZES if family.batch != "pictures" else {}), **family.sizes, **changes}
    if dtype is not torch.float32:
        sizes |= {key: EXPERTS for key in ("num_experts_per_tok", "moe_k") if key in sizes and name != "phimoe"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomised(architecture(architecture.config_class(**sizes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(family.scale if parameter.dim() > 1 else 1)
    return _as_loaded(model, dtype)


def _as_loaded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In `dtype`, but for what the model wants to keep in fp32."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, module in model.to(dtype).named_modules():
        if name.rpartition(".")[2] in kept:
            module.float()
    return model


def inputs(name: str, rows: int = 2) -> dict[str, Tensor]:
    """What a family takes, of `rows` rows."""
    kind, generator = FAMILIES[name].batch, torch.Generator().manual_seed(3)
    ids = torch.randint(4, 89, (rows, 11), generator=generator)
    if kind == "text to text":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    if kind == "sound":
        return {"input_values": torch.randn(rows, 4000, generator=generator), "decoder_input_ids": ids[:, :5]}
    if kind == "pixels":
        return {"pixel_values": torch.randn(rows, 3, 16, 24, generator=generator)}
    if kind == "any text":
        return {"input_ids": ids}
    if kind == "pictures":
        ids[0, 2:10] = torch.tensor([92, 90, 90, 90, 90, 90, 90, 93])
        patches = torch.randn(24, 3 * 2 * 4 * 4, generator=generator)
        picture = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6]])}
        # a time, a row and a column: all three differ within the picture, and the text goes on after the largest
        places = torch.arange(11).repeat(3, rows, 1)
        places[:, 0, 3:9] = torch.tensor([[3] * 6, [3, 3, 3, 4, 4, 4], [3, 4, 5, 3, 4, 5]])
        places[:, 0, 9:] = torch.tensor([6, 7])
        picture["position_ids"] = places
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **picture, "use_cache": False}
    return {"input_ids": ids, "use_cache": False}
