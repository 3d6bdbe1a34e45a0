"""Where a loop over experts is cut out of a function, and what else goes with it."""

from __future__ import annotations

import ast
import builtins
import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npu_autopatch.kernels.moe.loops.source import Source, chains, changes, reads, root, writes
from npu_autopatch.kernels.swiglu.trace import Unproved

_PURE = {"len", "range", "int", "bool", "float", "min", "max", "sum", "tuple", "list", "isinstance", "getattr", "zip"}
_VALUES = (Tensor, torch.Size, torch.dtype, torch.device, int, float, str, list, tuple, type(None))
_FRESH = ("new_zeros", "new_empty", "new_ones", "new_full", "zeros", "empty", "ones", "full")


class Roles(NamedTuple):
    """The names of what the loop is given and of what it leaves behind."""

    hidden: str
    ids: str
    weights: str
    result: str


@dataclass(frozen=True)
class Loop:
    """The statements ``body[start:end]``, over the experts in `attribute`, give the sum that `roles` name."""

    source: Source
    attribute: str
    start: int
    end: int
    roles: Roles
    seen: list[dict[str, Any]]  # the values of all names, before each statement

    @property
    def before(self) -> dict[str, Any]:
        """The values of all names just before the loop."""
        return self.seen[self.start]

    @property
    def region(self) -> int:
        """Where what follows from the roles alone begins: they do not change between there and the end."""
        given = {self.roles.hidden, self.roles.ids, self.roles.weights}
        body = self.source.body
        return max((i + 1 for i in range(self.start) if changes(body[i]) & given), default=0)


@dataclass(frozen=True)
class Cut:
    """What is left of the body around the loop, and on what what was cut depends besides the roles.

    `settings` are the chains of attributes of the instance that were read; `fixed` the parameters.
    """

    before: tuple[ast.stmt, ...]
    after: tuple[ast.stmt, ...]
    settings: tuple[tuple[str, ...], ...]
    fixed: tuple[str, ...]


def cut(loop: Loop) -> Cut:
    """Raises `Unproved` where the loop does more than the sum, or depends on what a probe does not show."""
    body, roles, me = loop.source.body, loop.roles, loop.source.me
    gone, after = tuple(_taken(each, loop) for each in body[loop.start : loop.end]), body[loop.end :]
    if any(isinstance(node, (ast.Return, ast.Raise)) for statement in gone for node in ast.walk(statement)):
        raise Unproved("its loop may end the function")
    live = _live(after, set()) - {roles.result}
    if left := live & changes(*gone):
        raise Unproved(f"what its loop does to {', '.join(sorted(left))} is used after it")
    kept, dropped = _without_dead(loop, live | {roles.hidden, roles.ids, roles.weights, me})
    slice_, names = _slice(loop, (*dropped, *gone))
    found = chains(me, *slice_, *dropped, *gone, *loop.source.assumed)
    if used := sorted(".".join((me, *chain)) for chain, is_used in found.items() if is_used):
        raise Unproved(f"its loop depends on {', '.join(used)}")
    globals_ = loop.source.function.__globals__
    if flags := sorted(name for name in names if _may_change(name, globals_)):
        raise Unproved(f"its loop depends on {', '.join(flags)} of its module")
    settings = tuple(chain for chain in found if chain[0] != loop.attribute)
    fixed = tuple(name for name in loop.source.parameters[1:] if name in names)
    return Cut(tuple(kept), after, settings, fixed)


def _live(statements: tuple[ast.stmt, ...], after: set[str]) -> set[str]:
    """The names whose values the statements read, or what follows them does."""
    live = set(after)
    for statement in reversed(statements):
        live = live - _replaced(statement) | reads(statement)
    return live


def _replaced(statement: ast.stmt) -> set[str]:
    """The names that have a new value after the statement, whatever happens in it."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [e for t in targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    return {name.id for name in names if isinstance(name, ast.Name)}


def _without_dead(loop: Loop, live: set[str]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements before the loop whose results anybody needs, and those that only made what the loop needed."""
    kept: list[ast.stmt] = []
    dropped: list[ast.stmt] = []
    for statement in reversed(loop.source.body[: loop.start]):
        if _dead(statement, live, loop):
            dropped.insert(0, _taken(statement, loop))
        else:
            kept.insert(0, statement)
            live = live - _replaced(statement) | reads(statement)
    return kept, dropped


