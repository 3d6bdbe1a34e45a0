"""The proof: the loop alone against the grouped products on chosen inputs, and the whole function with and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe.loops.cut import Loop
from npu_autopatch.kernels.moe.loops.exact import Bank, combined
from npu_autopatch.kernels.moe.loops.probe import Inputs, chosen
from npu_autopatch.kernels.swiglu.trace import Unproved
from npu_autopatch.kernels.swiglu.variant import Variant

_MOST = 64  # ulps at the size of its row: what products of some dozens of terms lose where a half type is summed
# What two runs of the same statements may differ by, of the largest value, where one sum in them is rounded otherwise.
_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.06}


@dataclass(frozen=True)
class Case:
    """The inputs of the loop: dtypes of hidden states and weights, the scale of the former, who goes where."""

    hidden: torch.dtype
    weights: torch.dtype
    scale: float
    crowded: bool  # every token to the same experts
    gradients: bool


class Proof:
    """An instance in fp32, its loop, and what is to run in the loop's place."""

    def __init__(self, instance: nn.Module, loop: Loop, variant: Variant, region: FunctionType) -> None:
        self.instance, self.loop, self.variant, self.region = instance, loop, variant, region
        self.experts = list(getattr(instance, loop.attribute))

    def sums(self, gather: Callable[..., Any], fused: Callable[..., Tensor]) -> None:
        """The loop is the sum, in each dtype that weights may have, and the fused sum is no less exact."""
        float_, bfloat = torch.float32, torch.bfloat16
        halves = (bfloat,) if self.loop.region else (bfloat, float_)
        cases = [Case(float_, float_, 60.0, True, False), Case(float_, float_, 1.0, False, True)]
        cases += [Case(bfloat, weights, 1.0, False, True) for weights in halves]
        cases += [Case(bfloat, weights, 60.0, True, False) for weights in halves]
        for case in cases:
            self.instance.to(case.hidden)
            self._sum(case, gather, fused)
        self.instance.float()

    def _sum(self, case: Case, gather: Callable[..., Any], fused: Callable[..., Tensor]) -> None:
        names, roles = dict(self.loop.seen[self.loop.region]), self.loop.roles
        bank = Bank.of(self.experts, self.variant)
        hidden, weights = names[roles.hidden] * case.scale, names[roles.weights]
        ids = names[roles.ids]
        ids = (
            ids[:1].expand_as(ids).contiguous() if case.crowded else chosen(ids.size(0), bank.experts)[:, : ids.size(1)]
        )
        x, w = (t.to(of).detach() for t, of in ((hidden, case.hidden), (weights, case.weights)))
        leaves = [t.clone().requires_grad_(case.gradients) for t in (x, w)]
        exact_leaves = [t.double().requires_grad_(case.gradients) for t in (x, w)]
        parameters = [p for e in self.experts for p in e.parameters()]
        where = f"in {case.hidden} at scale {case.scale:g}".replace("torch.", "")
        names.update({roles.hidden: leaves[0], roles.weights: leaves[1], roles.ids: ids})
        with torch.set_grad_enabled(case.gradients):
            try:
                theirs = self.region(**names)
            except Exception as error:
                raise Unproved(f"its loop fails {where}: {type(error).__name__}: {error}".partition("\n")[0]) from error
            parts = gather(self.experts, leaves[0])
            if parts is None:
                raise Unproved("its experts are not alike, or not of plain linear layers")
            mine = fused(parts, leaves[0], ids, leaves[1]).to(theirs.dtype)
            exact = combined(bank.outputs(exact_leaves[0].flatten(0, -2)), ids, exact_leaves[1]).view(mine.shape)
            _compare("sum over experts", mine, theirs, exact, case.hidden, where)
        if case.gradients:
            self._gradients((mine, theirs, exact), leaves, exact_leaves, parameters, bank, case.hidden, where)

    def _gradients(
        self,
        sums: tuple[Tensor, Tensor, Tensor],
        leaves: list[Tensor],
        exact_leaves: list[Tensor],
        parameters: list[nn.Parameter],
        bank: Bank,
        dtype: torch.dtype,
        where: str,
    ) -> None:
        along = probing.samples(*sums[0].shape, seed=7).to(sums[0].dtype)
        mine, theirs = (torch.autograd.grad(y, [*leaves, *parameters], along, allow_unused=True) for y in sums[:2])
        banked = [p for p in (*bank.weights, *bank.biases) if p is not None]
        right = torch.autograd.grad(sums[2], [*exact_leaves, *banked], along.double())
        stacked = dict(zip(map(id, banked), right[2:], strict=True))
        for what, index in (("hidden states", 0), ("weights", 1)):
            if theirs[index] is None or mine[index] is None:
                raise Unproved(f"no gradient reaches its {what}")
            _compare(f"gradient of its {what}", mine[index], theirs[index], right[index], dtype, where)
        found = dict(zip(map(id, parameters), zip(mine[2:], theirs[2:], strict=True), strict=True))
        names = (*self.variant.projections, self.variant.after[0])
        for name, *both in zip(names, bank.weights, bank.biases, strict=True):
            for kind, stack in zip(("weight", "bias"), both, strict=True):
                if stack is None:
                    continue
                pairs = [found[id(getattr(getattr(expert, name), kind))] for expert in self.experts]
                if any(one is None for one, _ in pairs):
                    raise Unproved(f"no gradient reaches {name}.{kind}")
                ours = torch.stack([one for one, _ in pairs])
                others = torch.stack([torch.zeros_like(one) if other is None else other for one, other in pairs])
                _compare(f"gradient of {name}.{kind}", ours, others, stacked[id(stack)], dtype, where)

    def whole(self, function: Any, replaced: Any, inputs: Inputs, width: int) -> None:
        """All outputs and gradients, the state of the generator and the input after it, with and without the loop."""
        count = len(self.experts)
        for dtype, training in ((torch.float32, True), (torch.bfloat16, False), (torch.float32, False)):
            self._becomes(dtype, function, inputs.values(width, count))
            self.instance.train(training)
            state = torch.get_rng_state()
            runs = []
            for forward in (function, replaced):
                torch.set_rng_state(state)
                given = inputs.values(width, count)
                given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}
                leaf = given[inputs.hidden].requires_grad_(training)
                given[inputs.hidden] = leaf * 1 if training else leaf  # which the function may write to
                with torch.set_grad_enabled(training):
                    try:
                        outputs = list(_tensors(forward(self.instance, **given)))
                    except Exception as error:
                        raise Unproved(f"it fails on a probe in {dtype}: {type(error).__name__}: {error}") from error
                runs.append((outputs, given[inputs.hidden], leaf, torch.get_rng_state()))
            (theirs, their_x, their_leaf, their_state), (mine, my_x, my_leaf, my_state) = runs
            where = f"in {dtype}, {'training' if training else 'evaluation'}".replace("torch.", "")
            if not torch.equal(their_state, my_state):
                raise Unproved(f"its loop draws random numbers {where}")
            if not torch.equal(their_x, my_x):
                raise Unproved(f"its loop writes to the hidden states {where}")
            if len(mine) != len(theirs):
                raise Unproved(f"without its loop it returns something else {where}")
            for one, other in zip(mine, theirs, strict=True):
                _same(one, other, dtype, where)
            if training:
                parameters = [leaf for leaf in self.instance.parameters() if leaf.requires_grad]
                self._whole_gradients((mine, my_leaf), (theirs, their_leaf), parameters, where)
        self.instance.float()

    def _becomes(self, dtype: torch.dtype, function: Any, given: dict[str, Tensor]) -> None:
        """The instance in `dtype`, but for routers that stay in fp32 where the function asks for that."""
        self.instance.to(dtype)
        if dtype is torch.float32:
            return
        given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}
        try:
            with torch.no_grad():
                function(self.instance, **given)
        except RuntimeError:
            for child in self.instance.children():
                if not isinstance(child, (nn.ModuleList, type(self.experts[0]))):
                    child.float()

    def _whole_gradients(self, mine: Any, theirs: Any, parameters: list[nn.Parameter], where: str) -> None:
        found = []
        for outputs, leaf in (mine, theirs):
            floats = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
            along = [probing.samples(*y.shape, seed=8).to(y.dtype) for y in floats]
            found.append(torch.autograd.grad(floats, [leaf, *parameters], along, allow_unused=True))
        for one, other in zip(*found, strict=True):
            if (one is None) != (other is None) and (one is None or bool(one.any())):
                raise Unproved(f"without its loop other parameters have gradients {where}")
            if one is not None and other is not None:
                _same(one, other, torch.float32, where)


