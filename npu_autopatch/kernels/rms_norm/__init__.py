"""RMS norms: found and proved by what their forward computes.

A class is looked at where its forward reaches a root and a mean. Whether it is a norm, and which, the outputs of
a tiny instance on random inputs say. The proof proper runs the replacement itself on the op's formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType, ModuleType

from torch import nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match, Refusal, Site, site_name
from npu_autopatch.kernels.rms_norm.forward import fused_forward
from npu_autopatch.kernels.rms_norm.probe import Probe, Unproved
from npu_autopatch.ops import rms_norm as ops

_ROOTS = {"rsqrt", "sqrt", "pow", "rms_norm", "vector_norm", "normalize"}
_MEANS = {"mean", "sum", "rms_norm", "vector_norm", "normalize"}


class RMSNormKernel:
    """Replaces the forward of norm classes by `npu_rms_norm`."""

    name = "rms_norm"

    def missing(self) -> str:
        return ops.capability().missing

    def find(self, module: ModuleType) -> Iterator[Site]:
        """The classes of `module` that may be an RMS norm, and those that are called one."""
        for cls in probing.classes(module):
            # The name only earns a class a line in the report that says why it is none.
            if not _inherits_from_a_site(cls) and (
                not _not_a_norm(cls) or "rmsnorm" in cls.__name__.lower().replace("_", "")
            ):
                yield Site(module.__name__, site_name(module.__name__, cls.__name__), cls, "forward")

    def prove(self, site: Site, devices: tuple[str, ...]) -> Match | Refusal:
        """The fused forward of the class, with one case for each setting of its switches that is proved."""
        cls, original = site.owner, site.owner.forward
        if reason := _not_a_norm(cls) or _composite(cls):
            return Refusal(reason)
        try:
            cases = [Probe(cls).case()]
        except (Unproved, probing.BuildError) as unproved:
            return Refusal(str(unproved))
        pinned = cases[0][1].pinned
        for name, default in (probing.switches(cls) if pinned else {}).items():
            if name in pinned:
                try:
                    cases.append(Probe(cls, **{name: not default}).case())
                except (Unproved, probing.BuildError):
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
    code = cls.forward.__code__
    if code.co_argcount not in (2, 3) or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return f"its forward takes {inspect.signature(cls.forward)}, not an input and at most a gate"
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
