"""One rotary function, and what its outputs on random inputs say about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.rope import formula
from npu_autopatch.kernels.rope.formula import HEADS, LAYOUTS, ROWS, SECTIONS, WIDER, WIDTH
from npu_autopatch.kernels.rope.replacement import Roles, fused_function
from npu_autopatch.kernels.rope.variant import (
    COMPLEX,
    DEINTERLEAVED,
    FIRST_HALF,
    FULL,
    HALF,
    HALF_SIZE,
    INTERLEAVED,
    Variant,
)
from npu_autopatch.ops import rotary as ops

Bound = dict[str, Any]
_INCOMING = 30  # the seed of incoming gradients
_FEW = 0.02
_USUAL = {"dtype": torch.float32, "table": torch.float32, "scale": 1.0, "wide": WIDTH, "rows": 0}


class Unproved(Exception):
    """Ends a probe; the message is the reason of the refusal."""


class Probe:
    """A function of the signature given, called with arguments by name."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self.function, self.signature = function, signature
        named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.required = [p.name for p in named if p.default is p.empty]
        if len(self.required) < 3:  # tensors that are insisted on in truth, now and then
            absent = [name for name, default in self.defaults.items() if default is None]
            self.required = [p.name for p in named][: 4 if len(absent) >= 3 else 0]
        self.options = [name for name in self.defaults if name not in self.required]
        self.order = list(signature.parameters)
        self.failure = ""
        self.known: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}  # outputs of the original that are needed twice

    def case(self) -> tuple[Roles, Variant]:
        """The roles of the parameters and the variant. Raises `Unproved`."""
        roles, variant, layout = self.form()
        roles = self.unsqueezing(roles, variant, layout)
        variant = self.extent(roles, variant, layout)
        roles = self.ignoring(roles, variant, layout)
        variant = self.arithmetic(roles, variant, layout)
        self.prove(roles, variant, layout)
        return roles, variant

    def candidates(self) -> Iterator[tuple[Roles, str]]:
        """What the parameters insisted on may be, and the lookup of the tables."""
        names = tuple(self.required)
        if len(names) == 3:
            yield Roles(names[:1], names[1:]), ""
            yield Roles(names[:2], names[2:]), ""
        elif len(names) == 4:
            yield Roles(names[:2], names[2:]), ""
        elif len(names) in (5, 6):
            count = len(names) - 3
            yield Roles(names[:count], names[count : count + 2], lookup=names[-1]), "positions"
            yield Roles(names[:count], names[count : count + 2], lookup=names[-1]), "sections"

    def form(self) -> tuple[Roles, Variant, str]:
        """What fp32 shows: roles, variant, and the layout of the inputs in which they were found."""
        for roles, lookup in self.candidates():
            for width in (WIDTH, WIDTH // 2):
                if (width == WIDTH) and len(roles.tables) == 1:
                    continue
                for layout, unsqueeze in _PLACES:
                    variant = Variant("", "", lookup, unsqueeze=unsqueeze)
                    outcome = self.attempt(self.arguments(roles, variant, layout, width=width))
                    if outcome is None:
                        continue
                    for form in _FORMS:
                        if (form.table == COMPLEX) != (len(roles.tables) == 1):
                            continue
                        if (form.table in (FULL, FIRST_HALF)) != (width == WIDTH):
                            continue
                        found = form.but(lookup=lookup, unsqueeze=unsqueeze, flat=layout == "SND")
                        for sine_first in (False, True):
                            if sine_first and len(roles.tables) == 1:
                                continue
                            tables = roles.tables[::-1] if sine_first else roles.tables
                            said = replace(roles, tables=tables)
                            if self.agrees(outcome, said, found, layout):
                                return said, found, layout
                    self.why_not(outcome, roles, variant, layout, width)
        raise Unproved(self.failure or "no arguments were found that it rotates")

    def why_not(self, outcome: tuple[Tensor, ...], roles: Roles, variant: Variant, layout: str, width: int) -> None:
        self.failure = "what it returns is no rotation of its inputs by its tables"
        if len(roles.tables) == 1:
            return
        forms = [f for f in _FORMS if f.table != COMPLEX and (f.table in (FULL, FIRST_HALF)) == (width == WIDTH)]
        for form in forms:
            form = form.but(lookup=variant.lookup, unsqueeze=variant.unsqueeze)
            if self.agrees(outcome, roles, form, layout, sign=-1.0):
                raise Unproved("it rotates the other way: its sine has the opposite sign")

    def arguments(
        self,
        roles: Roles,
        variant: Variant,
        layout: str,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        table: torch.dtype = torch.float32,
        width: int = 0,
        wide: int = WIDTH,
        rows: int = 0,
    ) -> Bound:
        """Arguments by name. `width` is that of the tables, `wide` that of the inputs, `rows` their last but one.

        The tables are given in the order of the parameters, whichever of them is cos.
        """
        if not width:
            width = WIDTH if variant.table in (FULL, FIRST_HALF) else WIDTH // 2
        bound: Bound = {}
        for seed, (name, heads) in enumerate(zip(roles.inputs, HEADS, strict=False)):
            inputs = LAYOUTS[layout][0](heads)
            bound[name] = formula.sample(dtype, scale, seed, *(inputs if not rows else (*inputs[:-1], rows)), wide)
        lead: tuple[int, ...] = LAYOUTS[layout][1]
        if variant.lookup == "positions":
            lead = (ROWS,)
            bound[roles.lookup] = formula.positions()
        elif variant.lookup == "sections":
            lead = (3, *lead)
            bound[roles.lookup] = SECTIONS
        tables = formula.tables(table, len(roles.tables) == 1, *lead, width)
        return bound | dict(zip(sorted(roles.tables, key=self.order.index), tables, strict=True))

    def attempt(self, bound: Bound) -> tuple[Tensor, ...] | None:
        try:
            return self.run(self.function, bound)
        except Unproved:
            return None

    def run(self, function: Callable[..., Any], bound: Bound) -> tuple[Tensor, ...]:
        """The outputs, in a tuple. Raises `Unproved`."""
        tensors = [value for value in bound.values() if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in tensors]
        try:
            outcome = function(**bound)
        except Exception as error:
            raise Unproved(f"it fails on a probe: {type(error).__name__}: {error}") from error
        finally:
            written = versions != [tensor._version for tensor in tensors]
            if written:
                formula.sample.cache_clear()
                formula.tables.cache_clear()
                formula.positions.cache_clear()
        if written:
            raise Unproved("it writes to its inputs")
        found = outcome if type(outcome) is tuple and len(outcome) > 1 else (outcome,)
        if any(type(t) is not Tensor for t in found):
            raise Unproved(f"it returns {type(outcome).__name__}, not what it was given, rotated")
        return found

    def expected(self, roles: Roles, variant: Variant, bound: Bound, unsqueeze: int | None) -> list[Tensor]:
        cos, sin = formula.real_and_imaginary(variant, tuple(bound[name] for name in roles.tables))
        return [formula.exact(variant, bound[name], cos, sin, unsqueeze) for name in roles.inputs]

    def agrees(
        self, outcome: tuple[Tensor, ...], roles: Roles, variant: Variant, layout: str, sign: float = 1.0, **how: Any
    ) -> bool:
        """Whether `outcome` is what the variant computes, in fp32."""
        bound = self.arguments(roles, variant, layout, **how)
        if sign < 0:
            bound[roles.tables[1]] = -bound[roles.tables[1]]
        try:
            expected = self.expected(roles, variant, bound, variant.unsqueeze)
        except (RuntimeError, IndexError):
            return False
        same = len(outcome) == len(expected)
        return same and all(formula.close(got, right) for got, right in zip(outcome, expected, strict=True))

    def holds(self, roles: Roles, variant: Variant, layout: str, extra: Bound | None = None, **how: Any) -> bool:
        """Whether the function and the variant agree on such arguments."""
        outcome = self.attempt(self.arguments(roles, variant, layout, **how) | (extra or {}))
        return outcome is not None and self.agrees(outcome, roles, variant, layout, **how)

    def unsqueezing(self, roles: Roles, variant: Variant, layout: str) -> Roles:
        """The roles with the argument that says where the heads are."""
        if variant.unsqueeze not in (1, 2) or layout not in ("BNSD", "BSND"):
            return roles
        other, where = ("BSND", 2) if layout == "BNSD" else ("BNSD", 1)
        for name in self.options:
            same = self.defaults[name] == variant.unsqueeze and type(self.defaults[name]) is int
            if same and self.holds(roles, variant.but(unsqueeze=where), other, {name: where}):
                return replace(roles, unsqueeze=name)
        return roles

    def extent(self, roles: Roles, variant: Variant, layout: str) -> Variant:
        """The variant with the inputs it also takes: wider ones, longer ones, other ranks."""
        for side in ("first", "last"):
            if self.holds(roles, variant.but(partial=side), layout, wide=WIDER):
                variant = variant.but(partial=side)
                break
        ranks = []
        for other in _ALIKE[variant.unsqueeze] if not variant.lookup else (layout,):
            if other == layout or self.holds(roles, variant, other):
                bound = self.arguments(roles, variant, other)
                ranks.append((bound[roles.inputs[0]].dim(), bound[roles.tables[0]].dim()))
        if variant.unsqueeze is None and layout == "BNSD of one row":
            longer = variant.but(tail=True)
            if self.holds(roles, longer, layout, rows=ROWS):
                variant = longer
        return variant.but(ranks=tuple(dict.fromkeys(ranks)))

    def ignoring(self, roles: Roles, variant: Variant, layout: str) -> Roles:
        """The roles with the options that have no effect, such as the positions of older versions."""
        ignored = []
        for name in self.options:
            absent = name != roles.unsqueeze and self.defaults[name] is None
            if absent and self.holds(roles, variant, layout, {name: formula.positions()}):
                ignored.append(name)
        return replace(roles, ignored=tuple(ignored))

    def arithmetic(self, roles: Roles, variant: Variant, layout: str) -> Variant:
        """The variant with the dtypes of its arithmetic and of its result."""
        low = torch.bfloat16
        mixed = self.original(roles, variant, layout, dtype=low)
        result = {torch.float32: "promoted", low: "own"}.get(mixed[0].dtype, "")
        if not result or any(got.dtype != mixed[0].dtype for got in mixed):
            raise Unproved(f"from bfloat16 with float32 tables it makes {mixed[0].dtype}".replace("torch.", ""))
        for compute, dtype in (("float64", torch.float32), ("float32", low)):
            bound = self.arguments(roles, variant, layout, dtype=dtype, table=dtype)
            wide = {name: self.wide(value, compute) for name, value in bound.items()}
            got = self.original(roles, variant, layout, dtype=dtype, table=dtype)[0]
            right = self.expected(roles, variant, wide, variant.unsqueeze)[0].to(dtype)
            # rounded once: another order of the wider operations moves few values
            if got.shape == right.shape and (got != right).float().mean() < _FEW:
                return variant.but(compute=compute, result=result)
        return variant.but(compute="promoted", result=result)

    def original(self, roles: Roles, variant: Variant, layout: str, **how: Any) -> tuple[Tensor, ...]:
        """Its outputs for such arguments, computed once."""
        key = tuple(sorted((name, value) for name, value in how.items() if value != _USUAL.get(name)))
        key = tuple((name, str(value)) for name, value in key)
        if key not in self.known:
            self.known[key] = self.run(self.function, self.arguments(roles, variant, layout, **how))
        return self.known[key]

    @staticmethod
    def wide(value: Any, compute: str = "float64") -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_complex():
            return value.to(torch.complex128 if compute == "float64" else torch.complex64)
        return value.to(getattr(torch, compute)) if value.is_floating_point() else value

    def prove(self, roles: Roles, variant: Variant, layout: str) -> None:
        """The replacement against the original, and both against fp64; then the gradients. Raises `Unproved`."""
        fused = fused_function(_unguarded, self.signature, roles, variant, ops.reference, ("cpu",))
        low = torch.bfloat16
        extent = {"wide": WIDER if variant.partial else WIDTH, "rows": ROWS if variant.tail else 0}
        pairs = [(torch.float32, torch.float32), (low, low), (low, torch.float32)]
        for dtype, table in pairs[variant.compute == "float64" : 2 if variant.table == COMPLEX else 3]:
            for scale in (1.0, 60.0) if dtype is table else (1.0,):
                how: dict[str, Any] = {"dtype": dtype, "scale": scale, "table": table, **extent}
                bound = self.arguments(roles, variant, layout, **how)
                theirs, mine = self.original(roles, variant, layout, **how), self.run(fused, bound)
                wide = {name: self.wide(value) for name, value in bound.items()}
                exact = _flat(self.expected(roles, variant, wide, variant.unsqueeze))
                # a unit of the values that are added, not of a sum that may cancel
                unit = probing.ulp(exact.new_full((1,), scale), theirs[0].dtype)
                alike = [(got.dtype, got.shape) for got in mine] == [(got.dtype, got.shape) for got in theirs]
                if not alike or not probing.no_worse(_flat(mine), _flat(theirs), exact, unit, most=16):
                    where = f"{dtype} at scale {scale:g}".removeprefix("torch.")
                    raise Unproved(f"in {where} it is not the rotation that it is in float32 at scale 1")
        self.prove_gradients(roles, variant, layout)

    def prove_gradients(self, roles: Roles, variant: Variant, layout: str) -> None:
        """The original's gradients are those of its formula. Raises `Unproved`."""
        bound = self.arguments(roles, variant, layout)
        leaves = {name: bound[name].clone().requires_grad_() for name in roles.inputs}
        outcome = self.run(self.function, bound | leaves)
        right = self.expected(roles, variant, bound | leaves, variant.unsqueeze)
        incoming = [formula.sample(torch.float32, 1.0, _INCOMING, *out.shape) for out in outcome]
        if not all(out.requires_grad for out in outcome):
            raise Unproved("its output carries no gradient")
        needed = list(leaves.values())
        found = torch.autograd.grad(outcome, needed, incoming, allow_unused=True)
        expected = torch.autograd.grad(right, needed, [g.to(r.dtype) for g, r in zip(incoming, right, strict=True)])
        if any(got is None or not formula.close(got, want) for got, want in zip(found, expected, strict=True)):
            raise Unproved("its gradient is not that of the rotation it computes")


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])[None]


