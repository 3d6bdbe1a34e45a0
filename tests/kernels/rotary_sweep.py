"""All rotary functions of the installed transformers, patched, and each compared with its original in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import npu_autopatch
from npu_autopatch.kernels import rope
from npu_autopatch.kernels.rope.replacement import Roles
from npu_autopatch.kernels.rope.variant import COMPLEX, FIRST_HALF, FULL, Variant
from tests.kernels.exact import CallsOf, InDouble, error_in_ulps
from tests.kernels.modeling import modules

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTH, WIDTH, WIDER, POSITIONS = 6, 12, 20, 9
HEADS = (5, 3, 4)
SECTIONS = [1, 2, 3]


@dataclass(frozen=True)
class Rotary:
    """One patched function: its original and replacement, and how it is called."""

    name: str
    original: Any
    fused: Any
    roles: Roles
    variant: Variant


@dataclass(frozen=True)
class Case:
    """One way of calling."""

    dtype: torch.dtype = torch.float32
    table: torch.dtype = torch.float32
    scale: float = 1.0
    batch: int = 2
    ranks: tuple[int, int] = (4, 3)
    unsqueeze: int | None = 1
    wide: bool = False
    strided: bool = False
    length: int = LENGTH
    rows: int | None = None  # of the table, if its batch is another


def sweep(backend: str) -> tuple[dict[str, Any], list[Rotary]]:
    """The report's row of every site found, and the patched ones."""
    known = modules()
    with npu_autopatch.patched(kernels="rope", backend=backend) as report:
        rows = {row.name: row for row in report.sites if row.module in known and row.kernel == "rope"}
        fused = {row.name: vars(known[row.module]).get(row.name.rpartition(".")[2]) for row in rows.values()}
    found = []
    for row in rows.values():
        if row.state == "patched":
            original = getattr(known[row.module], row.name.rpartition(".")[2])
            roles, variant = rope._case(original, original)
            found.append(Rotary(row.name, original, fused[row.name], roles, variant))
    return rows, found


def cases(rotary: Rotary) -> Iterator[Case]:
    """Dtypes, scales, batches, every proved rank, where the heads are, partly rotated inputs, strides, one token."""
    for ranks in rotary.variant.ranks:
        first = Case(ranks=ranks, unsqueeze=rotary.variant.unsqueeze)
        yield from (Case(d, d, s, 2, ranks, first.unsqueeze) for d in DTYPES for s in (1.0, 60.0))
        if rotary.variant.table != COMPLEX:
            yield from (Case(d, torch.float32, 1.0, 2, ranks, first.unsqueeze) for d in DTYPES[1:])
            yield Case(torch.float32, torch.bfloat16, 1.0, 2, ranks, first.unsqueeze)
        yield Case(torch.bfloat16, torch.bfloat16, 1.0, 1, ranks, first.unsqueeze)
        yield Case(torch.bfloat16, torch.bfloat16, 1.0, 2, ranks, first.unsqueeze, strided=True)
        yield Case(torch.bfloat16, torch.bfloat16, 1.0, 2, ranks, first.unsqueeze, length=1)
        if ranks == (4, 3):
            yield Case(torch.bfloat16, torch.bfloat16, 1.0, 2, ranks, first.unsqueeze, rows=1)
            yield Case(torch.bfloat16, torch.bfloat16, 1.0, 2, ranks, first.unsqueeze, rows=1, strided=True)
        if rotary.roles.unsqueeze and (ranks == (4, 3) or rotary.variant.lookup == "positions"):
            yield Case(torch.bfloat16, torch.bfloat16, 1.0, 2, ranks, 3 - (first.unsqueeze or 1))
        if rotary.variant.partial:
            yield Case(torch.float32, torch.float32, 60.0, 2, ranks, first.unsqueeze, wide=True)
            yield Case(torch.bfloat16, torch.bfloat16, 1.0, 2, ranks, first.unsqueeze, wide=True, strided=True)


