"""The function without its loop: routing and all else as they were, one fused call where the loop stood."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor

from npu_autopatch.kernels.moe.loops.cut import Cut, Loop
from npu_autopatch.kernels.moe.loops.probe import Inputs
from npu_autopatch.kernels.moe.loops.source import Source

_COLLECT, _FUSED, _ORIGINAL, _PARTS = (f"_npu_autopatch_{name}" for name in ("collect", "fused", "original", "experts"))


def replacement(
    loop: Loop,
    cut: Cut,
    inputs: Inputs,
    collect: Callable[..., Any],
    fused: Callable[..., Tensor],
    original: Callable[..., Any],
) -> FunctionType:
    """The original's signature, place and globals. `original` runs where `collect` gathers nothing."""
    source = loop.source
    guarded = [source.me, inputs.hidden, *(inputs.routed or ())]
    turned_away: ast.expr = _is(_name(_PARTS), None)
    if cut.fixed:
        defaults = _defaults(source.function)
        others = [ast.UnaryOp(ast.Not(), _is(_name(name), defaults[name])) for name in cut.fixed if name in defaults]
        turned_away = ast.BoolOp(ast.Or(), [turned_away, *others]) if others else turned_away
    guard = [
        ast.Assign([ast.Name(_PARTS, ast.Store())], ast.Call(_name(_COLLECT), list(map(_name, guarded)), [])),
        ast.If(turned_away, [ast.Return(_again(source))], []),
    ]
    roles = loop.roles
    call = ast.Call(_name(_FUSED), [_name(n) for n in (_PARTS, roles.hidden, roles.ids, roles.weights)], [])
    instead = ast.Assign([ast.Name(roles.result, ast.Store())], call)
    body = [
        *(_placed(statement, source.body[0]) for statement in guard),
        *cut.before,
        _placed(instead, source.body[loop.start]),
        *cut.after,
    ]
    given = {_COLLECT: collect, _FUSED: fused, _ORIGINAL: original}
    return source.in_slot(source.compiled(body, given))


def region(loop: Loop) -> FunctionType:
    """The statements that follow from the roles alone, up to the sum. It takes all names as they were before them."""
    body = loop.source.body[loop.region : loop.end]
    returned = _placed(ast.Return(_name(loop.roles.result)), body[-1])
    return loop.source.compiled([*body, returned], {}, tuple(loop.seen[loop.region]))


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


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _is(value: ast.expr, constant: Any) -> ast.expr:
    return ast.Compare(value, [ast.Is()], [ast.Constant(constant)])


def _placed(statement: ast.stmt, at: ast.stmt) -> ast.stmt:
    statement = ast.copy_location(statement, at)
    statement.end_lineno, statement.end_col_offset = at.lineno, at.col_offset
    return ast.fix_missing_locations(statement)
