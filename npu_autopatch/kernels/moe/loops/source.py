"""The statements of a function, and functions compiled from some of them, in the function's own globals."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import linecache
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch

from npu_autopatch.kernels.swiglu.trace import Unproved

_OUTSIDE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
RETURNED = "_npu_autopatch_returned"


@dataclass(frozen=True)
class Source:
    """A function and its statements, none of which returns more than a name where it is the last.

    `slot` is what its class has: `function` itself, or what ``@torch.no_grad()`` made of it. `assumed` are the tests,
    of the instance alone, that decided which branches `body` goes through.
    """

    slot: FunctionType
    function: FunctionType
    definition: ast.FunctionDef
    body: tuple[ast.stmt, ...]
    assumed: tuple[ast.expr, ...] = ()

    def through(self, place: int, instance: Any) -> Source:
        """The source with the branch of the ``if`` at `place` that `instance` takes in its stead."""
        branch = self.body[place]
        assert isinstance(branch, ast.If)
        taken = branch.body if self.holds(branch.test, instance) else branch.orelse
        body = _named([*self.body[:place], *taken, *self.body[place + 1 :]])
        return replace(self, body=tuple(body), assumed=(*self.assumed, branch.test))

    def holds(self, test: ast.expr, instance: Any) -> bool:
        """Whether a test that reads nothing but the instance holds for this one."""
        code = compile(ast.Expression(test), self.function.__code__.co_filename, "eval")
        return bool(eval(code, self.function.__globals__, {self.me: instance}))

    def in_slot(self, function: FunctionType) -> FunctionType:
        """`function` as what goes into the slot: decorated as the original was."""
        decorated: Any = function if self.slot is self.function else torch.no_grad()(function)
        functools.update_wrapper(decorated, self.slot)
        return cast(FunctionType, decorated)

    @property
    def parameters(self) -> tuple[str, ...]:
        """All of them, ``self`` first."""
        args = self.definition.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        return tuple(arg.arg for arg in named)

    @property
    def me(self) -> str:
        """What the function calls its instance."""
        return self.parameters[0]

    def compiled(
        self, body: Iterable[ast.stmt], given: dict[str, Any], parameters: Sequence[str] | None = None
    ) -> FunctionType:
        """A function of the same name, place and globals with that `body`; the names `given` are its free variables.

        Its signature is the original's, or has just those `parameters`.
        """
        definition = self.definition
        args = definition.args if parameters is None else _arguments(parameters)
        new = ast.FunctionDef(definition.name, _undefaulted(args), list(body), [])
        code = _code(new, self.function.__code__, tuple(given), _owner(self.function))
        cells = tuple(CellType(given[name]) for name in code.co_freevars)
        function = FunctionType(code, self.function.__globals__, self.function.__name__, None, cells)
        if parameters is None:
            function.__defaults__ = self.function.__defaults__
            function.__kwdefaults__ = self.function.__kwdefaults__
        return function


def read(function: Any) -> Source:
    """The source of `function`. Raises `Unproved` where it has none, or it is not what is run."""
    if not isinstance(function, FunctionType):
        raise Unproved(f"it is a {type(function).__name__}, not a plain function")
    slot, function = function, undecorated(function)
    code = function.__code__
    if code.co_freevars or code.co_flags & _OUTSIDE:
        raise Unproved("it is wrapped by another function" if hasattr(function, "__wrapped__") else "it is a closure")
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    try:
        definition = _parsed(_block(lines, code), code.co_firstlineno)
        plain = ast.FunctionDef(definition.name, _undefaulted(definition.args), definition.body, [])
        same = _alike(_code(plain, code, (), _owner(function)), code)
    except (SyntaxError, StopIteration, IndexError, ValueError):
        same = False
    if not same:
        raise Unproved("its source cannot be read, or is not what is run")
    return Source(slot, function, definition, tuple(_named(definition.body)))


def _block(lines: list[str], code: CodeType) -> str:
    """The lines of a function, those of its last expression included, of which Python 3.10 knows the first alone."""
    if sys.version_info < (3, 11):
        return "".join(inspect.getblock(lines))
    last = max(end or 0 for _, end, _, _ in code.co_positions())
    return "".join(lines[: last - code.co_firstlineno + 1])


def undecorated(function: FunctionType) -> FunctionType:
    """What ``@torch.no_grad()`` was put on, or the function itself where it was not."""
    if function.__code__ is not _IN_CONTEXT:
        return function
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    if any(type(getattr(value, "__self__", None)) is torch.no_grad for value in held):
        return cast(FunctionType, function.__wrapped__)  # type: ignore[attr-defined]
    return function


_IN_CONTEXT = cast(FunctionType, torch.no_grad()(lambda: None)).__code__


def _parsed(text: str, line: int) -> ast.FunctionDef:
    """The function that begins at `line` of its file, with the lines and columns that a traceback shows."""
    if text[:1].isspace():
        around = ast.parse("\n" * (line - 2) + "class _:\n" + text).body[0]
        assert isinstance(around, ast.ClassDef)
        (definition,) = around.body
    else:
        (definition,) = ast.parse("\n" * (line - 1) + text).body
    if not isinstance(definition, ast.FunctionDef):
        raise SyntaxError("no function")
    return definition


def _named(body: list[ast.stmt]) -> list[ast.stmt]:
    """What is returned at the end gets a name first, so that it can be looked at."""
    *others, last = body
    if not isinstance(last, ast.Return) or last.value is None or isinstance(last.value, ast.Name):
        return body
    named = ast.copy_location(ast.Assign([ast.Name(RETURNED, ast.Store())], last.value), last)
    returned = ast.copy_location(ast.Return(ast.Name(RETURNED, ast.Load())), last)
    return [*others, *map(ast.fix_missing_locations, (named, returned))]


def _owner(function: FunctionType) -> str:
    """The class that private names of the function are told apart by."""
    return function.__qualname__.rpartition(".")[0].rpartition(".")[2].strip("<>") or "_"


def _arguments(names: Sequence[str]) -> ast.arguments:
    return ast.arguments([], [_argument(name) for name in names], None, [], [], None, [])


def _argument(name: str) -> ast.arg:
    return ast.arg(name, lineno=1, col_offset=0)


def _undefaulted(args: ast.arguments) -> ast.arguments:
    """The parameters without annotations and defaults: the function object has the values."""
    fields = {name: getattr(args, name) for name in ("posonlyargs", "args", "vararg", "kwonlyargs", "kwarg")}
    bare: dict[str, Any] = {
        name: [_argument(arg.arg) for arg in value] if isinstance(value, list) else value and _argument(value.arg)
        for name, value in fields.items()
    }
    return ast.arguments(**bare, kw_defaults=[None] * len(args.kwonlyargs), defaults=[])


def _code(definition: ast.FunctionDef, original: CodeType, free: tuple[str, ...], owner: str) -> CodeType:
    """The code of `definition`, compiled as a method of `owner`, within a function that has the names `free`."""
    maker = ast.FunctionDef("_", _arguments(free), [definition], [])
    around = ast.ClassDef(owner, [], [], [maker], [])
    for node in (definition, maker, around):
        node.lineno, node.col_offset = original.co_firstlineno, 0
        vars(node).setdefault("type_params", [])  # of Python 3.12
    flags = original.co_flags & _FUTURES
    compiled: CodeType = compile(ast.Module([around], []), original.co_filename, "exec", flags, dont_inherit=True)
    for name in (owner, "_", definition.name):
        compiled = next(const for const in compiled.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return compiled


_FUTURES = 0x1FF0000  # the flags of __future__ imports, the highest bits of a code object's


def _alike(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects compute the same."""
    named = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if len(one.co_consts) != len(other.co_consts) or any(getattr(one, n) != getattr(other, n) for n in named):
        return False
    same = (
        _alike(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )
    return all(same) and _instructions(one) == _instructions(other)


# A method of an imported name is called another way, which only whoever compiles the whole module can know.
_SKIPPED = {dis.opmap[name] for name in ("CACHE", "PRECALL", "PUSH_NULL") if name in dis.opmap}
_EXTENDED, _GLOBAL, _ATTRIBUTE = (dis.opmap[name] for name in ("EXTENDED_ARG", "LOAD_GLOBAL", "LOAD_ATTR"))
_METHOD = {dis.opmap[name]: _ATTRIBUTE for name in ("LOAD_METHOD",) if name in dis.opmap}
_CALL = {op: 0 for name, op in dis.opmap.items() if name in ("CALL_METHOD", "CALL_FUNCTION", "CALL")}
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_SHIFTED = {op for op, since in ((_GLOBAL, (3, 11)), (_ATTRIBUTE, (3, 12))) if sys.version_info >= since}


def _instructions(code: CodeType) -> list[tuple[int, int]]:
    steps, found, high = code.co_code, [], 0
    for place in range(0, len(steps), 2):
        op, argument = steps[place], steps[place + 1] | high
        high = argument << 8 if op == _EXTENDED else 0
        if op == _EXTENDED or op in _SKIPPED:
            continue
        argument = 0 if op in _JUMPS else argument >> 1 if op in _SHIFTED else argument
        found.append((_CALL.get(op, _METHOD.get(op, op)), argument))
    return found


def reads(*nodes: ast.AST) -> set[str]:
    """The names that are read or deleted, or added to in place."""
    return set().union(*(_touched(node)[0] for node in nodes))


def changes(*nodes: ast.AST) -> set[str]:
    """The names that are assigned, and those of what may be written to: by a method, an item or an attribute."""
    return set().union(*(_touched(node)[1] for node in nodes))


@functools.lru_cache(maxsize=64)  # of one function's statements, each is asked after many times
def _touched(statement: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """The names that are read, and those that are changed."""
    read: set[str] = set()
    changed: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (changed if isinstance(node.ctx, ast.Store) else read).add(node.id)
            if isinstance(node.ctx, ast.Del):
                changed.add(node.id)
        elif isinstance(node, (ast.Subscript, ast.Attribute)):
            if not isinstance(node.ctx, ast.Load):
                changed.add(root(node))
        elif isinstance(node, ast.AugAssign):
            read.add(root(node.target))
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Call):
                changed.add(root(node.value.func))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and writes(node.func.attr):
                changed.add(root(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "out":
            changed.add(root(node.value))
    return frozenset(read - {""}), frozenset(changed - {""})


def writes(method: str) -> bool:
    """Whether a method of that name writes to its tensor."""
    return method.endswith("_") and not method.endswith("__")


def root(node: ast.AST) -> str:
    """The name at the beginning of a chain of attributes, items and calls; empty if there is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def chains(me: str, *nodes: ast.AST) -> dict[tuple[str, ...], bool]:
    """What is read of the instance: each whole chain of attributes, and whether it is called or assigned to."""
    found: dict[tuple[str, ...], bool] = {}
    inner: set[int] = set()
    called: set[int] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):  # from the outside in
        if isinstance(node, ast.Call):
            called.add(id(node.func))
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                inner.add(id(at))
                names, at = [at.attr, *names], at.value
            if isinstance(at, ast.Name) and at.id == me:
                inner.add(id(at))
                used = id(node) in called or not isinstance(node.ctx, ast.Load)
                found[tuple(names)] = found.get(tuple(names), False) or used
        elif isinstance(node, ast.Name) and node.id == me and id(node) not in inner:
            found[()] = True
    return found
