"""Follows an input through a forward, without running the constructor: what is called with what, in which order.

The forward runs with an `Instance` for `self`. Each attribute it asks for is a `Part`: called with the input it is a
projection and returns random values of its own, called with one of those or a half of it, it is the activation; what
is called after that gets the product, or passes on what became of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_autopatch.kernels import probing

IN, OUT = 8, 12  # the sizes of the input and of what a projection returns
LEAD = (2, 3)
NUMBER = 0.375  # what a part is where it is taken for a number
HALVES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda whole: whole[..., : OUT // 2],
    lambda whole: whole[..., OUT // 2 :],
)
_INTERLEAVED: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda whole: whole[..., ::2],
    lambda whole: whole[..., 1::2],
)


class Unproved(Exception):
    """Ends a proof; the message is the reason of the refusal."""


class NotGated(Unproved):
    """The forward does not get as far as a gated product."""


class Part(float):
    """What stands for an attribute of the instance: a module, or a number."""

    name: str
    run: Run

    def __new__(cls, name: str, run: Run) -> Part:
        part = float.__new__(cls, NUMBER)
        part.name, part.run = name, run
        return part

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise NotGated(f"its forward calls {self.name} with more than one tensor")
        return self.run.called(self.name, args[0])

    @property
    def weight(self) -> Any:
        self.run.weight_of = self.name
        return torch.empty(0, dtype=self.run.weight_dtype)

    def __getattr__(self, name: str) -> Any:
        raise NotGated(f"its forward reads {self.name}.{name}, which its class cannot show")

    def __bool__(self) -> bool:
        raise NotGated(f"its forward depends on {self.name}, which its class cannot show")


class Instance:
    """What stands for ``self``: `training`, parts that are given, and a `Part` for anything else."""

    def __init__(self, run: Run, cls: type, training: bool, parts: dict[str, Any]) -> None:
        self.__dict__.update(_run=run, _cls=cls, training=training, **parts)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._cls, name):
            raise NotGated(f"its forward uses {name} of its class")
        part = self.__dict__[name] = Part(name, self._run)
        self._run.asked.append(name)
        return part

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotGated(f"its forward sets {name}")


class Run:
    """One forward: its input, what each part was called with and returned.

    The input is of `dtype`; projections return values of `dtypes`, times `scale`, that ask for a gradient if
    `gradients`; what follows the product returns `result`. `weight` is the dtype of what a part shows as its weight.
    `parts` are given in place of what a `Part` would stand for.
    """

    output: Tensor

    def __init__(
        self,
        cls: type,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        lead: tuple[int, ...] = LEAD,
        dtypes: tuple[torch.dtype, ...] = (),
        result: torch.dtype | None = None,
        gradients: bool = False,
        weight: torch.dtype | None = None,
        **parts: Any,
    ) -> None:
        self.cls, self.result, self.parts = cls, result, parts
        self.inputs = inputs(lead, dtype, dtypes or (dtype, dtype), scale, gradients)
        self.x = self.inputs[0]
        self.weight_dtype, self.weight_of = weight or dtype, ""
        self.asked: list[str] = []
        self.projected: dict[str, Tensor] = {}
        self.activated: tuple[str, Tensor] | None = None
        self.after: list[tuple[str, Tensor, Tensor]] = []
        self.cast = ""  # called right after its own weight was read
        self.tracing = False

    def through(self, forward: Callable[..., Any], training: bool = True) -> Tensor:
        """The output of `forward`. Raises `Unproved`."""
        instance = Instance(self, self.cls, training, self.parts)
        try:
            output = forward(instance, self.x)
        except Unproved:
            raise
        except Exception as error:
            unused = self.unused()
            also = f"; it reads {', '.join(unused)}" if unused else ""
            words = str(error).partition("\n")[0]
            raise NotGated(f"its forward fails on a probe: {type(error).__name__}: {words}{also}") from error
        finally:
            if written := any(tensor._version for tensor in self.inputs):
                inputs.cache_clear()
        if written:
            raise Unproved("it writes to its input or to what a projection returned")
        if not isinstance(output, Tensor):
            raise NotGated(f"it returns {type(output).__name__}, not a tensor")
        return output

    def trace(self, forward: FunctionType) -> Tensor:
        """`through`, and a part called with the output of a projection, or a half, is taken for the activation."""
        self.tracing = True
        return self.through(forward, training=False)

    def called(self, name: str, x: Tensor) -> Tensor:
        if x is self.x:
            projected = self.projected[name] = self.inputs[min(1 + len(self.projected), 2)]
            return projected
        if self.tracing and not self.after and self.activated is None and self.source(x) is not None:
            self.activated = (name, x)
            return F.silu(x)
        if name == self.weight_of:
            self.cast = name
        y = x * factor(len(self.after), x.shape, x.dtype)
        y = y.to(self.result) if self.result is not None else y
        self.after.append((name, x, y))
        return y

    def source(self, x: Tensor) -> tuple[int, int | None] | None:
        """Of which projection `x` is the output, and which half of it; None if of none."""
        for index, whole in enumerate(self.projected.values()):
            if x.shape == whole.shape and torch.equal(x, whole):
                return index, None
            if x.shape == HALVES[0](whole).shape:
                for half, part in enumerate((*HALVES, *_INTERLEAVED)):
                    if torch.equal(x, part(whole)):
                        if half > 1:
                            raise Unproved("the halves of its projection are interleaved, which the op does not take")
                        return index, half
        return None

    def unused(self) -> list[str]:
        """The attributes it asked for and called nothing of."""
        called = {*self.projected, *(name for name, _, _ in self.after)}
        called |= {self.activated[0]} if self.activated else set()
        return [name for name in dict.fromkeys(self.asked) if name not in called]

    @property
    def calls(self) -> tuple[str, ...]:
        return (*self.projected, *(name for name, _, _ in self.after))

    @property
    def product(self) -> Tensor:
        return self.after[0][1]

    def passed_on(self, output: Tensor) -> bool:
        """Whether each module after the product got what the one before returned, and the last one's is `output`."""
        after = [y for _, _, y in self.after]
        received = [x for _, x, _ in self.after[1:]] + [output]
        names = [name for name, _, _ in self.after[1:]] + [""]
        return all(y is x or self._same(y, x, name) for y, x, name in zip(after, received, names, strict=True))

    def _same(self, returned: Tensor, received: Tensor, name: str) -> bool:
        may_be_cast = returned.dtype is received.dtype or name == self.cast != ""
        same_shape = returned.shape == received.shape
        return may_be_cast and same_shape and torch.equal(returned.to(received.dtype), received)


@functools.cache
def inputs(
    lead: tuple[int, ...], dtype: torch.dtype, dtypes: tuple[torch.dtype, ...], scale: float, gradients: bool
) -> tuple[Tensor, ...]:
    """The input of a run, and what its first projection and any other return."""
    outputs = [probing.samples(*lead, OUT, seed=seed) * scale for seed in (1, 2)]
    projected = [x.to(of).requires_grad_(gradients) for x, of in zip(outputs, (*dtypes, *dtypes), strict=False)]
    return probing.samples(*lead, IN).to(dtype, copy=True), *projected


@functools.cache
def factor(index: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What a module after the product multiplies by."""
    return probing.samples(*shape, seed=10 + index).to(dtype)
