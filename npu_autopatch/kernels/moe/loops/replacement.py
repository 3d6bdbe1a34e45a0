"""The function without its loop: routing and all else as they were, one fused call where the loop stood."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor

from npu_autopatch.kernels.moe.loops.cut import Cut, Loop
from npu_autopatch.kernels.moe.loops.probe import Inputs
from npu_autopatch.kernels.moe.loops.source import Source
from npu_autopatch.kernels.swiglu.trace import Unproved

_NAMES = ("collect", "fused", "original", "experts", "given")
_COLLECT, _FUSED, _ORIGINAL, _PARTS, _GIVEN = (f"_npu_autopatch_{name}" for name in _NAMES)


def replacement(
    loop: Loop,
    cut: Cut,
    inputs: Inputs,
    collect: Callable[..., Any],
    fused: Callable[..., Tensor],
    original: Callable[..., Any],
    chosen: Sequence[tuple[str, ...]],
) -> FunctionType:
    """The original's signature, place and globals. `original` runs where `collect` gathers nothing.

    So it does where the ids are not as many a token as each of the instance's numbers `chosen`, which the loop read.
    """
    source = loop.source
    guarded = [source.me, inputs.hidden, *(inputs.routed or ())]
    turned_away: ast.expr = _is(_name(_PARTS), None)
    if cut.fixed:
        defaults = _defaults(source.function)
        others = [ast.UnaryOp(ast.Not(), _is(_name(name), defaults[name])) for name in cut.fixed if name in defaults]
        turned_away = ast.BoolOp(ast.Or(), [turned_away, *others]) if others else turned_away
    guard: list[ast.stmt] = [
        ast.Assign([ast.Name(_PARTS, ast.Store())], ast.Call(_name(_COLLECT), list(map(_name, guarded)), [])),
        ast.If(turned_away, [ast.Return(_again(source))], []),
    ]
    roles = loop.roles
    call = ast.Call(_name(_FUSED), [_name(n) for n in (_PARTS, roles.hidden, roles.ids, roles.weights)], [])
    instead = ast.Assign([ast.Name(roles.result, ast.Store())], call)
    late: list[ast.stmt] = []
    if chosen:  # told only once there are ids, when the parameters may have got other values
        first, again = _kept(source)
        guard.append(first)
        most = ast.Subscript(ast.Attribute(_name(roles.ids), "shape", ast.Load()), ast.Constant(-1), ast.Load())
        unlike: list[ast.expr] = [ast.Compare(_chain(source.me, names), [ast.NotEq()], [most]) for names in chosen]
        late.append(ast.If(ast.BoolOp(ast.Or(), [*unlike, ast.Constant(False)]), [ast.Return(again)], []))
    body = [
        *(_placed(statement, source.body[0]) for statement in guard),
        *cut.before,
        *(_placed(statement, source.body[loop.start]) for statement in (*late, instead)),
        *cut.after,
    ]
    given = {_COLLECT: collect, _FUSED: fused, _ORIGINAL: original}
    return source.in_slot(source.compiled(body, given))


def region(loop: Loop) -> FunctionType:
    """The statements that follow from the roles alone, up to the sum. It takes all names as they were before them."""
    body = loop.source.body[loop.region : loop.end]
    returned = _placed(ast.Return(_name(loop.roles.result)), body[-1])
    return loop.source.compiled([*body, returned], {}, tuple(loop.seen[loop.region]))


def routing_of(loop: Loop) -> FunctionType:
    """The statements before the loop, with the routing weights for a result."""
    source = loop.source
    returned = _placed(ast.Return(_name(loop.roles.weights)), source.body[loop.start])
    return source.compiled([*source.body[: loop.start], returned], {})


def _defaults(function: FunctionType) -> dict[str, Any]:
    code = function.__code__
    values = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    return {
        **dict(zip(positional[len(positional) - len(values) :], values, strict=False)),
        **(function.__kwdefaults__ or {}),
    }


def _again(source: Source) -> ast.expr:
    """The call of the original with what the function was given."""
    args = source.definition.args
    positional: list[ast.expr] = [_name(arg.arg) for arg in (*args.posonlyargs, *args.args)]
    if args.vararg:
        positional.append(ast.Starred(_name(args.vararg.arg), ast.Load()))
    keywords = [ast.keyword(arg.arg, _name(arg.arg)) for arg in args.kwonlyargs]
    if args.kwarg:
        keywords.append(ast.keyword(None, _name(args.kwarg.arg)))
    return ast.Call(_name(_ORIGINAL), positional, keywords)


def _kept(source: Source) -> tuple[ast.stmt, ast.expr]:
    """What keeps the parameters, and the call of the original with them. Raises `Unproved`."""
    args = source.definition.args
    if args.vararg or args.kwonlyargs or args.kwarg:
        raise Unproved("its loop depends on how many experts a token has")
    values: list[ast.expr] = [_name(arg.arg) for arg in (*args.posonlyargs, *args.args)]
    keep = ast.Assign([ast.Name(_GIVEN, ast.Store())], ast.Tuple(values, ast.Load()))
    return keep, ast.Call(_name(_ORIGINAL), [ast.Starred(_name(_GIVEN), ast.Load())], [])


def _chain(me: str, names: tuple[str, ...]) -> ast.expr:
    value: ast.expr = _name(me)
    for name in names:
        value = ast.Attribute(value, name, ast.Load())
    return value


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _is(value: ast.expr, constant: Any) -> ast.expr:
    return ast.Compare(value, [ast.Is()], [ast.Constant(constant)])


def _placed(statement: ast.stmt, at: ast.stmt) -> ast.stmt:
    statement = ast.copy_location(statement, at)
    statement.end_lineno, statement.end_col_offset = at.lineno, at.col_offset
    return ast.fix_missing_locations(statement)
