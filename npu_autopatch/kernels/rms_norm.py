"""RMS norms: found and proved by what their forward computes.

A class is looked at where its forward reaches a root and a mean. Whether it is a norm, and which, the outputs of
a tiny instance on random inputs say. The proof proper runs the replacement itself on the op's formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels import rms_norm_formula as formula
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.rms_norm_formula import EPS, SIZE
from npu_autopatch.kernels.rms_norm_forward import Conditions, Variant, fused_forward
from npu_autopatch.ops import rms_norm as ops

_ROOTS = {"rsqrt", "sqrt", "pow", "rms_norm", "vector_norm", "normalize"}
_MEANS = {"mean", "sum", "rms_norm", "vector_norm", "normalize"}


class _Unproved(Exception):
    """Ends a probe; the message is the reason of the refusal."""


class RMSNormKernel:
    """Replaces the forward of norm classes by `npu_rms_norm`."""

    name = "rms_norm"

    def missing(self) -> str:
        return ops.capability().missing

    def find(self, module: ModuleType) -> Iterator[Site]:
        """The classes of `module` that may be an RMS norm, and those that are called one."""
        for cls in probing.classes(module):
            # The name only earns a class a line in the report that says why it is none.
            if not _inherits_from_a_site(cls) and (not _not_a_norm(cls) or "rmsnorm" in cls.__name__.lower().replace("_", "")):
                yield Site(module.__name__, site_name(module.__name__, cls.__name__), cls, "forward")

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """The fused forward of the class, with one case for each setting of its switches that is proved."""
        cls, original = site.owner, site.owner.forward
        if reason := _not_a_norm(cls) or _composite(cls):
            return Refusal(reason)
        try:
            cases = [_Probe(cls).case()]
        except (_Unproved, probing.BuildError) as unproved:
            return Refusal(str(unproved))
        for name, default in probing.switches(cls).items():
            if name in cases[0][1].pinned:
                try:
                    cases.append(_Probe(cls, **{name: not default}).case())
                except (_Unproved, probing.BuildError):
                    continue  # the guard sends such an instance to the original
        forward = original
        for variant, conditions in reversed(cases):
            forward = fused_forward(original, forward, variant, conditions, ops.op(), devices)
        return Match(" or ".join(dict.fromkeys(str(variant) for variant, _ in cases)), forward)


KERNEL = RMSNormKernel()


def _inherits_from_a_site(cls: type[nn.Module]) -> bool:
    """Whether the forward comes from a class of a modeling module, whose patch serves this one too."""
    owner = next((base for base in cls.__mro__ if "forward" in vars(base)), nn.Module)
    return owner is not cls and not owner.__module__.startswith("torch.")


def _not_a_norm(cls: type[nn.Module]) -> str:
    """Why the code of the forward cannot be that of a norm; empty if it can."""
    if not isinstance(cls.forward, FunctionType):
        return f"its forward is a {type(cls.forward).__name__}, not a plain function"
    names, _ = probing.operations(cls, cls.forward)
    if not (names & _ROOTS and names & _MEANS):
        return "its own forward normalises nothing: it takes no root of a mean"
    if hasattr(cls.forward, "__wrapped__"):
        return "its forward is wrapped in another function"
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if len(parameters) not in (1, 2) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return f"its forward takes ({', '.join(map(str, parameters))}), not an input and at most a gate"
    return ""


def _composite(cls: type[nn.Module]) -> str:
    """What other modules the class is built of; such a class is not built for a probe."""
    names, _ = probing.operations(cls, cls.__init__)
    scope = cls.__init__.__globals__ if isinstance(cls.__init__, FunctionType) else {}
    modules = sorted(
        name
        for name in names
        for value in (scope.get(name, getattr(nn, name, None)),)
        if isinstance(value, type) and issubclass(value, nn.Module) and value not in cls.__mro__
    )
    return f"it is built of other modules ({', '.join(modules)}), not a norm alone" if modules else ""


class _Probe:
    """One instance of a norm class, and what its outputs say about it."""

    def __init__(self, cls: type[nn.Module], **settings: Any) -> None:
        self.cls = cls
        self.instance = probing.build(cls, SIZE, **settings)
        self.gated = cls.forward.__code__.co_argcount == 3
        if children := [name for name, _ in self.instance.named_children()]:
            raise _Unproved(f"its forward runs other modules ({', '.join(children)})")
        self.tensors = dict((*self.instance.named_parameters(), *self.instance.named_buffers()))
        self.seeds = {name: seed for seed, name in enumerate(self.tensors, start=2)}
        self.set_dtype(torch.float32)
        self.eps_value = EPS

    def case(self) -> tuple[Variant, Conditions]:
        """The variant and the conditions it holds under. Raises `_Unproved`."""
        outcome = self.run()
        if outcome.shape != (2, 3, SIZE):
            raise _Unproved(f"it returns shape {tuple(outcome.shape)} for an input of (2, 3, {SIZE}), no norm of it")
        variant = self.groups(self.formula())
        variant = self.rounding(variant)
        conditions = self.conditions(variant)
        self.prove(variant, conditions)
        if variant.groups:
            setattr(self.instance, variant.groups, SIZE // 2 if variant.groups_are_sizes else 2)
            self.prove(variant, conditions)
        return variant, conditions

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Random weights, the same for each instance, in `dtype`."""
        for name, tensor in self.tensors.items():
            tensor.data = formula.sample(dtype, 1.0, self.seeds[name], *tensor.shape)

    def run(self, dtype: torch.dtype = torch.float32, scale: float = 1.0, *lead: int, forward: Any = None) -> Tensor:
        """The output for an input, and a gate, of ``(*lead, SIZE)``."""
        shape = (*(lead or (2, 3)), SIZE)
        inputs = [formula.sample(dtype, scale, 0, *shape), formula.sample(dtype, 1.0, 1, *shape)]
        return self.call(forward or self.cls.forward, *inputs[: 1 + self.gated])

    def call(self, forward: Callable[..., Any], *inputs: Tensor) -> Tensor:
        try:
            outcome = forward(self.instance, *inputs)
        except Exception as error:
            line = f"its forward fails on {tuple(inputs[0].shape)} {inputs[0].dtype}: {type(error).__name__}: {error}"
            raise _Unproved(line) from error
        if type(outcome) is not Tensor:
            raise _Unproved(f"it returns {type(outcome).__name__}, not one tensor")
        return outcome

    def attempt(self, attribute: str, value: Any) -> Tensor | None:
        """The output with an attribute set to `value`, or None where that fails; the attribute stays set."""
        setattr(self.instance, attribute, value)
        try:
            return self.run()
        except _Unproved:
            return None

    def expected(self, variant: Variant, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        groups = getattr(self.instance, variant.groups) if variant.groups else 0
        return formula.exact(variant.form, self.seeds.get(variant.weight), self.eps_value, groups, dtype, scale)

    def forms(self) -> Iterator[Variant]:
        """Every formula this class may have, in fp32."""
        gates = [(g, a) for g in ("post", "pre") for a in formula.ACTIVATIONS] if self.gated else [("", "")]
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
            for dtype in ops.FLOATS:
                self.set_dtype(dtype)
                outcome = self.run(dtype, 1e-4).double()
                for eps in (torch.finfo(torch.float32).eps, torch.finfo(dtype).eps):
                    self.eps_value = eps
                    if torch.allclose(outcome, self.expected(form, dtype, 1e-4), rtol=2e-2, atol=1e-3):
                        found.append(eps)
                        break
        except _Unproved:
            found = []
        self.set_dtype(torch.float32)
        self.eps_value = EPS
        setattr(self.instance, name, EPS)
        return tuple(found) if len(found) == len(ops.FLOATS) else ()

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
        shifted = self.call(self.cls.forward, *(formula.sample(torch.float32, 1.0, i, 2, 3, SIZE) + 3 * (i == 0) for i in range(1 + self.gated)))
        raise _Unproved(formula.why_not(outcome, shifted, [t.data for t in self.tensors.values() if t.shape == (SIZE,)]))

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
        self.set_dtype(torch.float32)
        seed, groups = self.seeds.get(variant.weight), getattr(self.instance, variant.groups) if variant.groups else 0
        best, fewest = None, 0.05  # an order of fp32 operations that is not ours moves few values of a half result
        for rounding in formula.ROUNDINGS:
            for offset_rounded in (False, True)[: 1 + variant.offset]:
                candidate = variant.but(rounding=rounding, offset_rounded=offset_rounded)
                wrong = formula.mismatch(candidate.form, seed, self.eps_value, groups, outcomes)
                if wrong < fewest:
                    best, fewest = candidate, wrong
        if best is None and formula.rounds_each_step(variant.form, seed, self.eps_value, groups, outcomes):
            best = variant.but(rounding="no_upcast")
        if best is None:
            dtypes = ", ".join(f"{x} and {w} give {out.dtype}" for (x, w), out in outcomes.items())
            raise _Unproved(f"in half precision it rounds like no known norm ({dtypes.replace('torch.', '')})")
        return best

    def conditions(self, variant: Variant) -> Conditions:
        """What must hold of an instance: the settings without which this one computes something else."""
        expected, pinned, sizes = self.run(), {}, []
        self.instance.eval()
        if not torch.equal(self.run(), expected):
            raise _Unproved("it does something else in evaluation than in training")
        self.instance.train()
        for name, value in probing.settings_of(self.instance).items():
            if name in (variant.eps, variant.groups):
                continue
            delattr(self.instance, name)
            try:
                if torch.equal(self.run(), expected):
                    continue
            except _Unproved:
                pass
            finally:
                setattr(self.instance, name, value)
            if value == (SIZE,) or isinstance(value, int) and not isinstance(value, bool) and value == SIZE:
                sizes.append(name)
            elif value is None or isinstance(value, (bool, int, float, str)):
                pinned[name] = value
            else:
                raise _Unproved(f"its forward reads {name}, a {type(value).__name__}, which no guard can hold fast")
        ranks = tuple(rank for rank, lead in ((2, (2,)), (3, (2, 3)), (4, (2, 2, 5))) if self.keeps_shape(*lead))
        methods = probing.operations(self.cls, self.cls.forward)[1]
        return Conditions(pinned, tuple(sizes), methods, ranks, self.keeps_shape(2, 1))

    def keeps_shape(self, *lead: int) -> bool:
        try:
            return self.run(torch.float32, 1.0, *lead).shape == (*lead, SIZE)
        except _Unproved:
            return False

    def prove(self, variant: Variant, conditions: Conditions) -> None:
        """The replacement, on the op's formula, against the original: values, dtypes and gradients."""
        fused = fused_forward(self.cls.forward, _unguarded, variant, conditions, ops.reference, ("cpu",))
        for dtype in (torch.float32, torch.bfloat16):
            self.set_dtype(dtype)
            for scale in (1.0, 60.0):
                mine, theirs = self.run(dtype, scale, forward=fused), self.run(dtype, scale)
                if not probing.no_worse(mine, theirs, self.expected(variant, dtype, scale), most=16):
                    where = f"{dtype} at scale {scale:g}".removeprefix("torch.")
                    raise _Unproved(f"in {where} it is not the norm that it is in float32 at scale 1")
        self.set_dtype(torch.float32)
        for mine, theirs in zip(self.gradients(fused), self.gradients(self.cls.forward), strict=True):
            if not formula.close(mine, theirs.double()):
                raise _Unproved("its gradient is not that of the norm it computes")

    def gradients(self, forward: Callable[..., Any]) -> list[Tensor]:
        """For the input, the gate and each parameter; zeros where none arrives."""
        inputs = [formula.sample(torch.float32, 1.0, i, 2, 3, SIZE).clone().requires_grad_() for i in range(1 + self.gated)]
        needed = [*inputs, *(t for t in self.tensors.values() if t.requires_grad)]
        outcome = self.call(forward, *inputs)
        if not outcome.requires_grad:
            raise _Unproved("its output carries no gradient")
        incoming = formula.sample(torch.float32, 1.0, 9, 2, 3, SIZE)
        found = torch.autograd.grad(outcome, needed, incoming, allow_unused=True)
        return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(needed, found, strict=True)]


def _unguarded(self: Any, *inputs: Any) -> None:
    raise RuntimeError("the guard of the replacement turns its own probe away")