def _tensors(value: Any) -> Iterator[Any]:
    """What is in a tree of tuples, lists and dictionaries, and the types of what it is in."""
    if isinstance(value, (tuple, list)):
        yield type(value)
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield type(value)
        for each in value.values():
            yield from _tensors(each)
    else:
        yield value


def _same(one: Any, other: Any, dtype: torch.dtype, where: str) -> None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype is other.dtype and one.shape == other.shape
        if alike and not torch.equal(one, other):
            difference, size = (one.double() - other.double()).abs().max(), other.double().abs().max()
            alike = bool(difference <= _CLOSE[dtype] * size)
    else:
        alike = type(one) is type(other) and bool(one == other)
    if not alike:
        raise Unproved(f"without its loop it computes something else {where}")


def _compare(what: str, mine: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype, where: str) -> None:
    """Values by the size of their row; gradients, which are sums that cancel, by that of their matrix."""
    size = exact.detach().abs()
    size = size.amax((-2, -1) if "gradient" in what else -1, keepdim=True).expand_as(exact)
    unit = probing.ulp(size.clamp_min(float(size.max()) * 2**-20), dtype)  # of some rows nothing is left
    if not probing.no_worse(mine.detach(), theirs.detach(), exact.detach(), unit, most=_MOST):
        raise Unproved(f"its {what} is not that of grouped products {where}")
