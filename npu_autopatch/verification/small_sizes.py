"""Small values for the sizes of a config: what a setting is, its name tells, and what it equals by default."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 97
HIDDEN, HEADS, HEAD, LAYERS = 64, 4, 32, 2
EXPERTS, TOP_K = 8, 3
GROUPS, TOP_GROUPS = 4, 2
WINDOW = 6
POSITIONS = 64
_WIDE = 100  # below this a number counts things, and is kept unless its name tells


def read(config: PretrainedConfig, name: str) -> Any:
    """A setting, for all layers where some have their own."""
    try:
        return getattr(config, name, None)
    except Exception:
        return vars(config).get(name)


class Sizes:
    """Small values for the settings of one config."""

    def __init__(self, default: PretrainedConfig, layers: int) -> None:
        self.default, self.layers = default, layers
        self.near: dict[str, Any] = {}  # the settings beside the one that is asked for, where these are a layer's own
        self.equal: dict[int, int] = {}  # by the value in the default config
        self.free = [88, 56, 72, 80, *range(96, 400, 8)]
        self.token = 80
        self.heads = max(
            (v for n, v in vars(default).items() if re.fullmatch(_HEADS, n) and isinstance(v, int)), default=1
        )
        self.head = self._head(default)

    def of(self, name: str, value: Any) -> Any:
        """A small value for the setting `name`, or `value` itself where it is no size."""
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            inner = copy.copy(self)
            inner.near = value
            inner.heads = value.get("num_attention_heads", self.heads)
            return {key: inner.of(key, setting) for key, setting in value.items()}
        for pattern, rule in _RULES:
            if re.fullmatch(pattern, name):
                small = rule(self, value)
                if type(value) is int and value >= _WIDE and re.fullmatch(RELATED, name):
                    self.equal.setdefault(value, small)
                return small
        if type(value) is not int or value < _WIDE or not re.search(_WIDTH, name):
            return value
        if value not in self.equal:
            self.equal[value] = self.free.pop(0)
        return self.equal[value]

    @staticmethod
    def _head(default: PretrainedConfig) -> int:
        width, heads, head = (read(default, name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
        return (
            head if type(head) is int else width // heads if type(heads) is int and heads and type(width) is int else 0
        )

    def head_dim(self, value: Any) -> Any:
        if type(value) is not int:
            return value
        parts = [self.beside(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        if parts[1] and value in (parts[1], sum(parts)):
            return self.whole_head_dim(value) if value == sum(parts) else self.of("qk_rope_head_dim", value)
        return HEAD if not self.head or value == self.head else HEAD * value // self.head

    def beside(self, name: str) -> Any:
        return self.near[name] if name in self.near else read(self.default, name)

    def other_head_dim(self, value: Any) -> Any:
        """Of the part that is not rotated; as wide as the other part where it is so by default."""
        return 16 if value == self.beside("qk_rope_head_dim") else 24 if type(value) is int else value

    def whole_head_dim(self, value: Any) -> Any:
        parts = [(n, self.beside(n)) for n in ("qk_nope_head_dim", "qk_rope_head_dim")]
        return sum(self.of(name, part) for name, part in parts) if type(value) is int else value

    def key_heads(self, value: Any) -> Any:
        return value if type(value) is not int or value < 2 else HEADS if value == self.heads else HEADS // 2

    def sections(self, value: Any) -> Any:
        """Parts of half the rotary width keep their shares of it."""
        if not isinstance(value, (list, tuple)):
            return value
        declared = read(self.default, "head_dim")  # else it is hidden_size / num_attention_heads
        head = self.head_dim(self.head) if declared else HIDDEN // HEADS
        half = sum(value) * head // (self.head or 1)
        parts = [max(1, entry * half // sum(value)) for entry in value]
        return type(value)([parts[0] + half - sum(parts), *parts[1:]])

    def factors(self, value: Any) -> Any:
        """One of the frequencies of a head after another."""
        return value[: len(value) * (HIDDEN // HEADS) // (self.head or 1)] if isinstance(value, list) else value

    def special_token(self, value: Any) -> Any:
        if type(value) is not int or value < VOCABULARY:
            return value
        self.token += 1
        return self.token


def _number(small: int) -> Callable[[Sizes, Any], Any]:
    return lambda sizes, value: small if type(value) is int and value > 0 else value


def _at_most(most: int) -> Callable[[Sizes, Any], Any]:
    return lambda sizes, value: min(value, most) if type(value) is int else value


def _always(small: Any) -> Callable[[Sizes, Any], Any]:
    return lambda sizes, value: small


_HEADS = r"(.*_)?(num_(attention_)?heads?|n_heads?|attention_heads|num_.*_heads)"
RELATED = r"hidden_size|d_model|n_embd|embed_dim|head_dim"
_WIDTH = r"size|dim|width|rank|units|d_ff|d_inner|n_inner|channels|features|_scalar"
_RULES: list[tuple[str, Callable[[Sizes, Any], Any]]] = [
    (
        r"type_vocab_size|image_size|.*patch_size|.*chunk_size.*|.*window.*_size|codebook_size",
        lambda sizes, value: value,
    ),
    (r"(.*_)?vocab_size(_.*)?|n_vocab", _number(VOCABULARY)),
    (r"pad_token_id", _always(0)),
    (r"bos_token_id", _always(1)),
    (r"eos_token_id", _always(None)),
    (r".*_token_(id|index)", lambda sizes, value: sizes.special_token(value)),
    (r"original_max_position_embeddings", _at_most(16)),
    (r"(max|n)_(.*_)?position(s|_embeddings)|max_seq_len|model_max_length|n_ctx", _number(POSITIONS)),
    (
        r"num_hidden_layers|num_layers|n_layers?|(encoder|decoder)_layers|num_decoder_layers|depth",
        lambda sizes, value: sizes.layers if type(value) is int else value,
    ),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", _at_most(1)),
    (r"moe_layer_end_index", lambda sizes, value: sizes.layers - 1 if type(value) is int and value > 0 else value),
    (r".*_(period|step|interval)|.*every_n_layers|sliding_window_pattern", _at_most(2)),
    (r".*_layer_offset", lambda sizes, value: value % 2),
    (
        r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts",
        lambda sizes, value: TOP_K if value is None else min(value, TOP_K),
    ),
    (r"(num|n|moe_num)_(routed_|local_)?experts", _number(EXPERTS)),
    (r"use_mamba_kernels", _always(False)),  # there are none for a CPU
    (r"zero_expert_num", _at_most(2)),
    (
        r"n_groups?|num_expert_groups?|o_groups",
        lambda sizes, value: GROUPS if type(value) is int and value > 1 else value,
    ),
    (r"topk_group", lambda sizes, value: TOP_GROUPS if type(value) is int and value > 1 else value),
    (r"sliding_window(_size)?|attention_chunk_size|local_attention", _at_most(WINDOW)),
    (r"index_topk", _at_most(WINDOW)),
    (r".*moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size", _number(40)),
    (r"shared_expert_intermediate_size|share_expert_dim|shared_intermediate_size", _number(48)),
    (r"mamba_n_heads|mamba_num_heads", _number(8)),
    (r"mamba_d_head|mamba_head_dim", _number(2 * HIDDEN // 8)),
    (r"mamba_d_state|ssm_state_size|state_size", _number(24)),
    (r"(.*_)?num_(key_value|kv)_heads|n_kv_heads|(.*_)?num_key_heads", lambda sizes, value: sizes.key_heads(value)),
    (_HEADS, _number(HEADS)),
    (r"(swa_)?head_dim", lambda sizes, value: sizes.head_dim(value)),
    (r"rotary_dim|qk_rope_head_dim", _number(16)),
    (r"qk_nope_head_dim", lambda sizes, value: sizes.other_head_dim(value)),
    (r"qk_head_dim", lambda sizes, value: sizes.whole_head_dim(value)),
    (r"index_kpool", _at_most(2)),
    (r"v_head_dim", _number(48)),
    (r"index_head_dim", _number(HEAD)),
    (r"linear_key_head_dim", _number(16)),
    (r"linear_value_head_dim", _number(24)),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim", _number(HIDDEN)),
    (r"mrope_section", lambda sizes, value: sizes.sections(value)),
    (r"(short|long)_factor", lambda sizes, value: sizes.factors(value)),
]
