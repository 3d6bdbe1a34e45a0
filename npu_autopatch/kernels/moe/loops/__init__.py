"""Blocks that loop over a list of experts, as transformers 4 and remote code write them.

The routing is not reproduced: the function's own statements run, to the bit. Only the loop is cut out of them, and one
call of the grouped products stands in its place. What the loop is given and what it leaves behind is told by values,
on a tiny instance.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.moe import tiny
from npu_autopatch.kernels.moe.base import MoESite
from npu_autopatch.kernels.moe.experts import selector_of, unselected
from npu_autopatch.kernels.moe.loops import experts
from npu_autopatch.kernels.moe.loops.cut import Cut, Loop, cut
from npu_autopatch.kernels.moe.loops.exact import Bank
from npu_autopatch.kernels.moe.loops.probe import Inputs, loops, observed, possible, recognised, with_branch
from npu_autopatch.kernels.moe.loops.proof import OtherDtype, Proof
from npu_autopatch.kernels.moe.loops.replacement import replacement
from npu_autopatch.kernels.moe.loops.source import Source, read, undecorated
from npu_autopatch.kernels.swiglu.probe import recognise
from npu_autopatch.kernels.swiglu.trace import Unproved
from npu_autopatch.kernels.swiglu.variant import Variant
from npu_autopatch.ops import grouped_matmul

# One of these is how rows of some tokens are taken out.
_SELECTING = {"where", "index_add_", "nonzero", "argsort", "one_hot", "bincount", "masked_select", "index_select"}
_TIMES = {5, 18}  # arguments of BINARY_OP; before Python 3.11 there were instructions for them


def find(module: ModuleType) -> Iterator[Site]:
    """The methods of `module` that loop and take rows out, of classes that build a list of what may be gated MLPs."""
    for cls in probing.classes(module):
        init = _constructor(cls)
        if init is None:
            continue
        for name, method in vars(cls).items():
            if not isinstance(method, FunctionType) or name == "__init__":
                continue
            if _may_be_one(init, undecorated(method).__code__):
                where = site_name(module.__name__, cls.__name__)
                yield MoESite(module.__name__, where, cls, name, sys.modules[__name__])


def _constructor(cls: type[nn.Module]) -> FunctionType | None:
    """The constructor, its own or inherited, that builds a collection of modules, or fills the one that it is."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        init = vars(base).get("__init__")
        if base is nn.ModuleList or not isinstance(init, FunctionType):
            continue
        if issubclass(cls, nn.ModuleList) or not {"ModuleList", "ModuleDict"}.isdisjoint(init.__code__.co_names):
            return init
    return None


def _may_be_one(init: FunctionType, code: CodeType) -> bool:
    """Whether a method loops over experts; that they are called so earns a refusal its row."""
    called_so = "experts" in code.co_names
    if not (called_so or _SELECTING & set(code.co_names)):
        return False
    if not any(dis.opname[op] == "FOR_ITER" for op in code.co_code[::2]):
        return False
    return called_so or _names_gated(init)


def _names_gated(init: FunctionType) -> bool:
    """Whether a constructor names a class that multiplies, as a gated MLP does."""
    codes = [init.__code__, *(const for const in init.__code__.co_consts if isinstance(const, CodeType))]
    return any(_multiplies(init.__globals__.get(name)) for code in codes for name in code.co_names)


def _multiplies(value: Any) -> bool:
    if not isinstance(value, type) or not issubclass(value, nn.Module):
        return False
    forward = _unpatched(value.forward)
    if not isinstance(forward, FunctionType) or forward.__code__.co_argcount != 2:
        return False
    steps = forward.__code__.co_code
    names = ((dis.opname[steps[place]], steps[place + 1]) for place in range(0, len(steps), 2))
    return any("MULTIPLY" in name or (name == "BINARY_OP" and argument in _TIMES) for name, argument in names)


def _unpatched(forward: Any) -> Any:
    """The forward of a class as it was before the kernel swiglu replaced it."""
    return forward.__wrapped__ if hasattr(forward, "__npu_autopatch__") else forward


def prove(site: Site, devices: tuple[str, ...]) -> Match | Refusal:
    """The function with one fused call in place of its loop, where its experts are plain gated MLPs."""
    cls, original = site.owner, vars(site.owner).get(site.attribute)
    init = _constructor(cls)
    if issubclass(cls, nn.ModuleList):
        return Refusal("it is the list of experts itself; a list that is an attribute would be served")
    if init is None or "ModuleList" not in init.__code__.co_names:
        return Refusal("its experts are in a dictionary, not in a list")
    try:
        source = read(original)
        instance = tiny.build(cls, ep_size=1)  # one process, where remote code asks how many
        block = _Block(source, instance)
        return block.proved(site, selector_of(cls), devices)
    except probing.BuildError as error:
        return Refusal(str(error) if _names_gated(init) else f"its constructor names no gated MLP, and {error}")
    except Unproved as unproved:
        return Refusal(str(unproved))


