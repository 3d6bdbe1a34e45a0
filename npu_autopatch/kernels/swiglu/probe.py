"""Which gated MLP a forward computes, from what a few runs of it show."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.swiglu.activations import FUNCTIONS
from npu_autopatch.kernels.swiglu.forward import in_fp32, in_own_dtype
from npu_autopatch.kernels.swiglu.trace import HALVES, LEAD, NotGated, Run, Unproved
from npu_autopatch.kernels.swiglu.variant import Variant

SILU = nn.SiLU()
# Shapes of inputs without the last dimension. Who treats the first three alike, does so with the others.
_FEW, _OTHERS = ((), (1, 1), (2, 1, 2, 2)), ((3,), LEAD, (2, 3, 2))


def recognise(cls: Any, original: FunctionType) -> Variant:
    """The variant of `cls` as its forward shows it, to be proved. Raises `Unproved`."""
    variant = traced(cls, original)
    if len(variant.after) > 1:
        _may_only_drop(cls, variant)
    given = given_parts(variant)
    variant = _with_ranks(cls, original, variant, given)
    theirs = run(cls, original, given, dtype=torch.bfloat16)
    for upcast in (False, True):
        mine = expected(replace(variant, upcast=upcast), theirs)
        if mine.dtype is theirs.product.dtype and torch.equal(mine, theirs.product):
            return replace(variant, upcast=upcast)
    raise Unproved("in bfloat16 it rounds like neither a product in that dtype nor one in float32")


def given_parts(variant: Variant) -> dict[str, Any]:
    """What its attributes are in the runs of a proof: SiLU for the activation, 0 for a probability of dropout."""
    given: dict[str, Any] = {variant.activation: SILU} if variant.activation else {}
    return {**given, variant.tail: 0.0} if variant.tail else given


def run(cls: type[nn.Module], forward: Any, given: dict[str, Any], **settings: Any) -> Run:
    """One forward, in training. Raises `Unproved`, also where the output is not what the last module returned."""
    one = Run(cls, **settings, **given)
    output = one.output = one.through(forward)
    if not one.after or not one.passed_on(output):
        raise Unproved("its output in training is not what the last of its modules returned")
    return one


def expected(variant: Variant, one: Run, kind: str = "") -> Tensor:
    """The product of a run in plain torch, by the bits what a forward of this variant computes."""
    product = in_fp32 if variant.upcast else in_own_dtype
    return product(FUNCTIONS[kind or variant.function or "silu"], *gate_and_up(variant, one))


def gate_and_up(variant: Variant, one: Run) -> tuple[Tensor, Tensor]:
    """What is activated, and what it is multiplied by, in a run."""
    wholes = list(one.projected.values())
    both = wholes if variant.separate else [half(wholes[0]) for half in HALVES]
    return both[variant.gate], both[1 - variant.gate]


@functools.lru_cache(maxsize=1)  # a class is traced when it is found, and again when it is proved
def traced(cls: Any, original: FunctionType) -> Variant:
    """What calls what, from one run in fp32 and in evaluation. Raises `Unproved`."""
    one = Run(cls)
    output = one.trace(original)
    projections, unused = tuple(one.projected), one.unused()
    computes = f"; it computes with {', '.join(unused)}" if unused else ""
    if len(projections) not in (1, 2):
        raise NotGated(f"it calls {len(projections) or 'no'} modules with its input{', '.join(('', *projections))}")
    if not one.after:
        raise NotGated(f"it multiplies nothing that it passes on to a module{computes}")
    gate, function = _gate(one)
    if gate is None:
        kind = NotGated if one.activated is None else Unproved
        raise kind(f"what {one.after[0][0]} gets is not an activated gate times another projection{computes}")
    if not one.passed_on(output):
        raise Unproved(f"its output is not what the last of its modules returned{computes}")
    if one.weight_of != one.cast:
        raise Unproved(f"its forward reads {one.weight_of}.weight")
    if len(unused) > 1 or (unused and "dropout" not in original.__code__.co_names):
        raise Unproved(f"it reads {', '.join(unused)}, which its class cannot show")
    after = tuple(name for name, _, _ in one.after)
    activation = one.activated[0] if one.activated else ""
    if len({*projections, *after, activation}) < len((*projections, *after, activation)):
        raise Unproved("it calls one of its modules twice")
    option = original.__code__.co_argcount == 3
    return Variant(projections, gate, activation, function, after, one.cast, "".join(unused), option=option)


def _gate(one: Run) -> tuple[int | None, str]:
    """Which projection, or half of one, is activated, and by which function if by no part; None if none is."""
    wholes = list(one.projected.values())
    both = wholes if len(wholes) == 2 else [half(wholes[0]) for half in HALVES]
    functions = FUNCTIONS
    if one.activated is not None:
        functions = {"": FUNCTIONS["silu"]}
        source = one.source(one.activated[1])
        if len(wholes) == 1 and source == (0, None):
            raise NotGated(f"its input first goes through {one.calls[0]}")
    for name, function in functions.items():
        for gate in (0, 1):
            right = function(both[gate]) * both[1 - gate]
            if one.product.shape == right.shape and torch.equal(one.product, right):
                return gate, name
    return None, ""


def _may_only_drop(cls: type[nn.Module], variant: Variant) -> None:
    """After the product comes one projection; what else there is, the constructor must show to be a dropout."""
    built = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        init = vars(base).get("__init__")
        scope = getattr(init, "__globals__", {})
        for name in probing.operations(cls, init)[0]:
            value = scope.get(name, getattr(nn, name, None))
            if isinstance(value, type) and issubclass(value, nn.Module):
                built.append(value)
    drops = any(issubclass(value, nn.modules.dropout._DropoutNd) for value in built)
    norms = sorted({value.__name__ for value in built if "norm" in value.__name__.lower()})
    if len(variant.after) > 2 or not drops or norms:
        extra = f" ({', '.join(norms)})" if norms else ""
        raise Unproved(f"it passes the product through {' and '.join(variant.after)}, not one projection{extra}")


def _with_ranks(cls: type[nn.Module], original: FunctionType, variant: Variant, given: dict[str, Any]) -> Variant:
    """The variant with the ranks it treats alike: all, or three alone where it takes the halves by a view."""
    few = [lead for lead in _FEW if _alike(cls, original, variant, given, lead)]
    if len(few) == len(_FEW):
        return variant
    alike = [*few, *(lead for lead in _OTHERS if _alike(cls, original, variant, given, lead))]
    if LEAD not in alike:
        raise Unproved("in training it computes something else than in evaluation")
    if (1, 1) not in alike:
        raise Unproved("it computes something else for inputs of some shapes")
    viewed = not variant.separate and "view" in original.__code__.co_names
    ranks = (3,) if viewed else tuple(sorted({len(lead) + 1 for lead in alike}))
    return replace(variant, viewed=viewed, ranks=ranks)


def _alike(cls: type[nn.Module], original: FunctionType, variant: Variant, given: dict[str, Any], lead: Any) -> bool:
    try:
        one = run(cls, original, given, lead=lead)
    except Unproved:
        return False
    right = expected(variant, one)
    return one.product.shape == right.shape and torch.equal(one.product, right)
