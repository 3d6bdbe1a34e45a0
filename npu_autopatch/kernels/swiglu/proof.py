"""The proof that the replacement of a recognised MLP computes what the original does."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.swiglu.activations import FUNCTIONS
from npu_autopatch.kernels.swiglu.forward import fused_forward
from npu_autopatch.kernels.swiglu.probe import SILU, expected, gate_and_up, given_parts, run
from npu_autopatch.kernels.swiglu.trace import Run, Unproved, factor
from npu_autopatch.kernels.swiglu.variant import Variant
from npu_autopatch.ops.swiglu import REFERENCE

_DTYPES = (torch.float32, torch.bfloat16)
_WEIGHTS = (torch.float32, torch.bfloat16, torch.int8)  # of a module whose weight's dtype the product is cast to
# Dtypes of two projections, and first of a single one, that are left to the original's own expression.
_UNLIKE = ((torch.float64, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
_LEAST = 1e-20  # below this a sigmoid in fp32 has lost its bits, the original's as much as ours


class Proof:
    """Original and replacement side by side, on the same parts."""

    def __init__(self, cls: type[nn.Module], original: FunctionType, variant: Variant) -> None:
        self.cls, self.original, self.variant, self.given = cls, original, variant, given_parts(variant)
        self.fused = fused_forward(original, _unguarded, variant, _select, REFERENCE, ("cpu",))

    def prove(self) -> None:
        """Raises `Unproved`."""
        variant = self.variant
        for dtype in _DTYPES:
            for scale in (1.0, 60.0):
                self.values(dtype, scale, variant.function or "silu")
        for unlike in _UNLIKE if variant.separate else _UNLIKE[:1]:
            self.same(dtype=torch.bfloat16, dtypes=unlike, result=torch.float16)
        self.gradients()
        if _branches(self.original.__code__):
            self.branches()
        if variant.tail:
            self.tail()

    def values(self, dtype: torch.dtype, scale: float, kind: str) -> None:
        """The original has the bits of its formula, the replacement those of the op, and that is no less exact."""
        theirs = run(self.cls, self.original, self.given, dtype=dtype, scale=scale)
        fused = run(self.cls, self.fused, self.given, dtype=dtype, scale=scale, gradients=True)
        by_formula, by_op, op_is_no_worse = _products(self.variant.form, kind, dtype, scale)
        pairs = ((theirs.product, by_formula), (fused.product, by_op))
        if not op_is_no_worse or fused.calls != theirs.calls or not all(_equal(*pair) for pair in pairs):
            where = f"{dtype} at scale {scale:g}".removeprefix("torch.")
            raise Unproved(f"in {where} it is not the product that it is in float32 at scale 1")

    def same(self, **settings: Any) -> None:
        """With dtypes the op does not take: the same calls with the same bits."""
        theirs, mine = (run(self.cls, forward, self.given, **settings) for forward in (self.original, self.fused))
        for (_, x, _), (_, y, _) in zip(theirs.after, mine.after, strict=True):
            if theirs.calls != mine.calls or not _equal(x, y):
                raise Unproved("its modules get something else where the dtypes of the projections are not alike")

    def gradients(self) -> None:
        """The original's gradients are those of its formula, which are the op's."""
        theirs = run(self.cls, self.original, self.given, gradients=True)
        if not theirs.output.requires_grad:
            raise Unproved("its output carries no gradient")
        found = torch.autograd.grad(theirs.output.sum(), [*theirs.projected.values()], allow_unused=True)
        variant = self.variant
        right = _gradients(variant.form, variant.function or "silu", len(variant.after))
        for mine, exact in zip(found, right, strict=True):
            if mine is None or not (torch.equal(mine, exact) or torch.allclose(mine, exact, rtol=1e-4, atol=1e-5)):
                raise Unproved("its gradient is not that of the product it computes")

    def branches(self) -> None:
        """Where the forward branches, it is for its option or for the dtype of a weight; no module is optional."""
        variant = self.variant
        if not variant.cast and not variant.option:
            raise Unproved("its forward branches on what a probe cannot show")
        for name in (*variant.projections, *variant.after, *filter(None, (variant.activation,))):
            try:
                Run(self.cls, **{**self.given, name: None}).through(self.original)
            except Unproved:
                continue
            raise Unproved(f"its forward does without {name} where that is None")
        if variant.cast:
            for weight in _WEIGHTS:
                self.same(dtype=torch.bfloat16, weight=weight)
                self.same(dtype=torch.float32, weight=weight)

    def tail(self) -> None:
        """The number it reads is the probability of a functional dropout at its end, which draws what ours does."""
        state = torch.get_rng_state()
        for training, probability in ((False, 0.5), (True, 0.0), (True, 0.5), (True, 1.0)):
            outputs = []
            for forward in (self.original, self.fused):
                torch.set_rng_state(state)
                one = Run(self.cls, **{**self.given, self.variant.tail: probability})
                outputs.append(one.through(forward, training))
            kept = one.after[-1][2] / (1 - probability) if training and probability < 1 else one.after[-1][2]
            dropped = outputs[0] == 0 if training else torch.zeros_like(outputs[0], dtype=torch.bool)
            if not torch.equal(*outputs) or not bool(((outputs[0] == kept) | dropped).all()):
                raise Unproved(f"it computes with {self.variant.tail}, which is no dropout at its end")


@functools.cache
def _products(form: Variant, kind: str, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, bool]:
    """The product by the formula and by the op, and whether the op is no further from fp64 by more than one ulp."""
    one = Run(object, dtype=dtype, scale=scale)
    one.projected = dict(zip(form.projections, one.inputs[1:], strict=False))
    gate, up = gate_and_up(form, one)
    by_formula, op = expected(form, one, kind), getattr(REFERENCE, kind)
    by_op = op(torch.cat((gate, up), -1), True) if form.separate else op(one.inputs[1], form.gate == 0)
    exact = FUNCTIONS[kind](gate.double()) * up.double()
    # A gelu in fp32 takes the difference of two numbers near one: its error is that of its input.
    size = exact.abs().clamp_min(_LEAST) if kind == "silu" else gate.double() * up.double()
    return by_formula, by_op, probing.no_worse(by_op, by_formula, exact, probing.ulp(size, dtype), most=16)


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype is theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)


@functools.cache
def _gradients(form: Variant, kind: str, after: int) -> tuple[Tensor, ...]:
    """The gradients of each projection, of the sum of the output after so many modules."""
    one = Run(object, gradients=True)
    one.projected = dict(zip(form.projections, one.inputs[1:], strict=False))
    output = expected(form, one, kind)
    for index in range(after):
        output = output * factor(index, output.shape, torch.float32)
    return torch.autograd.grad(output.sum(), [*one.projected.values()])


def _select(act: Any) -> Any:
    """What the selector of a module would, for SiLU alone and the functions a forward may call itself.

    That the forward activates by what its instance holds, the trace has shown.
    """
    names: dict[Any, str] = {SILU: "silu", **{function: name for name, function in FUNCTIONS.items()}}
    return getattr(REFERENCE, names[act]) if act in names else None


def _branches(code: CodeType) -> bool:
    names = {dis.opname[op] for op in code.co_code[::2]}
    return any("JUMP" in name and "_IF_" in name for name in names)


def _unguarded(self: Any, *inputs: Any) -> None:
    raise RuntimeError("the guard of the replacement turns its own probe away")