class _Block:
    """A function with a loop over a list of experts, and an instance it runs on."""

    def __init__(self, source: Source, instance: nn.Module) -> None:
        """Raises `Unproved`."""
        self.source, self.instance = source, instance
        found = loops(source, instance)
        if not found:
            self.source = source = with_branch(source, instance)
            found = loops(source, instance)
        if len(found) != 1:
            raise Unproved("no loop over a list of modules is among its statements" if not found else "it loops twice")
        self.place, self.attribute = found[0]
        self.experts = list(getattr(instance, self.attribute))
        kinds = {type(expert): None for expert in self.experts}
        if len(kinds) != 1:
            raise Unproved(f"its experts are of {len(kinds)} kinds: {', '.join(kind.__name__ for kind in kinds)}")
        self.cls: type[nn.Module] = next(iter(kinds))
        self.forward = _unpatched(self.cls.forward)
        self.variant = self._variant()
        self.bank = Bank.of(self.experts, self.variant)
        self.loop, self.inputs = self._loop()
        self.cut = cut(self.loop)

    def _variant(self) -> Variant:
        try:
            variant = recognise(self.cls, self.forward)
        except Unproved as unproved:
            raise Unproved(f"its experts are no gated MLPs: {self.cls.__name__}: {unproved}") from unproved
        if len(variant.after) > 1 or variant.tail or variant.cast:
            raise Unproved(f"its experts do more than a gated MLP: {self.cls.__name__}: {variant}")
        if any(
            type(getattr(e, n)) is not nn.Linear for e in self.experts for n in (*variant.projections, *variant.after)
        ):
            raise Unproved("its experts are not of plain linear layers")
        return variant

    def _loop(self) -> tuple[Loop, Inputs]:
        failed: Unproved | None = None
        for inputs in possible(self.source):
            try:
                with torch.no_grad():
                    seen = observed(self.source, self.instance, inputs.values(self.bank.hidden, self.bank.experts))
                return recognised(self.source, self.place, self.attribute, seen, self.bank), inputs
            except Unproved as unproved:
                failed = failed or unproved
            except Exception as error:
                words = str(error).partition("\n")[0]
                failed = failed or Unproved(f"it fails on a probe: {type(error).__name__}: {words}")
        raise failed or Unproved("it takes more than hidden states, chosen experts and their weights")

    def proved(self, site: Site, select: Any, devices: tuple[str, ...]) -> Match:
        """Raises `Unproved`."""
        loop, variant, reference = self.loop, self.variant, grouped_matmul.REFERENCE
        most = loop.before[loop.roles.ids].size(-1)
        settings, chosen = _settings(self.cut, self.instance, self.bank, most)
        gather = experts.gathered(variant, self.cls, self.forward, unselected)
        collect = experts.collector(loop.attribute, settings, gather, reference, ("cpu",))
        function = self.source.slot
        for wide in (False, True):
            fused = experts.fused(variant, reference, wide)
            replaced = replacement(loop, self.cut, self.inputs, collect, fused, _turned_away, chosen)
            try:
                Proof(self.instance, loop, variant, gather, fused).prove(function, replaced, self.inputs)
                break
            except OtherDtype:
                if wide:
                    raise
            self.instance.float()
        available = grouped_matmul.op()
        gather = experts.gathered(variant, self.cls, self.forward, select)
        slot = (site.owner, site.attribute, function)
        collect = experts.collector(loop.attribute, settings, gather, available, devices, slot)
        fused = experts.fused(variant, available, wide)
        replaced = replacement(loop, self.cut, self.inputs, collect, fused, function, chosen)
        return Match(f"listed, {str(variant).partition(',')[0]}", replaced)


def _settings(
    cut: Cut, instance: nn.Module, bank: Bank, most: int
) -> tuple[Callable[[Any, int, int], bool], list[tuple[str, ...]]]:
    """Whether an instance has what the loop depended on as the probe had it, given its experts and hidden size.

    And the numbers that were as many as the experts of a token.
    """
    chosen: list[tuple[str, ...]] = []
    counts: list[tuple[str, ...]] = []
    widths: list[tuple[str, ...]] = []
    constants: list[tuple[tuple[str, ...], Any]] = []
    for chain in cut.settings:
        value = _value(instance, chain)
        if value is None or isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            constants.append((chain, value))
        elif isinstance(value, int) and value == bank.experts:
            counts.append(chain)
        elif isinstance(value, int) and value == bank.hidden:
            widths.append(chain)
        elif isinstance(value, int) and value == most:
            chosen.append(chain)
        else:
            raise Unproved(f"its loop depends on self.{'.'.join(chain)}")

    def settings(self: Any, count: int, width: int) -> bool:
        for chain in counts:
            if _value(self, chain) != count:
                return False
        for chain in widths:
            if _value(self, chain) != width:
                return False
        return all(_value(self, chain) == value for chain, value in constants)

    return settings, chosen


def _value(instance: Any, chain: tuple[str, ...]) -> Any:
    for name in chain:
        instance = getattr(instance, name)
    return instance


def _turned_away(*arguments: Any, **named: Any) -> Tensor:
    raise RuntimeError("the guard of the replacement turns its own probe away")
