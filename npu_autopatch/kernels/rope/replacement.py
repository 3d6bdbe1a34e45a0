"""The fused function for a proved variant, under the original's own signature."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.kernels.rope.variant import COMPLEX, DEINTERLEAVED, HALF_SIZE, Variant, by_sections
from npu_autopatch.ops.legality import FLOATS, PLAIN, transformed
from npu_autopatch.ops.rotary import AS_IT_IS, SWAPPED, Rotation, lay, placement, rotated

_PLACE = "<npu_autopatch: {}>"
_HALVES = (torch.bfloat16, torch.float16)
_SOURCE = """
def replacement({parameters}):
    if {ready}:
        shape__ = shape_of__({shape})
        at__ = place__({first}, shape__)
        if at__{fit}:
            cos__, sin__ = tables__({tables})
            return {result}
    return original__({everything})
"""


@dataclass(frozen=True)
class Roles:
    """Which parameter is what. `inputs` are rotated, `tables` are cos and sin or one complex table.

    `lookup` holds the positions or sections, `unsqueeze` the dimension; empty if there is none. `ignored` have no
    effect; any other one must have its default, or else the original runs.
    """

    inputs: tuple[str, ...]
    tables: tuple[str, ...]
    lookup: str = ""
    unsqueeze: str = ""
    ignored: tuple[str, ...] = ()


def fused_function(
    original: Callable[..., Any],
    signature: inspect.Signature,
    roles: Roles,
    variant: Variant,
    op: Rotation,
    devices: tuple[str, ...],
) -> Callable[..., Any]:
    """A function with the parameters of `signature` that calls `op` where that is legal, and `original` elsewhere.

    Its code is put together from names, so that a call binds its arguments once, as the original's does. Its own end
    in two underscores, so that no parameter hides them.
    """
    declared, passed, pinned = [], [], []
    used = {*roles.inputs, *roles.tables, roles.lookup, roles.unsqueeze, *roles.ignored}
    scope: dict[str, Any] = {}
    star = False
    for place, parameter in enumerate(signature.parameters.values()):
        name, kind = parameter.name, parameter.kind
        if kind is parameter.VAR_KEYWORD:
            declared.append(f"**{name}")
            passed.append(f"**{name}")
            pinned.append(f"not {name}")
            continue
        if kind is parameter.KEYWORD_ONLY and not star:
            declared.append("*")
            star = True
        passed.append(f"{name}={name}" if kind is parameter.KEYWORD_ONLY else name)
        if parameter.default is parameter.empty:
            declared.append(name)
            continue
        default = f"default_{place}__"
        scope[default] = parameter.default
        declared.append(f"{name}={default}")
        if name not in used:
            number = type(parameter.default) in (int, float)  # which Dynamo may trace as a symbol
            pinned.append(f"type({name}) is type({default}) and {name} {'==' if number else 'is'} {default}")

    first, *others = roles.inputs
    tables = ", ".join(roles.tables)
    where = list(filter(None, (roles.lookup, roles.unsqueeze)))
    turns = [f"turn__({name}, cos__, sin__, at__)" for name in roles.inputs]
    ready = [f"ready__({first}, {tables})", *pinned]
    ready += [f"type({name}) in PLAIN__ and {name}.dtype is {first}.dtype" for name in others]
    ready += [f"looks_up__({roles.lookup})"] if roles.lookup else []
    source = _SOURCE.format(
        parameters=", ".join(declared),
        ready=" and ".join(ready),
        first=first,
        shape=", ".join([f"{first}.dim()", tables, *where]),
        tables=", ".join([f"{first}.dtype", "at__", tables, *where]),
        fit="".join(f" and place__({name}, shape__) == at__" for name in others),
        result=", ".join(turns),
        everything=", ".join(passed),
    )
    scope |= {
        "original__": original,
        "PLAIN__": PLAIN,
        "ready__": _ready(variant, devices, single=len(roles.tables) == 1),
        "looks_up__": _is_sections if variant.lookup == "sections" else _is_positions,
        "shape_of__": _shape(variant, roles),
        "place__": _place(variant),
        "tables__": _tables(variant, roles),
        "turn__": _turn(variant, op),
    }
    file = _PLACE.format(f"{original.__module__}.{getattr(original, '__qualname__', 'rotary')}")
    exec(compile(source, file, "exec"), scope)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks and traces
    replacement: Callable[..., Any] = scope.pop("replacement")
    return functools.update_wrapper(replacement, original)


def ours_undone(function: Any) -> Any:
    """The original of a function made here; any other one, also a wrapper around such a function, as it is."""
    function = getattr(function, "__npu_autopatch_followed__", function)  # by a trace
    code = getattr(function, "__code__", None)
    made_here = code is not None and code.co_filename.startswith(_PLACE.partition("{")[0])
    return function.__wrapped__ if made_here else function


def _ready(variant: Variant, devices: tuple[str, ...], single: bool) -> Callable[..., bool]:
    """The test of the first input and the tables: types, device, dtypes, gradients."""
    inputs = _HALVES if variant.compute == "float64" else FLOATS

    def ready_for_one(x: Tensor, table: Tensor) -> bool:
        return (
            type(x) in PLAIN
            and type(table) in PLAIN
            and not transformed()
            and x.device.type in devices
            and table.device == x.device
            and x.dtype in inputs
            and table.dtype is torch.complex64
            and not table.requires_grad
        )

    def ready(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        return (
            type(x) in PLAIN
            and type(cos) in PLAIN
            and type(sin) in PLAIN
            and not transformed()
            and x.device.type in devices
            and cos.device == x.device
            and x.dtype in inputs
            and (cos.dtype is x.dtype or cos.dtype in FLOATS)
            and sin.dtype is cos.dtype
            and not cos.requires_grad
            and not sin.requires_grad
        )

    return ready_for_one if single else ready


def _is_positions(positions: Any) -> bool:
    return type(positions) in PLAIN and positions.dtype is torch.int64 and positions.dim() == 2


def _is_sections(sections: Any) -> bool:
    return isinstance(sections, list)


_NONE = (0, 0, 0, 0)


def _shape(variant: Variant, roles: Roles) -> Callable[..., tuple[int, ...]]:
    """The shape of a table at full width, of rank 4, from the rank of the input and the tables as they are given.

    No input fits a shape of zeros, for ranks that were not proved.
    """
    twice, constant, ranks = variant.table in (HALF_SIZE, COMPLEX), variant.unsqueeze, variant.ranks

    def widened(rank: int, table: tuple[int, ...], unsqueeze: int | None) -> tuple[int, ...]:
        if len(table) == 3 and rank == 4 and unsqueeze is not None:
            rows, length, width = table
            if twice:
                width *= 2
            if unsqueeze == 1:
                return rows, 1, length, width
            return (rows, length, 1, width) if unsqueeze in (2, -2) else _NONE
        width = table[-1] * 2 if twice else table[-1]
        lead = list(table[:-1])
        if unsqueeze is not None:
            lead.insert(unsqueeze if unsqueeze >= 0 else len(lead) + unsqueeze + 2, 1)
        return (*[1] * (3 - len(lead)), *lead, width)

    def shape(rank: int, cos: Tensor, sin: Tensor, unsqueeze: int | None = constant) -> tuple[int, ...]:
        table = cos.shape
        if sin.shape != table or (rank, len(table)) not in ranks:
            return _NONE
        return widened(rank, table, unsqueeze)

    def looked_up(rank: int, cos: Tensor, sin: Tensor, at: Any, unsqueeze: int | None = constant) -> tuple[int, ...]:
        table = cos.shape
        if sin.shape != table or (rank, len(table)) not in ranks:
            return _NONE
        return widened(rank, table[1:] if variant.lookup == "sections" else (*at.shape, table[-1]), unsqueeze)

    if variant.table == COMPLEX:
        return lambda rank, table: shape(rank, table, table)
    return looked_up if variant.lookup else shape


def _tables(variant: Variant, roles: Roles) -> Callable[..., tuple[Tensor, Tensor]]:
    """Cos and sin as the op takes them: in the dtype of the arithmetic, of full width, in the layout of the input."""
    widen, constant, promote = variant.widen(), variant.unsqueeze, variant.compute == "promoted"
    as_given = widen is None and not variant.lookup
    look_up: Callable[[Tensor, Any], Tensor] | None = None
    if variant.lookup:
        look_up = by_sections if variant.lookup == "sections" else _at_positions

    def one(table: Tensor, dtype: torch.dtype, at: int, where: Any, unsqueeze: int | None) -> Tensor:
        if look_up is not None:
            table = look_up(table, where)
        if table.dtype is not dtype:
            table = table.to(dtype)
        if widen is not None:
            table = widen(table)
        if unsqueeze is not None:
            table = table.unsqueeze(unsqueeze)
        while table.dim() < 4:
            table = table.unsqueeze(0)
        return lay(table, at)

    def both(
        dtype: torch.dtype, at: int, cos: Tensor, sin: Tensor, unsqueeze: int | None = constant, where: Any = None
    ) -> tuple[Tensor, Tensor]:
        if not promote:
            dtype = torch.float32
        elif dtype is not cos.dtype:
            dtype = torch.promote_types(dtype, cos.dtype)
        if as_given and unsqueeze is not None and dtype is cos.dtype and cos.dim() == 3:
            if at == AS_IT_IS:
                return cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
            if at == SWAPPED:  # the heads were to come before the tokens
                return cos.unsqueeze(2), sin.unsqueeze(2)
        return one(cos, dtype, at, where, unsqueeze), one(sin, dtype, at, where, unsqueeze)

    if variant.table == COMPLEX:
        return lambda dtype, at, table: both(dtype, at, table.real, table.imag)
    if roles.lookup:
        return lambda dtype, at, cos, sin, where, unsqueeze=constant: both(dtype, at, cos, sin, unsqueeze, where)
    return both


def _at_positions(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions]


def _place(variant: Variant) -> Callable[[Tensor, tuple[int, ...]], int]:
    """How an input goes to the op with tables of a shape; 0 if the op, or the original, does not take it."""
    as_it_stands = not variant.partial and not variant.tail and variant.mode != DEINTERLEAVED
    place = placement(variant.op_mode, bool(variant.partial), as_it_stands)
    if not variant.tail:
        return place

    def place_tail(x: Tensor, table: tuple[int, ...]) -> int:
        return place(x, table) or (AS_IT_IS if place(x[..., -table[-2] :, :], table) == AS_IT_IS else 0)

    return place_tail


def _turn(variant: Variant, op: Rotation) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """The rotation of one input: what is not rotated is passed by, the result has the original's dtype."""
    rotate, split, own = rotated(op, variant.op_mode), variant.split(), variant.result == "own"

    def turn_all(x: Tensor, cos: Tensor, sin: Tensor, at: int) -> Tensor:
        dtype = x.dtype
        if split is not None:
            x = split(x)
        if cos.dtype is not dtype:
            x = rotate(x.to(cos.dtype), cos, sin, at)
            return x.to(dtype) if own else x
        return rotate(x, cos, sin, at)

    if not variant.partial and not variant.tail:
        if split is not None:
            return turn_all
        mode = variant.op_mode

        def turn_whole(x: Tensor, cos: Tensor, sin: Tensor, at: int) -> Tensor:
            if at == AS_IT_IS and cos.dtype is x.dtype:
                return op(x.contiguous(), cos, sin, mode)
            return turn_all(x, cos, sin, at)

        return turn_whole
    first, tail = variant.partial == "first", variant.tail

    def turn(x: Tensor, cos: Tensor, sin: Tensor, at: int) -> Tensor:
        width, rows = cos.size(-1), cos.size(-2)
        if tail and at == AS_IT_IS and x.size(-2) != rows:
            return torch.cat((x[..., :-rows, :], turn(x[..., -rows:, :], cos, sin, at)), -2)
        if x.size(-1) == width:
            return turn_all(x, cos, sin, at)
        if first:
            return torch.cat((turn_all(x[..., :width], cos, sin, at), x[..., width:]), -1)
        return torch.cat((x[..., :-width], turn_all(x[..., -width:], cos, sin, at)), -1)

    return turn
