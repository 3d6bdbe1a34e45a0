"""The fused function for a proved variant, under the original's own signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_autopatch.kernels.rope.variant import COMPLEX, Variant, by_sections
from npu_autopatch.ops.legality import FLOATS, PLAIN, transformed
from npu_autopatch.ops.rotary import Rotation, legal, rotated

_PLACE = "<npu_autopatch: {}>"
_HALVES = (torch.bfloat16, torch.float16)
_SOURCE = """
def replacement({parameters}):
    if {ready}:
        cos_, sin_ = tables({tables})
        if {fit}:
            return {result}
    return original({everything})
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

    Its code is put together from names, so that a call binds its arguments once, as the original's does.
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
        default = f"default_{place}_"
        scope[default] = parameter.default
        declared.append(f"{name}={default}")
        if name not in used:
            number = type(parameter.default) in (int, float)  # which Dynamo may trace as a symbol
            pinned.append(f"type({name}) is type({default}) and {name} {'==' if number else 'is'} {default}")

    first, *others = roles.inputs
    tables = ", ".join(roles.tables)
    arguments = [f"{first}.dtype", tables, *filter(None, (roles.lookup, roles.unsqueeze))]
    turns = [f"turn({name}, cos_, sin_)" for name in roles.inputs]
    ready = [f"ready({first}, {tables})", *pinned]
    ready += [f"type({name}) in PLAIN and {name}.dtype is {first}.dtype" for name in others]
    ready += [f"looks_up({roles.lookup})"] if roles.lookup else []
    source = _SOURCE.format(
        parameters=", ".join(declared),
        ready=" and ".join(ready),
        tables=", ".join(arguments),
        fit=" and ".join(f"fits({name}, cos_)" for name in roles.inputs),
        result=", ".join(turns),
        everything=", ".join(passed),
    )
    scope |= {
        "original": original,
        "PLAIN": PLAIN,
        "ready": _ready(variant, devices, single=len(roles.tables) == 1),
        "looks_up": _is_sections if variant.lookup == "sections" else _is_positions,
        "tables": _tables(variant, roles),
        "fits": _fits(variant),
        "turn": _turn(variant, op),
    }
    exec(compile(source, _PLACE.format(getattr(original, "__qualname__", "rotary")), "exec"), scope)
    replacement: Callable[..., Any] = scope.pop("replacement")
    return functools.update_wrapper(replacement, original)


def ours_undone(function: Any) -> Any:
    """The original of a function made here; any other one, also a wrapper around such a function, as it is."""
    code = getattr(function, "__code__", None)
    made_here = code is not None and code.co_filename.startswith(_PLACE.partition("{")[0])
    return function.__wrapped__ if made_here else function


def _ready(variant: Variant, devices: tuple[str, ...], single: bool) -> Callable[..., bool]:
    """The test of the first input and the tables: types, device, dtypes, ranks, gradients."""
    ranks, inputs = variant.ranks, _HALVES if variant.compute == "float64" else FLOATS

    def ready_for_one(x: Tensor, table: Tensor) -> bool:
        return (
            type(x) in PLAIN
            and type(table) in PLAIN
            and not transformed()
            and x.device.type in devices
            and table.device == x.device
            and x.dtype in inputs
            and table.dtype is torch.complex64
            and (x.dim(), table.dim()) in ranks
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
            and cos.dtype in FLOATS
            and sin.dtype is cos.dtype
            and sin.shape == cos.shape
            and (x.dim(), cos.dim()) in ranks
            and not cos.requires_grad
            and not sin.requires_grad
        )

    return ready_for_one if single else ready


def _is_positions(positions: Any) -> bool:
    return type(positions) in PLAIN and positions.dtype is torch.int64 and positions.dim() == 2


def _is_sections(sections: Any) -> bool:
    return isinstance(sections, list)


def _tables(variant: Variant, roles: Roles) -> Callable[..., tuple[Tensor, Tensor]]:
    """Cos and sin as the op takes them: in the dtype of the arithmetic, of full width, of rank 4."""
    widen, constant, promote = variant.widen(), variant.unsqueeze, variant.compute == "promoted"
    look_up: Callable[[Tensor, Any], Tensor] | None = None
    if variant.lookup:
        look_up = by_sections if variant.lookup == "sections" else _at_positions

    def one(table: Tensor, dtype: torch.dtype, where: Any, unsqueeze: int | None) -> Tensor:
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
        return table

    def both(dtype: torch.dtype, cos: Tensor, sin: Tensor, where: Any, unsqueeze: int | None) -> tuple[Tensor, Tensor]:
        if not promote:
            dtype = torch.float32
        elif dtype is not cos.dtype:
            dtype = torch.promote_types(dtype, cos.dtype)
        return one(cos, dtype, where, unsqueeze), one(sin, dtype, where, unsqueeze)

    if variant.table == COMPLEX:
        return lambda dtype, table: both(dtype, table.real, table.imag, None, constant)
    if roles.lookup and roles.unsqueeze:
        return both
    if roles.lookup:
        return lambda dtype, cos, sin, where: both(dtype, cos, sin, where, constant)
    if roles.unsqueeze:
        return lambda dtype, cos, sin, unsqueeze: both(dtype, cos, sin, None, unsqueeze)
    return lambda dtype, cos, sin: both(dtype, cos, sin, None, constant)


def _at_positions(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions]


def _fits(variant: Variant) -> Callable[[Tensor, Tensor], bool]:
    """Whether the op takes an input with these tables, and the original would."""
    mode, partial, tail = variant.op_mode, bool(variant.partial), variant.tail

    def fits(x: Tensor, cos: Tensor) -> bool:
        if x.size(-1) != cos.size(-1) and not (partial and x.size(-1) > cos.size(-1)):
            return False
        if tail and x.size(-2) > cos.size(-2):
            x = x[..., -cos.size(-2) :, :]
        return legal(x, cos, mode)

    return fits


def _turn(variant: Variant, op: Rotation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The rotation of one input: what is not rotated is passed by, the result has the original's dtype."""
    rotate, split, own = rotated(op, variant.op_mode), variant.split(), variant.result == "own"

    def turn_all(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dtype = x.dtype
        if split is not None:
            x = split(x)
        if cos.dtype is not dtype:
            x = rotate(x.to(cos.dtype), cos, sin)
            return x.to(dtype) if own else x
        return rotate(x, cos, sin)

    if not variant.partial and not variant.tail:
        return turn_all
    first, tail = variant.partial == "first", variant.tail

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width, rows = cos.size(-1), cos.size(-2)
        if tail and x.size(-2) != rows:
            return torch.cat((x[..., :-rows, :], turn(x[..., -rows:, :], cos, sin)), -2)
        if x.size(-1) == width:
            return turn_all(x, cos, sin)
        if first:
            return torch.cat((turn_all(x[..., :width], cos, sin), x[..., width:]), -1)
        return torch.cat((x[..., :-width], turn_all(x[..., -width:], cos, sin)), -1)

    return turn
