"""What MODEL means: a folder or config.json, a model type, a config, or a model; and how the model is built from it."""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from npu_autopatch.verification import small


class SourceError(ValueError):
    """A model that cannot be had; the message is one sentence that says what to give instead."""


@dataclass(frozen=True)
class Architecture:
    """A model's config and class; `left_out` names parts of it that are not run."""

    name: str
    config: PretrainedConfig
    cls: Callable[[PretrainedConfig], Any]
    left_out: list[str]


def architecture(model: Any, trust_remote_code: bool = False) -> Architecture:
    """The config and class that `model` stands for, but no weights. Raises `SourceError`."""
    if isinstance(model, PreTrainedModel):
        return Architecture(type(model).__name__, model.config, type(model), [])
    return _architecture(*_meant(model, trust_remote_code))


@dataclass
class Source:
    """A model to verify. `build` gives it in a dtype, the same each time; `not_verified` names parts left out."""

    name: str
    build: Callable[[torch.dtype], Any]
    not_verified: list[str] = field(default_factory=list)


def source(model: Any, full: bool = False, trust_remote_code: bool = False) -> Source:
    """The model that `model` stands for, made small unless `full`. Raises `SourceError`."""
    if isinstance(model, PreTrainedModel):
        return Source(type(model).__name__, lambda dtype: small.as_loaded(copy.deepcopy(model), dtype))
    name, config, folder = _meant(model, trust_remote_code)
    if full and folder and any(Path(folder).glob("*.safetensors")):
        return Source(name, _with_weights(folder, config, trust_remote_code))
    found = _architecture(name, config, folder)
    try:
        config = found.config if full else small.smaller(found.config)
    except Exception as error:
        raise SourceError(f"{found.name} cannot be built small ({_words(error)})") from error

    def build(dtype: torch.dtype) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return small.as_loaded(small.randomise(found.cls(copy.deepcopy(config))), dtype)

    return Source(found.name, build, found.left_out)


def _meant(model: Any, trust_remote_code: bool) -> tuple[str, PretrainedConfig, str]:
    """The name, config and folder of what was given as a config, a word or a path."""
    if isinstance(model, PretrainedConfig):
        return model.model_type or type(model).__name__, model, ""
    return _named(os.fspath(model), trust_remote_code)


def _architecture(name: str, config: PretrainedConfig, folder: str) -> Architecture:
    text, left_out = _text(config)
    if folder and _is_remote(config):
        return Architecture(name, text, _remote_class(folder, config), left_out)
    try:
        return Architecture(name, text, small.model_class(text), left_out)
    except Exception as error:
        raise SourceError(f"{name} cannot be built ({_words(error)})") from error


def _named(model: str, trust_remote_code: bool) -> tuple[str, PretrainedConfig, str]:
    """The name, config and folder of what was given as a word or path."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if model in CONFIG_MAPPING:
            try:
                return model, CONFIG_MAPPING[model](), ""
            except Exception as error:
                raise SourceError(f"{model} has no default config ({_words(error)}): give its config.json") from error
        close = difflib.get_close_matches(model, list(CONFIG_MAPPING), 4, 0.4)
        types = f"the {len(list(CONFIG_MAPPING))} model types such as {', '.join(close or ['llama', 'qwen3_moe'])}"
        raise SourceError(
            f"there is no model {model!r}: give a folder with a config.json, that file, or one of {types}"
        )
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file} cannot be read ({_words(error)}): give the config.json of a model") from error
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    remote = isinstance(settings, dict) and "auto_map" in settings and path.is_dir()
    if remote and model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise SourceError(f"{model} brings code of its own: give --trust-remote-code to run it")
    if not isinstance(model_type, str) or (not remote and model_type not in CONFIG_MAPPING):
        if model_type is None:
            raise SourceError(f"{file} names no model type: give the config.json of a model")
        raise SourceError(f"{file} has the model type {model_type!r}, which the installed transformers does not know")
    try:
        if remote and trust_remote_code:
            config = AutoConfig.from_pretrained(str(path), trust_remote_code=True)
        else:
            config = CONFIG_MAPPING[model_type].from_dict({k: v for k, v in settings.items() if k != "auto_map"})
    except Exception as error:
        raise SourceError(f"{file} is no config that transformers takes ({_words(error)})") from error
    return model_type or path.name, config, str(path) if path.is_dir() else ""


def _text(config: PretrainedConfig) -> tuple[PretrainedConfig, list[str]]:
    """The part of a config that reads text, where that is a model of its own, and the names of the others."""
    text = config.get_text_config(decoder=True)
    others = [name for name, part in vars(config).items() if isinstance(part, PretrainedConfig) and part is not text]
    if text is config or text.model_type not in CONFIG_MAPPING:
        return config, []
    return text, [f"{name.removesuffix('_config')} (only {text.model_type} is run)" for name in sorted(others)]


def _is_remote(config: PretrainedConfig) -> bool:
    return type(config).__module__.startswith("transformers_modules")


def _remote_class(folder: str, config: PretrainedConfig) -> Any:
    named = getattr(config, "auto_map", {})
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        if auto in named:
            try:
                return get_class_from_dynamic_module(named[auto], folder)
            except Exception as error:
                raise SourceError(f"the code of {folder} cannot be loaded ({_words(error)})") from error
    raise SourceError(f"{folder} names no model in its auto_map: it takes AutoModelForCausalLM or AutoModel there")


def _with_weights(folder: str, config: PretrainedConfig, trust_remote_code: bool) -> Callable[[torch.dtype], Any]:
    cls = _remote_class(folder, config) if _is_remote(config) else small.model_class(config)

    def build(dtype: torch.dtype) -> Any:
        return small.as_loaded(cls.from_pretrained(folder), dtype).eval()

    return build


def _words(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}"
