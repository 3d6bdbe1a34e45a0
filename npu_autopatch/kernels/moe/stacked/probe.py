"""What a module of stacked experts computes: found by running it beside the candidates of its form."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe import proof, tiny
from npu_autopatch.kernels.moe.experts import unselected
from npu_autopatch.kernels.moe.proof import TOKENS, Unproved
from npu_autopatch.kernels.moe.stacked.formula import Products, down_product, first_products, weighted
from npu_autopatch.kernels.moe.stacked.forward import Variant
from npu_autopatch.kernels.moe.stacked.gate import HALVES, INTERLEAVED, SEPARATE, Gate, middle
from npu_autopatch.kernels.moe.stacked.layout import Layout, Sizes, layouts
from npu_autopatch.kernels.moe.stacked.settings import guards, holding

# What an argument is, as its name hints: it only chooses what is tried first.
_HINTS = (("hidden", " x ", "input"), ("ind", "expert"), ("weight", "prob", "score", "top"))
_BATCHES = 2
_SETTINGS = (0.9, 1.3, 1.7, 2.1)  # of float attributes, low enough for a clamp to show


class Case(proof.Case):
    """Inputs of experts whose dense routing weights are zero for experts that a token does not have."""

    def weights(self, dense: bool) -> Tensor:
        few = super().weights(False)
        few[0, 1] = 0.0  # also for one that it has
        return torch.zeros(TOKENS, self.experts).scatter(1, self.ids(), few) if dense else few


class Failed(Unproved):
    """A call of the original raised something: these are no arguments for it."""


class Elsewhere(TorchFunctionMode):
    """Tensors say that they are on no device that a forward may know."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.device.__get__:  # type: ignore[attr-defined]
            return SimpleNamespace(type="elsewhere")
        return function(*args, **(kwargs or {}))


