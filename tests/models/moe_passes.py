"""Passes of a model with experts, and of its blocks alone: what they return, their gradients, and the fused calls."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from npu_autopatch.reporting import Row
from npu_autopatch.verification.choices import Choices
from npu_autopatch.verification.comparison import Pass, flat
from npu_autopatch.verification.counting import Fused
from npu_autopatch.verification.double import InDouble, double, doubled
from npu_autopatch.verification.passes import backward


@dataclass
class Call:
    """A call of a block within a pass of its model: what it was given, and the fused calls in it."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: Counter[str]


def blocks(model: nn.Module, rows: Iterable[Row]) -> dict[str, Row]:
    """The modules whose class the report has as patched, by name, each with its row."""
    patched = {(row.module, row.name.split(".")[1]): row for row in rows if row.state == "patched"}
    found = {}
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if row := patched.get((base.__module__, base.__name__)):
                found[name] = row
                break
    return found


def of_model(
    model: Any,
    batch: dict[str, Any],
    earlier: Choices | None = None,
    exact: bool = False,
    watched: Iterable[str] = (),
) -> tuple[Pass, list[Call]]:
    """A forward and backward of a copy of `model`, from its loss where it has one; each call of `watched` modules."""
    model = copy.deepcopy(model)
    if exact:
        model, batch = doubled(model), tree_map(double, batch)
    calls: list[Call] = []
    choices = Choices(earlier)
    with ExitStack() as stack:
        fused = stack.enter_context(Fused())
        for name in watched:
            _watch(model.get_submodule(name), name, calls, fused.calls)
        if exact:
            stack.enter_context(InDouble())
        stack.enter_context(choices)
        torch.manual_seed(9)
        output = model(**batch)
        backward(output.loss if "labels" in batch else output[0])
    named = {name: value for name, value in output.items() if value is not None}
    returned, kind = flat(named)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Pass(returned, (type(output), kind), gradients, choices, fused.calls), calls


def of_block(block: nn.Module, call: Call, earlier: Choices | None = None, exact: bool = False) -> Pass:
    """A forward and backward of a copy of `block` alone on what it was given within its model."""
    block = copy.deepcopy(block)
    args, kwargs = call.args, call.kwargs
    if exact:
        block = doubled(block)
        args, kwargs = tree_map(double, (args, kwargs))
    leaves = tree_map(_leaf, (args, kwargs))
    args, kwargs = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, leaves)  # it may write into them
    choices = Choices(earlier)
    with ExitStack() as stack:
        fused = stack.enter_context(Fused())
        if exact:
            stack.enter_context(InDouble())
        stack.enter_context(choices)
        torch.manual_seed(9)
        output = block(*args, **kwargs)
        backward(*(t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.requires_grad))
    returned, kind = flat(output)
    given = [t for t in tree_flatten(leaves)[0] if isinstance(t, Tensor) and t.requires_grad]
    gradients = {f"input {place}": t.grad for place, t in enumerate(given)}
    gradients |= {name: parameter.grad for name, parameter in block.named_parameters()}
    return Pass(returned, kind, gradients, choices, fused.calls)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_()


def _watch(module: nn.Module, name: str, calls: list[Call], fused: Counter[str]) -> None:
    before: list[Counter[str]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, (args, kwargs))
        calls.append(Call(name, *given, Counter()))
        before.append(Counter(fused))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mine = next(call for call in reversed(calls) if call.name == name)
        mine.calls.update(fused - before.pop())

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
