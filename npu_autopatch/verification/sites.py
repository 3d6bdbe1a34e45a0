"""The calls of patched sites within a model, and each of them again, alone: fused, as the original, and in fp64."""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from npu_autopatch.kernels.moe.interface import SERVED
from npu_autopatch.ledger import Slot
from npu_autopatch.verification.choices import Choices
from npu_autopatch.verification.comparison import Pass, flat
from npu_autopatch.verification.counting import Fused
from npu_autopatch.verification.double import InDouble, double, doubled
from npu_autopatch.verification.passes import backward, seed

KEPT = 8  # calls of one site in one dtype and mode


@dataclass
class Call:
    """A call of a site within a pass: what it was given, under which conditions, and the fused calls in it."""

    site: str
    case: tuple[torch.dtype, str]
    target: Callable[[], tuple[Any, Callable[..., Any]]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    fused: bool = False


class Watch:
    """Counts the calls of the sites in `slots` while it lasts, and keeps some of them."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = [slot for slot in slots if slot.site and not isinstance(slot.owner, dict)]
        self.case: tuple[torch.dtype, str] = (torch.float32, "")
        self.calls: list[Call] = []
        self.counts: Counter[tuple[str, str, bool]] = Counter()  # by site, mode, and whether it was fused
        self.ops: Counter[str] = Counter()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._inner: list[Counter[str]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        self.ops = self._stack.enter_context(Fused()).calls
        for slot in self.slots:
            self._put_on(slot)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _put_on(self, slot: Slot) -> None:
        """In place of what the model calls: of a class that is served by an attribute of ours, its forward."""
        owner = slot.owner
        name = "forward" if slot.attribute == SERVED else slot.attribute
        present = name in vars(owner)
        before = vars(owner).get(name)
        if present and not callable(before):
            return
        wrapper = self._wrapper(slot.site, owner, name, getattr(owner, name))
        setattr(owner, name, wrapper)
        self._stack.callback(setattr, owner, name, before) if present else self._stack.callback(delattr, owner, name)
        for place, index in slot.captures:
            if place[index] is slot.replacement:
                place[index] = wrapper
                self._stack.callback(place.__setitem__, index, slot.replacement)

    def _wrapper(self, site: str, owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        method = isinstance(owner, type)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            instance, given = (args[0], args[1:]) if method else (None, args)
            call = self._keep(site, owner, name, instance, given, kwargs)
            before = Counter(self.ops)
            self._inner.append(Counter())
            try:
                return function(*args, **kwargs)
            finally:
                inner = self._inner.pop()
                mine = self.ops - before
                if self._inner:
                    self._inner[-1].update(mine)
                fused = bool(mine - inner)
                self.counts[site, self.case[1], fused] += 1
                if call is not None:
                    call.fused = fused

        # kernels tell by it whose function stands in a class
        watched.__wrapped__ = getattr(function, "__wrapped__", function)  # type: ignore[attr-defined]
        return watched

    def _keep(self, site: str, owner: Any, name: str, instance: Any, args: Any, kwargs: Any) -> Call | None:
        leaves = tree_flatten((args, kwargs))[0]
        seen = (site, self.case, id(instance), *((tuple(t.shape), t.dtype) for t in leaves if isinstance(t, Tensor)))
        if self._seen[seen] or self._seen[site, self.case] >= KEPT:
            return None
        self._seen[seen] += 1
        self._seen[site, self.case] += 1
        given, named = tree_map(_leaf, (args, kwargs))
        call = Call(site, self.case, _target(owner, name, instance), given, named, torch.is_grad_enabled())
        self.calls.append(call)
        return call


def alone(call: Call, earlier: Choices | None = None, exact: bool = False) -> Pass:
    """`call` again, as the site is now, with a copy of its module; `exact`: on the CPU, in fp64."""
    module, function = call.target()
    args, kwargs = call.args, call.kwargs
    if exact:
        module = doubled(module.cpu()) if module is not None else None
        args, kwargs = tree_map(lambda t: double(t).cpu() if isinstance(t, Tensor) else t, (args, kwargs))
    leaves = tree_map(_leaf, (args, kwargs))
    args, kwargs = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, leaves)  # it may write into them
    first = () if module is None else (module,)
    choices = Choices(earlier)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        seed()
        if exact:
            stack.enter_context(InDouble())
        stack.enter_context(choices)
        stack.enter_context(torch.set_grad_enabled(call.grad))
        output = function(*first, *args, **kwargs)
        backward(*(t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.requires_grad))
    returned, kind = flat(output)
    gradients: dict[str, Tensor | None] = {}
    if call.grad:
        given = [t for t in tree_flatten(leaves)[0] if isinstance(t, Tensor) and t.requires_grad]
        gradients = {f"input {place}": t.grad for place, t in enumerate(given)}
        gradients |= {name: p.grad for name, p in module.named_parameters()} if module is not None else {}
    return Pass(returned, kind, gradients, choices)


def seconds(call: Call, times: int = 20) -> float:
    """How long one forward of `call` takes on the device it was made on, as the site is now."""
    module, function = call.target()
    first = () if module is None else (module,)
    with torch.no_grad():
        for _ in range(3):
            function(*first, *call.args, **call.kwargs)
        torch.npu.synchronize()  # type: ignore[attr-defined]
        begin = time.perf_counter()
        for _ in range(times):
            function(*first, *call.args, **call.kwargs)
        torch.npu.synchronize()  # type: ignore[attr-defined]
    return (time.perf_counter() - begin) / times


def _target(owner: Any, name: str, instance: nn.Module | None) -> Callable[[], tuple[Any, Callable[..., Any]]]:
    """A copy of the module a site belongs to, without gradients, and what stands in the site when it is asked."""

    def now() -> tuple[Any, Callable[..., Any]]:
        copied = copy.deepcopy(instance)
        if copied is not None:
            copied.zero_grad(set_to_none=True)
        return copied, getattr(owner, name)

    return now


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value.clone() if isinstance(value, Tensor) else value
    return value.detach().clone().requires_grad_(value.requires_grad)
