"""Stacked experts that no interface serves: a forward of hidden states, expert ids and routing weights, in any order.

A class is looked at where its constructor, or that of a class it builds, makes parameters and its forward spreads
tokens over experts. What it does with them, an instance with unequal sizes shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.moe import proof
from npu_autopatch.kernels.moe.base import MoESite
from npu_autopatch.kernels.moe.experts import selector_of
from npu_autopatch.kernels.moe.proof import Unproved
from npu_autopatch.kernels.moe.stacked.forward import Variant, fused_forward
from npu_autopatch.kernels.moe.stacked.gate import HALVES
from npu_autopatch.kernels.moe.stacked.probe import Probe
from npu_autopatch.kernels.swiglu.activations import selector
from npu_autopatch.ops import grouped_matmul as ops
from npu_autopatch.ops import swiglu

_SPREADS = {"one_hot", "index_add_", "index_add"}
# a forward that names one of these does more than compute: a probe may not call it
_EFFECTS = {"distributed", "dist", "all_gather", "all_reduce", "barrier", "print", "open", "exec", "system", "backward"}


def find(module: ModuleType) -> Iterator[Site]:
    """The classes of `module` that run experts of their own stacked weights, and those that are called so."""
    for cls in probing.classes(module):
        forward = vars(cls).get("forward")
        if isinstance(forward, FunctionType) and _may_run_experts(cls, forward):
            name = site_name(module.__name__, cls.__name__)
            yield MoESite(module.__name__, name, cls, "forward", sys.modules[__name__])


def _may_run_experts(cls: type[nn.Module], forward: FunctionType) -> bool:
    code = forward.__code__
    names, count = set(code.co_names), code.co_argcount
    if code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or code.co_kwonlyargcount or not 2 <= count <= 5:
        return False
    # The name only earns a class a line in the report that says why it is none.
    called_so = "xpert" in cls.__name__ and names & (_SPREADS | {"bmm"})
    if not called_so and not names & ({"bmm"} if count == 2 else _SPREADS if count > 3 else set()):
        return False
    if issubclass(cls, nn.ModuleDict):
        return bool(called_so)
    return _makes_parameters(cls) or (count > 3 and any(map(_makes_parameters, _built(cls))))


def prove(site: Site, devices: tuple[str, ...]) -> Match | Refusal:
    """The forward that runs the experts as grouped products; the gate alone, where bmm is better than those."""
    cls, original = site.owner, site.owner.forward
    if reason := _hopeless(cls, original):
        return Refusal(reason)
    try:
        probe = Probe(cls, original)
        variant = probe.variant()
        if variant.batched and not (variant.gate.act and variant.gate.split == HALVES and variant.gate.gate_first):
            return Refusal("bmm is its grouped product already, and no op computes what stands between the two")
        _prove(probe, variant)
    except (probing.BuildError, Unproved) as refused:
        return Refusal(str(refused))
    fused = fused_forward(original, original, variant, selector_of(cls), ops.op(), devices)
    return Match(str(variant), fused)


def _hopeless(cls: type[nn.Module], original: FunctionType) -> str:
    """Why no probe is needed; empty where one is."""
    if issubclass(cls, nn.ModuleDict):
        return "its experts are modules of their own, not stacked weights"
    if original.__code__.co_argcount == 3:
        return "every token goes through every expert, in batched products that a grouped one cannot better"
    effects = sorted(probing.operations(cls, original)[0] & _EFFECTS)
    return f"it does more than compute ({', '.join(effects)}), so no probe may call it" if effects else ""


def _prove(probe: Probe, variant: Variant) -> None:
    """Original and replacement on the same arguments. Raises `Unproved`."""
    select = selector(sys.modules[type(probe.instance).__module__], swiglu.REFERENCE)
    fused = fused_forward(probe.original, proof.turned_away, variant, select, ops.REFERENCE, ("cpu",))
    case = probe.case

    def of(forward: Any) -> proof.Function:
        def experts(instance: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if variant.batched:
                x = x.repeat(case.experts, 1)
            output: Tensor = forward(instance, *probe.arguments(variant, x, ids, weights))
            return output

        return experts

    proof.prove(of(probe.original), of(fused), case, variant.dense)


def _makes_parameters(cls: type) -> bool:
    return any("Parameter" in init.__code__.co_names for init in _constructors(cls))


def _constructors(cls: type) -> Iterator[FunctionType]:
    """Those of models, not of torch's own layers."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        init = vars(base).get("__init__")
        if isinstance(init, FunctionType) and not base.__module__.startswith("torch."):
            yield init


def _built(cls: type) -> Iterator[type]:
    """The classes of modules that its constructors name."""
    for init in _constructors(cls):
        for name in init.__code__.co_names:
            value = init.__globals__.get(name)
            if isinstance(value, type) and issubclass(value, nn.Module):
                yield value