def _unguarded(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the guard of the replacement turns its own probe away")


# layouts of the inputs with the dimension the tables get, the common ones first
_PLACES: tuple[tuple[str, int | None], ...] = (
    ("BNSD", 1),
    ("SND", -2),
    ("BSND", 2),
    ("BNSD of one row", None),
    ("BSND", -2),
    ("BSND of one row", 1),
    ("BNSD of rank 4", None),
    ("BSD", None),
)
# where else the heads may be, by the dimension the tables get
_ALIKE: dict[int | None, tuple[str, ...]] = {
    1: ("BNSD", "SND", "BSND of one row"),
    2: ("BSND",),
    -2: ("SND", "BSND"),
    None: ("BNSD of one row", "BNSD of rank 4", "BSD"),
}
_FORMS = (
    Variant(HALF, FULL),
    Variant(INTERLEAVED, FULL),
    Variant(INTERLEAVED, FIRST_HALF),
    Variant(DEINTERLEAVED, FIRST_HALF),
    Variant(DEINTERLEAVED, FULL),
    Variant(HALF, FIRST_HALF),
    Variant(HALF, HALF_SIZE),
    Variant(INTERLEAVED, HALF_SIZE),
    Variant(DEINTERLEAVED, HALF_SIZE),
    Variant(INTERLEAVED, COMPLEX),
)