def arguments(rotary: Rotary, case: Case) -> dict[str, Any]:
    """Arguments by name; the same for the same case."""
    roles, variant = rotary.roles, rotary.variant
    generator = torch.Generator().manual_seed(6)
    width = WIDER if case.wide else WIDTH
    bound: dict[str, Any] = {}
    for name, heads in zip(roles.inputs, HEADS, strict=False):
        shape, swap = _shape(rotary, case, heads), None
        if case.strided and len(shape) > 2:  # as attention's queries are: heads and tokens swapped in memory
            shape, swap = (*shape[:-2], shape[-1], shape[-2]), (-3, -2)
        x = torch.randn(*shape, width, generator=generator) * case.scale
        bound[name] = (x.transpose(*swap) if swap else x).to(case.dtype)
    lead: tuple[int, ...] = {
        2: (case.length,),
        3: (case.rows or case.batch, case.length),
        4: (1, 1, case.length),
    }[case.ranks[1]]
    if variant.lookup == "positions":
        lead = (POSITIONS,)
        bound[roles.lookup] = torch.randint(0, POSITIONS, (case.batch, case.length), generator=generator)
    elif variant.lookup == "sections":
        lead = (3, case.batch, case.length)
        bound[roles.lookup] = list(SECTIONS)
    across = WIDTH if variant.table in (FULL, FIRST_HALF) else WIDTH // 2
    angles = torch.randn(2, *lead, across, generator=generator)
    if variant.table == COMPLEX:
        bound[roles.tables[0]] = torch.complex(angles[0].cos(), angles[1].sin())
    else:
        bound |= {roles.tables[0]: angles[0].cos().to(case.table), roles.tables[1]: angles[1].sin().to(case.table)}
    if roles.unsqueeze and case.unsqueeze != rotary.variant.unsqueeze:
        bound[roles.unsqueeze] = case.unsqueeze
    return bound


def _shape(rotary: Rotary, case: Case, heads: int) -> tuple[int, ...]:
    if case.ranks == (3, 2):
        return (case.length, heads)
    if case.ranks == (3, 3):
        return (case.batch, case.length)
    one_row = case.ranks == (4, 2) and not rotary.variant.lookup
    if case.unsqueeze in (2, -2) or (one_row and case.unsqueeze == 1):
        return (case.batch, case.length, heads)
    return (case.batch, heads, case.length)


def worse(rotary: Rotary, case: Case, device: str = "cpu") -> list[Any]:
    """What of outputs and gradients is of another dtype, shape or stride, or more than an ulp less exact."""
    bound = arguments(rotary, case)
    here = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in bound.items()}
    theirs = _run(rotary.original, rotary, here)
    with CallsOf("npu_rotary_mul") as calls, CallsOf("npu_rotary_mul_backward") as backward:
        mine = _run(rotary.fused, rotary, here)
    wanted = len(rotary.roles.inputs)
    if rotary.variant.compute == "float64" and case.dtype is torch.float32:
        wanted = 0  # the original computes in fp64 there
    if (calls.count, backward.count) != (wanted, wanted):
        return [("not fused", calls.count, backward.count, wanted)]
    with InDouble():
        exact = _run(rotary.original, rotary, {name: _wide(value) for name, value in bound.items()})
    found: list[Any] = []
    for place, (got, expected, right) in enumerate(zip(mine, theirs, exact, strict=True)):
        if (got.dtype, got.shape) != (expected.dtype, expected.shape):
            found.append((place, got.dtype, got.shape, expected.dtype, expected.shape))
            continue
        if not torch.isfinite(expected).all():
            continue
        errors = [error_in_ulps(y.cpu(), right, expected.dtype, by_row=True) for y in (got, expected)]
        if errors[0] > errors[1] + 1:
            found.append((place, "errors in ulps", *errors))
    return found


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _run(function: Any, rotary: Rotary, bound: dict[str, Any]) -> list[Tensor]:
    """The outputs, then the gradients of the inputs."""
    leaves = {name: bound[name].detach().clone(memory_format=torch.preserve_format) for name in rotary.roles.inputs}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    outcome = function(**{**bound, **leaves})
    outputs = list(outcome) if isinstance(outcome, tuple) else [outcome]
    generator = torch.Generator().manual_seed(7)
    incoming = [torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device) for out in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    return [out.detach() for out in outputs] + list(gradients)
