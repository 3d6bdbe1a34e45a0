"""One tiny instance of a norm class, and what its outputs on random inputs say about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.rms_norm import formula
from npu_autopatch.kernels.rms_norm.formula import EPS, SIZE
from npu_autopatch.kernels.rms_norm.forward import fused_forward
from npu_autopatch.kernels.rms_norm.variant import ACTIVATIONS, Conditions, Variant
from npu_autopatch.ops import rms_norm as ops
from npu_autopatch.ops.legality import FLOATS


class Unproved(Exception):
    """Ends a probe; the message is the reason of the refusal."""


class Probe:
    """One instance of a norm class, and what its outputs say about it."""

    def __init__(self, cls: type[nn.Module], **settings: Any) -> None:
        self.cls, self.original = cls, cast(FunctionType, cls.forward)
        self.instance = probing.build(cls, SIZE, **settings)
        self.gated = cls.forward.__code__.co_argcount == 3
        names, self.methods = probing.operations(cls, cls.forward)
        self.shared = self.class_attributes(names)
        if children := [name for name, _ in self.instance.named_children()]:
            raise Unproved(f"its forward runs other modules ({', '.join(children)})")
        self.tensors = dict((*self.instance.named_parameters(), *self.instance.named_buffers()))
        self.seeds = {name: seed for seed, name in enumerate(self.tensors, start=2)}
        self.set_dtype(torch.float32)
        self.eps_value = EPS
        self.known: dict[tuple[torch.dtype, float], Tensor] = {}  # outputs of the original that are needed twice

    def class_attributes(self, names: set[str]) -> dict[str, Any]:
        """What the forward may read from the class: set on the instance, to be tried and pinned like its own."""
        bases = [base for base in reversed(self.cls.__mro__) if base not in nn.Module.__mro__]
        own = {name: value for base in bases for name, value in vars(base).items()}
        shared = {}
        for name in names & own.keys():
            value = own[name]
            if hasattr(nn.Module, name) or isinstance(value, (FunctionType, staticmethod, type)):
                continue
            if value is not None and not isinstance(value, (bool, int, float, str)):
                raise Unproved(f"its forward reads {name} of its class, a {type(value).__name__}")
            if name not in vars(self.instance):
                shared[name] = value
                setattr(self.instance, name, value)
        return shared

    @torch.no_grad()
    def case(self) -> tuple[Variant, Conditions]:
        """The variant and the conditions it holds under. Raises `Unproved`."""
        outcome = self.run()
        if outcome.shape != (2, 3, SIZE):
            raise Unproved(f"it returns shape {tuple(outcome.shape)} for an input of (2, 3, {SIZE}), no norm of it")
        variant = self.groups(self.formula())
        variant = self.rounding(variant)
        conditions = self.conditions(variant)
        self.prove(variant, conditions)
        if variant.groups:
            self.known.clear()
            setattr(self.instance, variant.groups, SIZE // 2 if variant.groups_are_sizes else 2)
            self.prove(variant, conditions)
        return variant, conditions

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Random weights, the same for each instance, in `dtype`."""
        for name, tensor in self.tensors.items():
            tensor.data = formula.sample(
                dtype, 1.0, self.seeds[name], *tensor.shape
            ).clone()  # a forward may write to it

    def run(self, dtype: torch.dtype = torch.float32, scale: float = 1.0, *lead: int, forward: Any = None) -> Tensor:
        """The output for an input, and a gate, of ``(*lead, SIZE)``."""
        shape = (*(lead or (2, 3)), SIZE)
        inputs = [formula.sample(dtype, scale, 0, *shape), formula.sample(dtype, 1.0, 1, *shape)]
        return self.call(forward or self.original, *inputs[: 1 + self.gated])

    def call(self, forward: Callable[..., Any], *inputs: Tensor) -> Tensor:
        versions = [x._version for x in inputs]
        try:
            outcome = forward(self.instance, *inputs)
        except Exception as error:
            line = f"its forward fails on {tuple(inputs[0].shape)} {inputs[0].dtype}: {type(error).__name__}: {error}"
            raise Unproved(line) from error
        finally:
            written = versions != [x._version for x in inputs]
            if written:
                formula.sample.cache_clear()
        if written:
            raise Unproved("it writes to its input")
        if type(outcome) is not Tensor:
            raise Unproved(f"it returns {type(outcome).__name__}, not one tensor")
        return outcome

    def attempt(self, attribute: str, value: Any) -> Tensor | None:
        """The output with an attribute set to `value`, or None where that fails; the attribute stays set."""
        setattr(self.instance, attribute, value)
        try:
            return self.run()
        except Unproved:
            return None

    def what(self, variant: Variant) -> tuple[Variant, int | None, float, int]:
        """The formula of `variant` for this instance: its form, the weight's seed, eps and groups."""
        groups = getattr(self.instance, variant.groups) if variant.groups else 0
        return variant.form, self.seeds.get(variant.weight), self.eps_value, groups or 0

    def expected(self, variant: Variant, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return formula.exact(*self.what(variant), dtype, scale)

    def forms(self) -> Iterator[Variant]:
        """Every formula this class may have, in fp32."""
        gates = [(g, a) for g in ("post", "pre") for a in ACTIVATIONS] if self.gated else [("", "")]
        weights = [(name, offset) for name, t in self.tensors.items() if t.shape == (SIZE,) for offset in (0, 1)]
        for weight, offset in (*weights, ("", 0)):
            for gate, activation in gates:
                yield Variant("", weight, offset, gate=gate, activation=activation)

    def formula(self) -> Variant:
        """The variant as far as fp32 shows it; the attribute that holds eps is set to `EPS` from here on."""
        for name, value in probing.settings_of(self.instance).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                continue
            outcome = self.attempt(name, EPS)
            for form in self.forms():
                if outcome is not None and formula.close(outcome, self.expected(form)):
                    return form.but(eps=name, none_eps=self.none_eps(form, name) if value is None else ())
            setattr(self.instance, name, value)
        return self.with_constant_eps()

    def none_eps(self, form: Variant, name: str) -> tuple[float, ...]:
        """What an eps of None stands for in each dtype, as for torch's own RMSNorm; nothing if it is refused."""
        setattr(self.instance, name, None)
        found = []
        try:
            for dtype in FLOATS:
                self.set_dtype(dtype)
                outcome = self.run(dtype, 1e-4).double()
                for eps in (torch.finfo(torch.float32).eps, torch.finfo(dtype).eps):
                    self.eps_value = eps
                    if torch.allclose(outcome, self.expected(form, dtype, 1e-4), rtol=2e-2, atol=1e-3):
                        found.append(eps)
                        break
        except Unproved:
            found = []
        self.set_dtype(torch.float32)
        self.eps_value = EPS
        setattr(self.instance, name, EPS)
        return tuple(found) if len(found) == len(FLOATS) else ()

    def with_constant_eps(self) -> Variant:
        """A formula whose eps is no attribute: measured on inputs so small that it outweighs them."""
        outcome, small = self.run(), self.run(torch.float32, 1e-4)
        for form in self.forms():
            seed = self.seeds.get(form.weight)
            for eps in (0.0, formula.measured_eps(form, seed, small)):
                self.eps_value = eps
                both = ((outcome, 1.0), (small, 1e-4))
                if all(formula.close(got, self.expected(form, scale=scale)) for got, scale in both):
                    return form.but(eps=eps)
        x, gate = (formula.sample(torch.float32, 1.0, seed, 2, 3, SIZE) for seed in (0, 1))
        shifted = self.call(self.original, *[x + 3, gate][: 1 + self.gated])
        weights = [tensor.data for tensor in self.tensors.values() if tensor.shape == (SIZE,)]
        raise Unproved(formula.why_not(outcome, shifted, weights))

    def groups(self, variant: Variant) -> Variant:
        """The variant with the attribute that splits the last dimension into groups, if there is one."""
        for name, value in probing.settings_of(self.instance).items():
            if name == variant.eps or isinstance(value, bool) or not isinstance(value, (int, type(None))):
                continue
            for number, are_sizes in ((2, False), (SIZE // 2, True)):
                grouped = variant.but(groups=name, groups_are_sizes=are_sizes)
                outcome = self.attempt(name, number)
                found = outcome is not None and formula.close(outcome, self.expected(grouped))
                setattr(self.instance, name, value)
                if found:
                    return grouped
        return variant

    def rounding(self, variant: Variant) -> Variant:
        """The variant with the order in which a half input is rounded, from three pairs of dtypes."""
        outcomes = {}
        for x, weight in formula.PAIRS:
            self.set_dtype(weight)
            outcomes[x, weight] = self.run(x)
        self.known[torch.bfloat16, 1.0] = outcomes[torch.bfloat16, torch.bfloat16]
        self.set_dtype(torch.float32)
        best, fewest = None, 0.05  # an order of fp32 operations that is not ours moves few values of a half result
        for rounding in formula.ROUNDINGS:
            for offset_rounded in (False, True)[: 1 + variant.offset]:
                candidate = variant.but(rounding=rounding, offset_rounded=offset_rounded)
                wrong = formula.mismatch(*self.what(candidate), outcomes)
                if wrong < fewest:
                    best, fewest = candidate, wrong
            if not fewest:
                break
        if best is None and formula.rounds_each_step(*self.what(variant), outcomes):
            best = variant.but(rounding="no_upcast")
        if best is None:
            dtypes = ", ".join(f"{x} and {w} give {out.dtype}" for (x, w), out in outcomes.items())
            raise Unproved(f"in half precision it rounds like no known norm ({dtypes.replace('torch.', '')})")
        return best

    def conditions(self, variant: Variant) -> Conditions:
        """What must hold of an instance: the settings without which this one computes something else."""
        expected = self.known[torch.float32, 1.0] = self.run()
        pinned, sizes = {}, []
        self.instance.eval()  # from here on
        if not torch.equal(self.run(), expected):
            raise Unproved("it does something else in evaluation than in training")
        for name, value in probing.settings_of(self.instance).items():
            if name in (variant.eps, variant.groups):
                continue
            if name not in self.shared and not self.matters(name, value, expected):
                continue
            if value in (SIZE, (SIZE,)) and not isinstance(value, float):
                sizes.append(name)
            elif value is None or isinstance(value, (bool, int, float, str)):
                pinned[name] = value
            else:
                raise Unproved(f"its forward reads {name}, a {type(value).__name__}, which no guard can hold fast")
        return Conditions(pinned, tuple(sizes), self.methods, *self.shapes())

    def matters(self, name: str, value: Any, expected: Tensor) -> bool:
        """Whether the output is another, or none, without an attribute of the instance."""
        delattr(self.instance, name)
        try:
            return not torch.equal(self.run(), expected)
        except Unproved:
            return True
        finally:
            setattr(self.instance, name, value)

    def shapes(self) -> tuple[tuple[int, ...], bool]:
        """The ranks it treats alike, and whether a dimension of length one is like any other; rank 3 it has shown."""
        two, four_with_one = self.keeps_shape(2), self.keeps_shape(2, 2, 1)
        if two and four_with_one:
            return Conditions.ranks, True
        four = four_with_one or self.keeps_shape(2, 2, 5)
        return tuple(rank for rank, same in ((2, two), (3, True), (4, four)) if same), self.keeps_shape(2, 1)

    def keeps_shape(self, *lead: int) -> bool:
        try:
            return self.run(torch.float32, 1.0, *lead).shape == (*lead, SIZE)
        except Unproved:
            return False

    def prove(self, variant: Variant, conditions: Conditions) -> None:
        """The replacement, on the op's formula, against the original: values, dtypes and gradients."""
        fused = fused_forward(self.original, _unguarded, variant, conditions, ops.reference, ("cpu",))
        for dtype in (torch.float32, torch.bfloat16):
            self.set_dtype(dtype)
            for scale in (1.0, 60.0):
                mine, theirs = self.run(dtype, scale, forward=fused), self.known.get((dtype, scale))
                theirs = self.run(dtype, scale) if theirs is None else theirs
                unit = formula.ulps(*self.what(variant), dtype, scale, theirs.dtype)
                if not probing.no_worse(mine, theirs, self.expected(variant, dtype, scale), unit, most=16):
                    where = f"{dtype} at scale {scale:g}".removeprefix("torch.")
                    raise Unproved(f"in {where} it is not the norm that it is in float32 at scale 1")
        self.set_dtype(torch.float32)
        self.prove_gradients(variant)

    @torch.enable_grad()
    def prove_gradients(self, variant: Variant) -> None:
        """The original's gradients are those of its formula, which are the op's; other parameters get none."""
        seeds = range(1 + self.gated)
        inputs = [formula.sample(torch.float32, 1.0, seed, 2, 3, SIZE).clone().requires_grad_() for seed in seeds]
        weights = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        outcome = self.call(self.original, *inputs)
        if not outcome.requires_grad:
            raise Unproved("its output carries no gradient")
        incoming = formula.sample(torch.float32, 1.0, formula.INCOMING, 2, 3, SIZE)
        found = torch.autograd.grad(outcome, [*inputs, *weights.values()], incoming, allow_unused=True)
        expected = formula.gradients(*self.what(variant))
        right_of = dict(zip([*range(len(inputs)), variant.weight], expected, strict=False))
        for place, gradient in zip([*range(len(inputs)), *weights], found, strict=True):
            right = right_of.get(place)
            if (gradient is None) != (right is None) or (right is not None and not formula.close(gradient, right)):
                raise Unproved("its gradient is not that of the norm it computes")


def _unguarded(self: Any, *inputs: Any) -> None:
    raise RuntimeError("the guard of the replacement turns its own probe away")
