"""Any model of transformers made small: its config with every structural setting kept, and random weights.

What a config means is told from its names and its own defaults: a size becomes a small one that differs from all other
sizes, one that equals another by default still equals it, and of the layers one of each kind stays. Nothing here is a
table of models.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
HIDDEN, HEADS, HEAD, LAYERS = 64, 4, 32, 2
EXPERTS, TOP_K = 8, 3
GROUPS, TOP_GROUPS = 4, 2
WINDOW = 6
POSITIONS = 64
_OF_FILES = {"architectures", "auto_map", "dtype", "torch_dtype", "model_type", "quantization_config", "_name_or_path"}
_OF_FILES |= {"transformers_version", "per_layer_config"}  # the latter is a view, and made small by itself
_WIDE = 100  # below this a number counts things, and is kept unless its name tells


def model_types() -> list[str]:
    """Every model type of the installed transformers."""
    return list(CONFIG_MAPPING.keys())


def text_type(model_type: str) -> str:
    """The model type of the part that reads text, where that part is a model type of its own."""
    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config(decoder=True)
    return text.model_type if text.model_type in CONFIG_MAPPING else model_type


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """The default config of `model_type`, small. `changes` are set over it. Raises what its class raises."""
    return smaller(CONFIG_MAPPING[model_type](), changes)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The causal language model of a config, else the model that generates, else the bare one.

    Raises `LookupError` where its modeling module has none.
    """
    names = [name for name in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type),) if name]
    found: dict[str, type[PreTrainedModel]] = {}
    home = type(config).__module__.replace("configuration_", "modeling_")
    if importlib.util.find_spec(home) is not None:
        module = importlib.import_module(home)
        found = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, PreTrainedModel)
            and value.__module__ == home
            and value.config_class is type(config)
        }
    for ending in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model", ""):
        names += [name for name in found if name.endswith(ending) and not name.endswith("PreTrainedModel")]
    for name in names:
        if name in found or hasattr(transformers, name):
            cls: type[PreTrainedModel] = found.get(name) or getattr(transformers, name)
            return cls
    raise LookupError(f"there is no model for {type(config).__name__}")


