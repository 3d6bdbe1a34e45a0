"""What a model is asked for: a prompt, single tokens with a cache, a step of training, one with checkpoints."""

from __future__ import annotations

import copy
import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from npu_autopatch.verification.choices import Choices
from npu_autopatch.verification.comparison import Pass, flat
from npu_autopatch.verification.double import InDouble, double, doubled

PREFILL, DECODE, TRAINING, CHECKPOINTS = MODES = ("prefill", "decode", "training", "checkpoints")
ROWS, TOKENS, STEPS = 2, 11, 3
_CACHES = ("past_key_values", "cache_params")


class NotPossible(Exception):
    """What a model cannot be asked for; the message is why."""


def inputs(model: Any, seed: int) -> dict[str, Any]:
    """Token ids that no config takes for special ones, as `model` wants them given."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, max(8, min(80, _vocabulary(model))), (ROWS, TOKENS), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(codec := getattr(model, "codec_embedding", None), nn.Embedding):  # it reads what others embed
        batch["inputs_embeds"] = codec(batch.pop("input_ids").to(codec.weight.device)).detach().cpu()
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids[:, :5].contiguous()
    return batch


def run(model: Any, mode: str, batch: dict[str, Any], earlier: Choices | None = None, exact: bool = False) -> Pass:
    """One pass of a copy of `model`; `exact`: on the CPU, in fp64. Raises `NotPossible`, and what the model raises."""
    if mode == CHECKPOINTS and not getattr(model, "supports_gradient_checkpointing", False):
        raise NotPossible("the model has no gradient checkpointing")
    model = copy.deepcopy(model)
    model.train(mode in (TRAINING, CHECKPOINTS))
    if mode == CHECKPOINTS:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if exact:
        model, batch = doubled(model.cpu()), tree_map(double, batch)
    batch = there(batch, model)
    choices = Choices(earlier)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        seed()
        if exact:
            stack.enter_context(InDouble())
        stack.enter_context(choices)
        if mode in (TRAINING, CHECKPOINTS):
            output = stepped(model(**labelled(model, batch), **cached(model, False)))
        else:
            stack.enter_context(torch.no_grad())
            output = _decoded(model, batch) if mode == DECODE else _answer(model(**batch, **cached(model, False)))
    if mode == CHECKPOINTS and choices.drawn:  # the second forward is under no mode of torch, and draws other ones
        raise NotPossible("the model draws random numbers, which here are not those of the second forward")
    returned, kind = flat(output)
    gradients = {} if mode in (PREFILL, DECODE) else {name: p.grad for name, p in model.named_parameters()}
    return Pass(returned, kind, gradients, choices)


def seed() -> None:
    """The same dropout each time; `torch.manual_seed` would keep a traceback for devices that are not there."""
    torch.default_generator.manual_seed(9)
    of_devices = getattr(getattr(torch, "npu", None), "manual_seed_all", None)
    if of_devices is not None:
        of_devices(9)


def backward(*outputs: Tensor) -> None:
    """From incoming gradients that are the same each time, whole numbers, which every dtype holds exactly."""
    if not outputs:
        return
    generator = torch.Generator().manual_seed(5)
    incoming = [torch.randint(-9, 10, out.shape, generator=generator).to(out) for out in outputs]
    torch.autograd.backward(outputs, [torch.ones_like(g) if g.dim() == 0 else g for g in incoming])


def there(batch: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """`batch` where `model` is."""
    where = next(model.parameters()).device
    return {name: value.to(where) if isinstance(value, Tensor) else value for name, value in batch.items()}


def labelled(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` with labels, where the model has a loss."""
    if "input_ids" in batch and type(model).__name__.endswith(("CausalLM", "ConditionalGeneration", "LMHeadModel")):
        return {**batch, "labels": batch.get("decoder_input_ids", batch["input_ids"])}
    return batch


def cached(model: Any, use: bool) -> dict[str, bool]:
    """The argument that says whether a model keeps a cache, of a model that takes it."""
    takes = inspect.signature(model.forward).parameters
    named = "use_cache" in takes or any(it.kind is inspect.Parameter.VAR_KEYWORD for it in takes.values())
    return {"use_cache": use} if named else {}


def stepped(output: Any) -> dict[str, Tensor]:
    """What a model has returned by name, after the backward from its loss, or from its answer if it has none."""
    named = _answer(output)
    ends = [named["loss"]] if "loss" in named else [next(t for t in named.values() if t.is_floating_point())]
    backward(*(end for end in ends if end.requires_grad))
    return named


def _vocabulary(model: Any) -> int:
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return size if isinstance(size, int) else 80


def _answer(output: Any) -> dict[str, Tensor]:
    """The tensors a model returns by name, but for what it keeps."""
    if not hasattr(output, "items"):
        raise NotPossible("it returns no named tensors")
    named = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    if not any(value.is_floating_point() for value in named.values()):
        raise NotPossible("it returns no tensor of floats")
    return named


def _decoded(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The answers to a prompt and to the last tokens one by one, each from what was kept of those before."""
    decoder = "decoder_input_ids" in batch
    name = "decoder_input_ids" if decoder else "inputs_embeds" if "inputs_embeds" in batch else "input_ids"
    whole = batch[name]
    length = whole.size(1) - STEPS
    given = {**batch, name: whole[:, :length]}
    if not decoder:
        given["attention_mask"] = batch["attention_mask"][:, :length]
    output = model(**given, **cached(model, True))
    kept = next((cache for cache in _CACHES if getattr(output, cache, None) is not None), "")
    if not kept:
        raise NotPossible("the model keeps no cache")
    answers = [next(iter(_answer(output).values()))]
    for place in range(length, whole.size(1)):
        given = {**batch, name: whole[:, place : place + 1], kept: getattr(output, kept)}
        if decoder:
            given["encoder_outputs"] = (output.encoder_last_hidden_state,)
        else:
            given["attention_mask"] = batch["attention_mask"][:, : place + 1]
        if kept == "cache_params":
            given["cache_position"] = torch.tensor([place], device=whole.device)
        output = model(**given, **cached(model, True))
        answers.append(next(iter(_answer(output).values())))
    return {f"token {place}": answer for place, answer in enumerate(answers)}