class Probe:
    """An instance of a class of experts, its forward, and what the forward is found to compute."""

    def __init__(self, cls: type[nn.Module], original: FunctionType) -> None:
        self.original = original
        self.instance = tiny.build(cls)
        code = original.__code__
        self.parameters = code.co_varnames[1 : code.co_argcount]
        self.names, self.methods = probing.operations(cls, original)
        for child in self.instance.children():
            if next(child.parameters(), None) is not None:  # it holds the weights, and may be called
                self.names = self.names | probing.operations(type(child), type(child).forward)[0]
        self.failure = ""
        self.routing: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self.modes = (True, False) if "training" in self.names else (True,)
        self.floats = {
            name: value
            for name, value in probing.settings_of(self.instance).items()
            if isinstance(value, float) and name in self.names
        }
        self.set(dict(zip(self.floats, _SETTINGS, strict=False)))

    def variant(self) -> Variant:
        """What the forward computes, as fp32 shows it. Raises `Unproved`."""
        variant, sizes = self.found()
        self.activation(variant)
        variant = self.children(variant)
        variant = self.numbers(variant, sizes)
        if not variant.batched:
            variant = self.extent(variant)
        self.evaluation(variant)
        self.set(self.floats)
        return variant

    def set(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            setattr(self.instance, name, value)

    def found(self) -> tuple[Variant, Sizes]:
        allowed = list(layouts(self.instance))
        if not allowed:
            raise Unproved("its parameters are not the stacked weights of two products")
        failed = True
        for variant in self.roles():
            outcomes: dict[Any, Tensor | None] = {}
            for layout, sizes in allowed:
                self.case = Case(self.instance, sizes.hidden, sizes.named)
                key = sizes.hidden, sizes.named
                outcome = outcomes[key] if key in outcomes else outcomes.setdefault(key, self.attempt(variant))
                if outcome is None:
                    continue
                failed, self.expected = False, outcome
                if outcome.numel() != TOKENS * sizes.hidden * (sizes.experts if variant.batched else 1):
                    continue
                gate = self.gate(variant.but(layout=layout), outcome.reshape(-1, sizes.hidden))
                if gate is not None:
                    return variant.but(layout=layout, gate=gate), sizes
        if failed:
            raise Unproved(f"it fails on a probe: {self.failure}")
        raise Unproved("what it computes between its products, or around them, is of no known form")

    def gate(self, variant: Variant, outcome: Tensor) -> Gate | None:
        """The gate with which a layout gives the `outcome`; None if none does."""
        inputs = self.inputs(variant)
        with torch.no_grad():
            products = first_products(self.instance, variant.layout, inputs[0], variant.batched)
            for gate in self.gates(variant.layout):
                try:
                    expected = self.formula(variant.but(gate=gate), products, *inputs)
                except Exception:  # a method of the class, or a part, that is none
                    continue
                if close(outcome, expected):
                    return gate
        return None

    def roles(self) -> Iterator[Variant]:
        """What the arguments may be, what their names hint at first."""
        anything = Variant(Layout("", ""), Gate(HALVES))
        if len(self.parameters) == 1:
            yield anything
            return

        def unlikely(places: tuple[int, ...]) -> int:
            said = zip(places, _HINTS, strict=True)
            return -sum(hint in f" {self.parameters[place]} " for place, hints in said for hint in hints)

        orders = sorted(itertools.permutations(range(len(self.parameters)), 3), key=unlikely)
        for inputs, dense, rank in itertools.product(orders, (False, True), (3, 2)):
            yield anything.but(inputs=inputs, dense=dense, ranks=(rank,))

    def gates(self, layout: Layout) -> Iterator[Gate]:
        splits = (SEPARATE,) if layout.second else (HALVES, INTERLEAVED)
        for split, first in itertools.product(splits, (True, False)):
            for held, module in ((False, self.instance), (True, getattr(self.instance, layout.holder or "", None))):
                if module is None or (held and not layout.holder):
                    continue
                parts = {**module._modules, **probing.settings_of(module)}
                for name, part in parts.items():
                    reads = self.names if not held else probing.operations(type(module), type(module).forward)[0]
                    if name in reads and name != layout.holder and callable(part):
                        yield Gate(split, first, act=name, held=held)
            if "silu" in self.names:
                yield Gate(split, first)
            for alpha, limit in itertools.permutations(self.floats, 2):
                yield Gate(split, first, alpha=alpha, limit=limit)
        if not layout.second:
            for name, method in self.methods.items():
                if method.__code__.co_argcount == 2:
                    yield Gate(HALVES, method=name)

    def arguments(
        self, variant: Variant, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None
    ) -> list[Any]:
        """Arguments in their order; what is of no use to a forward is dense weights."""
        if variant.batched:
            return [x]
        if variant.ranks[0] == 3:
            x = x.view(_BATCHES, -1, x.size(-1))
        given: list[Any] = [torch.rand(TOKENS, self.case.experts, generator=torch.Generator().manual_seed(5))] * len(
            self.parameters
        )
        for place, value in zip(variant.inputs, (x, ids, weights), strict=True):
            given[place] = value
        return given

    def inputs(self, variant: Variant) -> tuple[Tensor, ...]:
        if variant.batched:
            return (probing.samples(self.case.experts * TOKENS, self.case.hidden),)
        key = self.case.experts, variant.dense
        if key not in self.routing:
            self.routing[key] = self.case.ids(), self.case.weights(variant.dense)
        return probing.samples(TOKENS, self.case.hidden), *self.routing[key]

    def run(self, variant: Variant, *inputs: Tensor) -> Tensor:
        """The output of the original, no gradient. Raises `Unproved`."""
        arguments = self.arguments(variant, *(inputs or self.inputs(variant)))
        versions = [argument._version for argument in arguments]
        try:
            with torch.no_grad():
                output = self.original(self.instance, *arguments)
        except Exception as error:
            words = str(error).partition("\n")[0]
            raise Failed(f"{type(error).__name__}: {words}") from error
        if versions != [argument._version for argument in arguments]:
            probing.samples.cache_clear()
            raise Unproved("it writes to its inputs")
        if type(output) is not Tensor:
            raise Unproved(f"it returns {type(output).__name__}, not hidden states")
        return output

    def attempt(self, variant: Variant, *inputs: Tensor) -> Tensor | None:
        try:
            return self.run(variant, *inputs)
        except Failed as failed:
            self.failure = str(failed)
            return None

    def formula(self, variant: Variant, products: Products, *inputs: Tensor) -> Tensor:
        """What a variant computes, in plain torch: [tokens, hidden]."""
        gated = middle(variant.gate, unselected)(self.instance, products.holder, products.first, products.second)
        every = down_product(gated, products)
        if variant.batched:
            return every.flatten(0, 1)
        x, ids, weights = inputs
        return weighted(every, x, ids, weights, variant.dense, self.case.experts)

    def agrees(self, variant: Variant, outcome: Tensor, *inputs: Tensor) -> bool:
        """Whether `outcome`, [tokens, hidden], is what the variant computes."""
        inputs = inputs or self.inputs(variant)
        with torch.no_grad():
            products = first_products(self.instance, variant.layout, inputs[0], variant.batched)
            return close(outcome, self.formula(variant, products, *inputs))

    def holds(self, variant: Variant, *inputs: Tensor) -> bool:
        outcome = self.attempt(variant, *inputs)
        return outcome is not None and self.agrees(variant, outcome.reshape(-1, self.case.hidden), *inputs)

    def activation(self, variant: Variant) -> None:
        """Whatever the instance holds as its activation is what activates. Raises `Unproved`."""
        gate = variant.gate
        if not gate.act:
            return
        holder = getattr(self.instance, variant.layout.holder) if gate.held else self.instance
        if not holding(holder, gate.act, nn.Tanh(), functools.partial(self.holds, variant)):
            raise Unproved(f"it does not always activate by {gate.act}")

    def children(self, variant: Variant) -> Variant:
        """The variant with the children that it does without. Raises `Unproved`."""
        bypassed = []
        for name, child in self.instance.named_children():
            if name == variant.layout.holder or (type(child) is nn.Identity and name in self.names):
                bypassed.append((name, type(child)))
            elif name in self.reads(variant) and name != variant.gate.act:
                raise Unproved(f"it calls {name}, a {type(child).__name__}")
        return variant.but(bypassed=tuple(bypassed))

    def reads(self, variant: Variant) -> Iterable[str]:
        """The names its forward comes upon outside a method of its own that is called as before."""
        return self.original.__code__.co_names if variant.gate.method else self.names

    def numbers(self, variant: Variant, sizes: Sizes) -> Variant:
        """The variant with the attributes on which it depends besides. Raises `Unproved`."""
        gate, layout = variant.gate, variant.layout
        # read at each call, or by what is called as before
        known = {gate.act, gate.alpha, gate.limit, layout.flattened}
        names = set(self.reads(variant)) - known
        measured, fixed = guards(self.instance, names, vars(sizes), functools.partial(self.unmoved, variant))
        if layout.holder:
            child = getattr(self.instance, layout.holder)
            if any(guards(child, self.names - known, {}, functools.partial(self.unmoved, variant))):
                raise Unproved(f"what {layout.holder} holds changes what it computes")
        return variant.but(sizes=measured, fixed=fixed)

    def unmoved(self, variant: Variant) -> bool:
        """Whether each mode fails, or gives what it gave."""
        outcomes = [self.attempt(variant) for _ in self.each_mode()]
        return all(outcome is None or close(outcome, self.expected) for outcome in outcomes)

    def each_mode(self) -> Iterator[None]:
        """The instance in training, and in evaluation if the forward asks which it is."""
        for training in self.modes:
            self.instance.train(training)
            yield
        self.instance.train()

    def extent(self, variant: Variant) -> Variant:
        """The variant with the inputs it also takes."""
        x, ids, weights = self.inputs(variant)
        flat = self.attempt(variant.but(ranks=(2,)))
        if flat is not None and self.agrees(variant, flat.reshape(TOKENS, -1)):
            unsqueezes = flat.dim() == 3
            variant = variant.but(ranks=(3, 2) if variant.ranks == (3,) else (2,), unsqueezes=unsqueezes)
        if not variant.layout.identity:
            elsewhere = ids.clone()
            elsewhere[1, 0] = self.case.experts
            kept = weights.clone()
            if variant.dense:
                kept[1, ids[1, 0]] = 0.0
            variant = variant.but(masked=self.holds(variant, x, elsewhere, kept))
        self.instance.to(torch.bfloat16)
        outcomes = [self.attempt(variant, x.bfloat16(), ids, weights) for _ in self.each_mode()]
        self.instance.float()
        return variant.but(mixed=all(y is not None and y.dtype is torch.bfloat16 for y in outcomes))

    def evaluation(self, variant: Variant) -> None:
        """In evaluation it computes the same, for each rank. Raises `Unproved`."""
        self.instance.eval()
        for rank in variant.ranks[: len(self.modes)]:
            if not self.holds(variant.but(ranks=(rank,))):
                raise Unproved("in evaluation it computes something else than in training")
        if {"device", "type"} <= self.names:
            with torch._C._EnableTorchFunction(), Elsewhere():
                outcome = self.attempt(variant)
            if outcome is not None and not self.agrees(variant, outcome.reshape(-1, self.case.hidden)):
                raise Unproved("on other devices it computes something else than on the CPU")
        self.instance.train()


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two results in fp32 are the same but for rounding."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool((one - other).abs().max() <= 1e-5 * other.abs().max())
