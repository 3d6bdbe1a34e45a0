"""Any model of transformers made small: its config with every structural setting kept, and random weights.

What a config means is told from its names and its own defaults: a size becomes a small one that differs from all other
sizes, one that equals another by default still equals it, and of the layers one of each kind stays. Nothing here is a
table of models.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from npu_autopatch.verification.small_layers import AsTheyAre, Layers
from npu_autopatch.verification.small_sizes import LAYERS, RELATED, Sizes, read

_OF_FILES = {"architectures", "auto_map", "dtype", "torch_dtype", "model_type", "quantization_config", "_name_or_path"}
_OF_FILES |= {"transformers_version", "per_layer_config"}  # the latter is a view, and made small by itself


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
    layers = Layers(config)
    sizes = Sizes(config, len(layers.kept) or LAYERS)
    declared = {name: read(config, name) for name in _declared(cls) if name not in changes}
    for name, value in declared.items():
        if re.fullmatch(RELATED, name):
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
    layers, settings = Layers(config), _own(config)
    layers.kept = kept
    for name in _declared(type(config)):
        value = read(config, name)
        if name in layers.COUNTS:
            changed = len(kept) if value == layers.count else value
        elif name in layers.DENSE_FIRST and isinstance(value, int):
            changed = sum(layer < value for layer in kept)
        else:
            changed = layers.of(name, value, AsTheyAre())
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
        value = read(config, name)
        known = name in default and (read(config, name) is default[name] or value == default[name])
        if not (known or isinstance(value, PretrainedConfig) or name in _OF_FILES):
            settings[name] = value
    return settings


def _declared(cls: type[PretrainedConfig]) -> list[str]:
    """What the constructor of a config takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(cls.__init__).parameters.items()
    named = [name for name, parameter in parameters if name != "self" and parameter.kind in kinds]
    if dataclasses.is_dataclass(cls):  # remote code may have a constructor of its own all the same
        named = [field.name for field in dataclasses.fields(cls) if field.init] + named
    return list(dict.fromkeys(named))
