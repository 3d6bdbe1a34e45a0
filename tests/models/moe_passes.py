"""Passes of a model with experts, and of its blocks alone: what they return, their gradients, and the fused calls."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from npu_autopatch.reporting import Row
from tests.counting import Fused
from tests.kernels.exact import InDouble

from .comparison import as_one, error
from .moe_choices import Choices


@dataclass
class Pass:
    """One pass: each tensor returned by its name, what kind of thing is returned, and the gradients by their names."""

    returned: dict[str, Tensor]
    kind: Any
    gradients: dict[str, Tensor | None]
    choices: Choices
    calls: Counter[str] = field(default_factory=Counter)


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
        model, batch = _doubled(model), tree_map(_double, batch)
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
        _backward(output.loss if "labels" in batch else output[0])
    named = {name: value for name, value in output.items() if value is not None}
    returned, kind = _flat(named)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Pass(returned, (type(output), kind), gradients, choices, fused.calls), calls


def of_block(block: nn.Module, call: Call, earlier: Choices | None = None, exact: bool = False) -> Pass:
    """A forward and backward of a copy of `block` alone on what it was given within its model."""
    block = copy.deepcopy(block)
    args, kwargs = call.args, call.kwargs
    if exact:
        block = _doubled(block)
        args, kwargs = tree_map(_double, (args, kwargs))
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
        _backward(*(t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.requires_grad))
    returned, kind = _flat(output)
    given = [t for t in tree_flatten(leaves)[0] if isinstance(t, Tensor) and t.requires_grad]
    gradients = {f"input {place}": t.grad for place, t in enumerate(given)}
    gradients |= {name: parameter.grad for name, parameter in block.named_parameters()}
    return Pass(returned, kind, gradients, choices, fused.calls)


def unlike(got: Pass, original: Pass, served: Iterable[str] = ("",)) -> list[str]:
    """Where `got` returns another kind of thing than `original`, or lacks a gradient that it has.

    A parameter below a module of `served` may have zeros where the original has no gradient.
    """
    found = [] if got.kind == original.kind else [f"it returns {got.kind}, not {original.kind}"]
    for name, theirs in original.gradients.items():
        mine = got.gradients[name]
        if mine is not None and theirs is not None:
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                found.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}")
        elif mine is not None and (mine.any() or not name.startswith(tuple(served))):
            found.append(f"{name}: a gradient where there is none")
        elif theirs is not None:
            found.append(f"{name}: no gradient")
    for name, value in original.returned.items():
        if not value.is_floating_point() and not torch.equal(got.returned[name], value):
            found.append(f"{name}: other numbers")
    return found


def errors(got: Pass, original: Pass, exact: Pass, dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    """The mean error of all that has one, that of the original, and one unit in the last place of the largest value.

    As in `worse`: the gradients in narrow dtypes are one part, each relative to its largest.
    """
    parts = [(n, got.returned[n], t, exact.returned[n]) for n, t in original.returned.items() if t.is_floating_point()]
    gradients = []
    for name, theirs in original.gradients.items():
        mine, right = got.gradients[name], exact.gradients[name]
        if theirs is not None and mine is not None and right is not None:
            gradients.append((name, mine, theirs, right.double()))
    if dtype is not torch.float32 and gradients:
        gradients = [("all gradients", *(as_one(gradients, which) for which in (1, 2, 3)))]
    return {
        name: (error(mine, right), error(theirs, right), torch.finfo(dtype).eps * right.abs().max().item())
        for name, mine, theirs, right in parts + gradients
        if right.numel()
    }


def behind(parts: Iterable[dict[str, tuple[float, float, float]]]) -> list[str]:
    """The parts whose error, over these draws of inputs, is above one and a half times the original's and a unit."""
    totals: dict[str, list[float]] = {}
    for draw in parts:
        for name, values in draw.items():
            totals[name] = [a + b for a, b in zip(totals.get(name, (0.0, 0.0, 0.0)), values, strict=True)]
    return [
        f"{name}: error {mine:.2e}, the original's {theirs:.2e}, a unit {unit:.2e}"
        for name, (mine, theirs, unit) in totals.items()
        if not mine <= 1.5 * theirs + unit
    ]


def _doubled(module: nn.Module) -> nn.Module:
    """In fp64, the experts by batched products: torch's grouped one on a CPU is not for fp64."""
    for config in (getattr(part, "config", None) for part in module.modules()):
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "batched_mm"
    return module.double()


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_()


def _backward(*outputs: Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    incoming = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs]
    torch.autograd.backward(outputs, [torch.ones_like(g) if g.dim() == 0 else g for g in incoming])


def _flat(output: Any) -> tuple[dict[str, Tensor], Any]:
    leaves, kind = tree_flatten(output)
    returned = {}
    shapes = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            returned[_name(output, place)] = leaf.detach()
            shapes.append((leaf.dtype, tuple(leaf.shape)))
        else:
            shapes.append((type(leaf),))
    return returned, (str(kind), shapes)


def _name(output: Any, place: int) -> str:
    if isinstance(output, dict):
        for name, value in output.items():
            count = len(tree_flatten(value)[0])
            if place < count:
                return name if count == 1 else f"{name} {place}"
            place -= count
    return f"output {place}"


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