def _dead(statement: ast.stmt, live: set[str], loop: Loop) -> bool:
    """Whether nothing but the names it changes would tell that the statement has run, and nobody reads those."""
    if changes(statement) & live:
        return False
    if isinstance(statement, ast.Assign):
        return all(_replaced(ast.Assign([t], statement.value)) for t in statement.targets) and _pure(
            statement.value, loop
        )
    if (name := _written(statement)) and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        parts = [*statement.value.args, *(keyword.value for keyword in statement.value.keywords)]
        return _is_fresh(name, statement, loop) and all(_pure(part, loop) for part in parts)
    if _taken(statement, loop) is not statement:
        return True
    if isinstance(statement, ast.If):
        inner = (*statement.body, *statement.orelse)
        return _pure(statement.test, loop) and all(_dead(each, live, loop) for each in inner)
    return isinstance(statement, ast.Pass)


def _taken(statement: ast.stmt, loop: Loop) -> ast.stmt:
    """What is left of a branch that was not taken: its test, where that reads nothing but the instance."""
    if not isinstance(statement, ast.If) or statement.orelse or reads(statement.test) - {loop.source.me}:
        return statement
    if loop.source.holds(statement.test, loop.seen[0][loop.source.me]):
        return statement
    return ast.copy_location(ast.Expr(statement.test), statement)


def _pure(value: ast.expr, loop: Loop) -> bool:
    """Whether it only computes: no module of the instance is called, no unknown function, nothing in place."""
    for node in ast.walk(value):
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda, ast.comprehension)):
            return False
        if isinstance(node, ast.Call) and not _only_computes(node, loop):
            return False
    return True


def _only_computes(call: ast.Call, loop: Loop) -> bool:
    scope, function, base = loop.source.function.__globals__, call.func, root(call.func)
    if isinstance(function, ast.Name):
        known = scope.get(base, getattr(builtins, base, None))
        return base not in loop.before and ((known is getattr(builtins, base, 0) and base in _PURE) or _of_torch(known))
    if not isinstance(function, ast.Attribute) or writes(function.attr) or any(k.arg == "out" for k in call.keywords):
        return False
    if base == loop.source.me:
        return False
    if base in loop.before:
        value = loop.before[base]
        return isinstance(value, _VALUES) or type(value).__module__ == "numpy"
    return not base or _of_torch(scope.get(base))


def _of_torch(value: object) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
    return name.partition(".")[0] == "torch" and not isinstance(value, nn.Module)


def _is_fresh(name: str, at: ast.stmt, loop: Loop) -> bool:
    """Whether `name` is at that statement a tensor just made, which no other name shares."""
    made = False
    for statement in itertools.takewhile(lambda each: each is not at, loop.source.body):
        if isinstance(statement, ast.Assign) and name in _replaced(statement):
            value = statement.value
            made = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _FRESH
        elif name in reads(statement) | changes(statement) and _written(statement) != name:
            made = False  # it may have another name by now
    return made


def _written(statement: ast.stmt) -> str:
    """The name whose method, one in place, is all there is to the statement; empty if it is another."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        method = statement.value.func
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and writes(method.attr):
            return method.value.id
    return ""


def _slice(loop: Loop, gone: tuple[ast.stmt, ...]) -> tuple[list[ast.stmt], set[str]]:
    """The statements on which those `gone` depend, by other names than the roles; and all names read on the way."""
    ends = {loop.roles.hidden, loop.roles.ids, loop.roles.weights, loop.source.me}
    found: list[ast.stmt] = []
    names: set[str] = set()
    pending = sorted(reads(*gone) - ends)
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        if name not in loop.source.function.__code__.co_varnames:
            continue
        for statement in loop.source.body[: loop.start]:
            if name not in changes(statement):
                continue
            statement = _taken(statement, loop)
            if statement not in found:
                found.append(statement)
                pending.extend(reads(statement) - ends - names)
    return found, names


def _may_change(name: str, scope: dict[str, Any]) -> bool:
    """Whether a name of the module is neither code nor torch's: a flag, of which a probe shows one value."""
    if name not in scope:
        return False
    value = scope[name]
    return not isinstance(value, (ModuleType, type, torch.dtype)) and not callable(value)
