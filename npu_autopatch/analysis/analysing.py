"""`analyze`: a model run with few layers of each kind, unpatched and patched; its ops become chains, each judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from npu_autopatch import activation
from npu_autopatch.analysis import layers, running
from npu_autopatch.analysis.modes import Modes
from npu_autopatch.analysis.result import Analysis, Mode
from npu_autopatch.analysis.runs import NeedsValues, Progress, Runs
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.settings import Settings, SettingsError
from npu_autopatch.verification import small
from npu_autopatch.verification.source import Architecture, SourceError, architecture

TOKENS, BATCH = 4096, 1
SMALL_TOKENS, SMALL_BATCH = 11, 2


def analyze(
    model_or_config: Any,
    *,
    tokens: int = TOKENS,
    batch: int = BATCH,
    kernels: str | Iterable[str] = "all",
    skip: str | Iterable[str] = (),
    trust_remote_code: bool = False,
    progress: Progress = lambda words, share: None,
) -> Analysis:
    """Take a model apart into the chains of ops a fused op can serve, with the launches and bytes of each.

    `model_or_config` is a folder, a config.json, a model type, a config or a model; of a model only its config is
    used. It runs at its real sizes, in bf16, `batch` sequences of `tokens`, on tensors without values; where its code
    asks for values, made small and with values on the CPU. Raises `SourceError`, and `SettingsError` for wrong
    arguments and while the package is enabled.
    """
    if tokens < 1 or batch < 1:
        raise SettingsError(f"tokens is {tokens} and batch {batch}: give numbers of 1 or more")
    if activation.report().settings.get("active"):
        raise SettingsError("the package is enabled, so that nothing could run unpatched: call disable() first")
    Settings.of(REGISTRY, kernels, skip)
    given = architecture(model_or_config, trust_remote_code)
    notes: list[str] = []
    longest = getattr(given.config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < tokens + 1:
        notes = [f"{longest - 1} tokens were run, not {tokens}: the model has {longest} positions"]
        tokens = longest - 1
    patching = {"kernels": kernels, "skip": skip, "backend": "emulate"}
    progress("building", 0.0)
    try:
        try:
            model, alike = layers.fewer(given.config, given.cls)
            runs = Runs(model, batch, tokens, patching, progress)
            counted = f"its own sizes in bf16, {batch} x {tokens} tokens, on tensors without values"
        except NeedsValues as error:
            model, alike = _made_small(given)
            runs = Runs(model, SMALL_BATCH, SMALL_TOKENS, patching, progress)
            counted = f"made small, {SMALL_BATCH} x {SMALL_TOKENS} tokens, for its code asks for values ({error})"
    except running.NotRun as error:
        raise SourceError(f"{given.name} cannot be analysed: {error}") from error
    except (SourceError, SettingsError):
        raise
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise SourceError(f"{given.name} cannot be run ({words})") from error
    modes = tuple(Modes(runs, alike))
    notes += [f"not analysed: {words}" for words in given.left_out]
    return Analysis(given.name, counted, _versions(), modes, (*notes, *_notes(runs, modes)))


def _notes(runs: Runs, modes: Iterable[Mode]) -> Iterator[str]:
    """What a reader must know of how it was counted."""
    for name, found in runs.before.items():
        if isinstance(found, str):
            yield f"{name} was not run: {found}"
    if runs.asked:
        yield (
            "where the model's code asks whether something holds for all tokens (no padding, one sequence a row) the "
            "answer was yes"
        )
    if any("aten::_grouped_mm" in chain.ops_before for mode in modes for part in mode.parts for chain in part.chains):
        yield (
            "torch's grouped product counts as a launch for each group that has rows: torch_npu has no kernel for it, "
            "and torch itself runs one product a group"
        )


def _made_small(given: Architecture) -> tuple[Any, layers.Alike]:
    config = small.smaller(given.config)
    model = small.as_loaded(small.randomise(given.cls(config)), torch.bfloat16)
    return model, layers.alike(model)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("npu-autopatch", "transformers", "torch", "torch_npu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
