"""A model in prefill, decode and training: what it does in each, unpatched and patched."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.analysis.recording import Recorder, Recording
from npu_autopatch.analysis.result import PREFILL, TRAINING
from npu_autopatch.reporting import Row
from npu_autopatch.verification.passes import cached

_CACHES = ("cache", "past_key_values", "cache_params")
Site = tuple[Any, str, str, str]


class NotRun(Exception):
    """A mode that a model has not; the message is why."""


def sites(rows: Iterable[Row]) -> list[Site]:
    """What to mark as the sites of `rows`: a class's forward, or a function of its module."""
    found: list[Site] = []
    for row in rows:
        module = sys.modules.get(row.module)
        value = getattr(module, row.name.partition(".")[2], None)
        if isinstance(value, type) and row.kernel:
            found.append((value, "forward", row.kernel, row.name))
        elif isinstance(value, FunctionType) and row.kernel:
            found.append((module, row.name.partition(".")[2], row.kernel, row.name))
    return found


def inputs(model: Any, batch: int, tokens: int) -> dict[str, Tensor]:
    """Token ids on the device of `model`, without a mask: no token is padding. Raises `NotRun`."""
    takes = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]
    if "input_ids" not in takes:
        raise NotRun(f"it reads {takes[0]}, not token ids: give a model that reads text")
    device = next(model.parameters()).device
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    if getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids.clone()}
    return {"input_ids": ids}


def run(model: Any, mode: str, batch: dict[str, Tensor], marked: list[Site]) -> Recording:
    """What `model` did with `batch` in `mode`: of decode, with one token more, after the prompt.

    Raises `NotRun`, and what the model raises.
    """
    model.train(mode == TRAINING)
    model.zero_grad(set_to_none=True)
    recorder = Recorder(model, marked)
    if mode == TRAINING:
        with recorder:
            _loss(model, batch).backward()
        return recorder.found
    with torch.no_grad():
        if mode == PREFILL:
            with recorder:
                model(**batch, **cached(model, True))
            return recorder.found
        with Recorder(model, []):  # it answers questions about tokens
            output = model(**batch, **cached(model, True))
        kept = [name for name in _CACHES if output.get(name) is not None]
        if not kept:
            raise NotRun("the model keeps no cache")
        cache = {kept[0]: output[kept[0]]}  # the newest name of it
        asked = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
        with recorder:
            model(**{**batch, asked: batch[asked][:, :1]}, **cache, **cached(model, True))
    return recorder.found


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss; of a model without one, the sum of its answer."""
    if "labels" in inspect.signature(model.forward).parameters:
        labels = batch.get("decoder_input_ids", batch["input_ids"])
        loss: Tensor = model(**batch, labels=labels, **cached(model, False))["loss"]
        return loss
    output = model(**batch, **cached(model, False))
    return next(value for value in output.values() if isinstance(value, Tensor)).float().sum()