def small_model(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The model of `small_config` in eval mode, the same at every call, its weights random.

    Raises what its classes raise.
    """
    config = small_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)(config)
    loaded: PreTrainedModel = as_loaded(randomise(model), dtype)
    return loaded


def randomise(model: nn.Module) -> Any:
    """Weights of std 0.3, and what starts as ones, zeros or a curve is moved by as much: norms, scales, corrections."""
    generator = torch.Generator().manual_seed(7)
    buffers = [buffer for name, buffer in model.named_buffers() if buffer.is_floating_point() and "bias" in name]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            noise = torch.randn(tensor.shape, generator=generator) * 0.3
            tensor.copy_(noise if tensor.dim() > 1 else tensor.nan_to_num() + noise)
    return model.eval()


def as_loaded(model: Any, dtype: torch.dtype) -> Any:
    """In `dtype`, but for what the model wants to keep in fp32 then."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    model = model.to(dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(re.search(rf"(^|\.){part}($|\.)", name) for part in kept) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def smaller(config: PretrainedConfig, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """`config`, small. `changes` are set over it. Raises what its class raises."""
    cls, changes = type(config), changes or {}
    layers = _Layers(config)
    sizes = _Sizes(config, len(layers.kept) or LAYERS)
    declared = {name: _read(config, name) for name in _declared(cls) if name not in changes}
    for name, value in declared.items():
        if re.fullmatch(_RELATED, name):
            sizes.of(name, value)  # first what others may equal
    settings = {**_own(config), **changes}
    for name, value in declared.items():
        if isinstance(value, PretrainedConfig):
            settings[name] = smaller(value)
            continue
        small = layers.of(name, value, sizes)
        if small is not value and small != value:
            settings[name] = small
    if overrides := config.to_dict().get("per_layer_config"):
        settings["per_layer_config"] = {
            str(layers.kept.index(int(layer))): sizes.of("", values)
            for layer, values in overrides.items()
            if int(layer) in layers.kept
        }
    return cls(**settings)


def fewer_layers(config: PretrainedConfig, kept: list[int]) -> PretrainedConfig:
    """`config` with only the layers `kept`, its sizes as they are. Raises what its class raises."""
    layers, settings = _Layers(config), _own(config)
    layers.kept = kept
    for name in _declared(type(config)):
        value = _read(config, name)
        if name in layers.COUNTS:
            changed = len(kept) if value == layers.count else value
        elif name in layers.DENSE_FIRST and isinstance(value, int):
            changed = sum(layer < value for layer in kept)
        else:
            changed = layers.of(name, value, _AsTheyAre())
        if changed is not value and changed != value:
            settings[name] = changed
    if overrides := config.to_dict().get("per_layer_config"):
        of_kept = {str(kept.index(int(layer))): values for layer, values in overrides.items() if int(layer) in kept}
        settings["per_layer_config"] = of_kept
    return type(config)(**settings)


def _own(config: PretrainedConfig) -> dict[str, Any]:
    """What a config has that the default one of its class has not, but for what names its files and their format."""
    try:
        default = vars(type(config)())
    except Exception:  # it insists on some
        default = {}
    settings = {}
    for name in config.to_diff_dict():
        value = _read(config, name)
        known = name in default and (_read(config, name) is default[name] or value == default[name])
        if not (known or isinstance(value, PretrainedConfig) or name in _OF_FILES):
            settings[name] = value
    return settings


def _read(config: PretrainedConfig, name: str) -> Any:
    """A setting, for all layers where some have their own."""
    try:
        return getattr(config, name, None)
    except Exception:
        return vars(config).get(name)


def _declared(cls: type[PretrainedConfig]) -> list[str]:
    """What the constructor of a config takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(cls.__init__).parameters.items()
    named = [name for name, parameter in parameters if name != "self" and parameter.kind in kinds]
    if dataclasses.is_dataclass(cls):  # remote code may have a constructor of its own all the same
        named = [field.name for field in dataclasses.fields(cls) if field.init] + named
    return list(dict.fromkeys(named))


class _Layers:
    """Which layers of a config stay: the first of each kind that its lists and counts tell apart."""

    COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers", "encoder_layers", "depth")
    DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

    def __init__(self, config: PretrainedConfig) -> None:
        self.count = next((n for name in self.COUNTS if type(n := _read(config, name)) is int), 0)
        kinds: list[list[Any]] = []
        for name in vars(config):
            value = _read(config, name)
            if self._by_index(name, value):
                kinds.append([layer in value for layer in range(self.count)])
            elif self._by_layer(value):
                kinds.append([repr(entry) for entry in value])
            elif name in self.DENSE_FIRST and isinstance(value, int):
                kinds.append([layer < value for layer in range(self.count)])
        first = {kind: layer for layer, kind in reversed(list(enumerate(zip(*kinds, strict=True))))}
        self.kept = sorted(first.values())
        others = [layer for layer in range(self.count) if layer not in self.kept]
        self.kept = sorted(self.kept + others[: max(0, LAYERS - len(self.kept))])

    def of(self, name: str, value: Any, sizes: _Sizes | _AsTheyAre) -> Any:
        """The setting `name` for the layers that stay."""
        if self._by_index(name, value):
            return type(value)(self.kept.index(layer) for layer in value if layer in self.kept)
        if self._by_layer(value):
            return type(value)(sizes.of(name, value[layer]) for layer in self.kept)
        return sizes.of(name, value)

    def _by_layer(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == self.count

    def _by_index(self, name: str, value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and re.search("layers|ind(ex|ic)es|idxs|_ids", name) is not None
            and all(type(entry) is int and 0 <= entry < self.count for entry in value)
            and list(value) == sorted(set(value))
        )


class _AsTheyAre:
    """The settings of one config, unchanged."""

    def of(self, name: str, value: Any) -> Any:
        return value


class _Sizes:
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
                if type(value) is int and value >= _WIDE and re.fullmatch(_RELATED, name):
                    self.equal.setdefault(value, small)
                return small
        if type(value) is not int or value < _WIDE or not re.search(_WIDTH, name):
            return value
        if value not in self.equal:
            self.equal[value] = self.free.pop(0)
        return self.equal[value]

    @staticmethod
    def _head(default: PretrainedConfig) -> int:
        width, heads, head = (_read(default, name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
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
        return self.near[name] if name in self.near else _read(self.default, name)

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
        declared = _read(self.default, "head_dim")  # else it is hidden_size / num_attention_heads
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


def _number(small: int) -> Callable[[_Sizes, Any], Any]:
    return lambda sizes, value: small if type(value) is int and value > 0 else value


def _at_most(most: int) -> Callable[[_Sizes, Any], Any]:
    return lambda sizes, value: min(value, most) if type(value) is int else value


def _always(small: Any) -> Callable[[_Sizes, Any], Any]:
    return lambda sizes, value: small


_HEADS = r"(.*_)?(num_(attention_)?heads?|n_heads?|attention_heads|num_.*_heads)"
_RELATED = r"hidden_size|d_model|n_embd|embed_dim|head_dim"
_WIDTH = r"size|dim|width|rank|units|d_ff|d_inner|n_inner|channels|features|_scalar"
_RULES: list[tuple[str, Callable[[_Sizes, Any], Any]]] = [
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
