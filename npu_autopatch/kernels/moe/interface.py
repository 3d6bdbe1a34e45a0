"""The experts interface of transformers 5: what every decorated experts class runs through.

The interface names functions, `grouped_mm` by default, each of which serves every decorated class by the flags and
weights an instance has. Their entries are replaced; whatever else a user asks for by name is not touched. A class is
served where its proof succeeded: the fused function is then an attribute of it, which the entry looks for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.moe import experts, proof, tiny
from npu_autopatch.kernels.moe.base import MoESite
from npu_autopatch.kernels.moe.experts import Contract
from npu_autopatch.ops import grouped_matmul as ops

SERVED = "_npu_grouped_mm"  # of a class that is proved: what an entry calls in its own place
NAME = "npu_grouped_mm"  # what a user may ask for, as experts_implementation=
# The default, and what generation puts in its place. The value: whether it multiplies by bmm, as autocast knows it.
_REPLACED = {"grouped_mm": False, "batched_mm": True}
_PARAMETERS = ("self", "hidden_states", "top_k_index", "top_k_weights")


def find(module: ModuleType) -> Iterator[Site]:
    """The decorated classes of `module`, and the entries of the interface they run through."""
    interface = None
    for cls in probing.classes(module):
        found = interface_of(vars(cls).get("forward"))
        if found is not None:
            interface = found
            yield MoESite(module.__name__, site_name(module.__name__, cls.__name__), cls, SERVED, sys.modules[__name__])
    if interface is not None:
        home = type(interface).__module__
        entries = type(interface)._global_mapping
        # transformers 5.0 checks a name against a list of its own, not against the entries
        new = (NAME,) if hasattr(interface, "get_interface") else ()
        for name in (*filter(entries.__contains__, _REPLACED), *new):
            yield MoESite(home, site_name(home, name), entries, name, sys.modules[__name__])


def interface_of(forward: Any) -> Any:
    """The interface that the forward of a decorated class looks its function up in; None for any other."""
    if not isinstance(forward, FunctionType) or not forward.__closure__ or not hasattr(forward, "__wrapped__"):
        return None
    scope = forward.__globals__
    for value in (
        *(cell.cell_contents for cell in forward.__closure__),
        *(scope.get(name) for name in forward.__code__.co_names),
    ):
        if isinstance(getattr(type(value), "_global_mapping", None), dict):
            return value
    return None


def prove(site: Site, devices: tuple[str, ...]) -> Match | Refusal:
    """The fused function of a class, or the entry that calls it."""
    if isinstance(site.owner, dict):
        return _entry(site)
    cls: type[nn.Module] = site.owner
    scope = cls.forward.__globals__
    original = type(interface_of(cls.forward))._global_mapping["batched_mm"]
    original = getattr(original, "__wrapped__", original)  # where the entry has been replaced
    try:
        # any name but this is looked up among the entries
        instance = tiny.build(cls, _experts_implementation="eager")
        contract = Contract.of(instance, scope.get("_default_apply_gate"))
        case = _case(instance, contract)
        contract = replace(contract, dense=proof.takes_dense(original, case))
        fused = experts.fused(contract, experts.unselected, ops.REFERENCE, ("cpu",))
        mine = functools.partial(fused, original=proof.turned_away)
        proof.prove(original, mine, case)
        if contract.dense:
            proof.prove(original, mine, case, dense=True)
    except (probing.BuildError, proof.Unproved) as refused:
        return Refusal(str(refused))
    return Match(str(contract), experts.fused(contract, experts.selector_of(cls), ops.op(), devices))


def _case(instance: nn.Module, contract: Contract) -> proof.Case:
    first = getattr(instance, contract.first, None)
    if not isinstance(first, Tensor) or first.dim() != 3:
        raise proof.Unproved(f"its {contract.first} is not one weight for all experts")
    return proof.Case(instance, first.size(1 if contract.transposed else 2), first.size(0))


def _entry(site: Site) -> Match | Refusal:
    original = site.owner.get(site.attribute) or site.owner["grouped_mm"]
    original = getattr(original, "__wrapped__", original) if site.attribute == NAME else original
    if not isinstance(original, FunctionType) or original.__code__.co_varnames[:4] != _PARAMETERS:
        return Refusal(f"its function does not take {', '.join(_PARAMETERS)}")
    return Match("for every class served", _through(original, _REPLACED.get(site.attribute, False)))


def _through(original: Callable[..., Tensor], batched: bool) -> Callable[..., Tensor]:
    def entry(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        served = getattr(type(self), SERVED, None)
        if served is None:
            return original(self, hidden_states, top_k_index, top_k_weights)
        result: Tensor = served(self, hidden_states, top_k_index, top_k_weights, original, batched)
        return result

    return functools.update_wrapper(entry, original)
