"""Tiny instances with random parameters, and the comparison of two callables on them.

Everything here runs on the CPU inside `undisturbed`, which keeps the process as it was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def classes(module: ModuleType) -> list[type[nn.Module]]:
    """The nn.Module classes defined in `module`, each once, however many names it has."""
    found = {
        value: None
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    }
    return list(found)


class BuildError(Exception):
    """A class could not be instantiated for a probe; the message says why."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """A CPU with gradients and no modes in this thread, whatever the process has set; its RNG is as it was after.

    The default dtype belongs to all threads and is left alone: probes say which dtype they want.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.callback(_restore, torch.get_rng_state())
        yield


def _restore(rng: Tensor) -> None:
    if not torch.equal(torch.get_rng_state(), rng):  # a constructor has drawn from it
        torch.set_rng_state(rng)


class Anything(int):
    """A size that is also a configuration: every attribute of it is that size again."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def build(cls: type[nn.Module], size: int, **settings: Any) -> nn.Module:
    """An instance of `cls` with `size` for every argument it insists on. Raises `BuildError`."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    insisted = {p.name: Anything(size) for p in named if p.default is p.empty}
    optional = {p.name: Anything(size) for p in named if p.default is None}  # insisted on in truth, now and then
    try:
        try:
            return cls(**{**insisted, **settings})
        except TypeError:
            return cls(**{**insisted, **optional, **settings})
    except Exception as error:
        raise BuildError(f"it cannot be built for a probe: {type(error).__name__}: {error}") from error


def switches(cls: type[nn.Module]) -> dict[str, bool]:
    """The boolean arguments of the constructor, with their defaults."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool)}


@functools.cache
def samples(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed fp32 values, the same each time; the global generator is not touched."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The instance attributes that are not nn.Module's own."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def operations(cls: Any, function: Any) -> tuple[set[str], dict[str, Any]]:
    """The names `function` reaches, through methods of `cls` and functions beside it; and those methods."""
    return _operations(cls, function)


def reached(function: FunctionType) -> set[str]:
    """The names a function reaches, through functions beside it."""
    names, _ = _operations.__wrapped__(object, function)  # not kept: it would count as a holder of the function
    return names


@functools.lru_cache(maxsize=2)  # a class's forward is asked after when it is found, and again when it is probed
def _operations(cls: type, function: Any, depth: int = 3) -> tuple[set[str], dict[str, Any]]:
    if not isinstance(function, FunctionType):
        return set(), {}
    names: set[str] = set()
    methods: dict[str, Any] = {}
    pending: list[tuple[CodeType, dict[str, Any], int]] = [(function.__code__, function.__globals__, depth)]
    while pending:
        code, scope, left = pending.pop()
        pending.extend((const, scope, left) for const in code.co_consts if isinstance(const, CodeType))
        for name in code.co_names:
            if name in names:
                continue
            names.add(name)
            if left == 0:
                continue
            method = getattr(cls, name, None)
            if isinstance(method, FunctionType) and getattr(nn.Module, name, None) is not method:
                methods[name] = method
                pending.append((method.__code__, method.__globals__, left - 1))
            beside = scope.get(name)
            if isinstance(beside, FunctionType):
                pending.append((beside.__code__, beside.__globals__, left - 1))
    return names, methods


def code_of(function: FunctionType, depth: int = 4) -> tuple[Any, ...] | None:
    """All that decides what `function` computes: equal for two functions of the same code, whatever their module.

    Its code and defaults, and of each global it names the value, or for a function the code again. None where it is
    a closure, or a value cannot be compared or could be changed in place.
    """
    if function.__closure__:
        return None
    code = function.__code__
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values += [function.__globals__[name] for name in _all_names(code) if name in function.__globals__]
    parts: list[Any] = [_without_place(code, function.__doc__)]
    for value in values:
        if isinstance(value, FunctionType):
            value = code_of(value, depth - 1) if depth else None
            if value is None:
                return None
        elif not isinstance(value, (ModuleType, type, int, float, str, bool, torch.dtype, type(None))):
            return None
        parts.append((type(value), value))
    return tuple(parts)


def _all_names(code: CodeType) -> list[str]:
    nested = [name for const in code.co_consts if isinstance(const, CodeType) for name in _all_names(const)]
    return [*code.co_names, *nested]


def _without_place(code: CodeType, doc: str | None = None) -> tuple[Any, ...]:
    """A code object without its file, lines and docstring."""
    consts = tuple(
        _without_place(const) if isinstance(const, CodeType) else (type(const), None if const == doc else const)
        for const in code.co_consts
    )
    named = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, code.co_flags, code.co_argcount, code.co_kwonlyargcount, consts, named)


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` at each value of the fp64 tensor `exact`."""
    info = torch.finfo(dtype)
    return info.eps * torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(info.tiny))))


def no_worse(fused: Tensor, original: Tensor, exact: Tensor, unit: Tensor, most: float) -> bool:
    """Rule 3: same dtype and shape, and no further from the fp64 `exact` than `original` by more than one ulp.

    And `original` is what was taken for `exact`: within `most` ulps of it. `unit` is one ulp of its dtype at `exact`.
    """
    if fused.dtype != original.dtype or fused.shape != original.shape:
        return False
    errors = ((torch.stack((fused, original)) - exact).abs() / unit).flatten(1).amax(1)
    mine, theirs = errors.tolist()
    return bool(mine <= theirs + 1 and theirs <= most)
