"""The proof: the loop alone against the grouped products on chosen inputs, and the whole function with and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe.loops.cut import Loop
from npu_autopatch.kernels.moe.loops.exact import Bank, combined
from npu_autopatch.kernels.moe.loops.experts import Fused, Gather
from npu_autopatch.kernels.moe.loops.probe import Inputs, chosen
from npu_autopatch.kernels.moe.loops.replacement import region, routing_of
from npu_autopatch.kernels.swiglu.trace import Unproved
from npu_autopatch.kernels.swiglu.variant import Variant

_MOST = 64  # ulps at the size of its row: what products of some dozens of terms lose where a half type is summed
# What two runs of the same statements may differ by, of the largest value, where one sum in them is rounded otherwise.
_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.06}


class OtherDtype(Unproved):
    """The function returns another dtype, unless the sum has the one of the weights."""


class Proof:
    """An instance in fp32, its loop, and what is to run in the loop's place."""

    def __init__(self, instance: nn.Module, loop: Loop, variant: Variant, gather: Gather, fused: Fused) -> None:
        self.instance, self.loop, self.variant, self.gather, self.fused = instance, loop, variant, gather, fused
        self.region = region(loop)
        self.experts: list[nn.Module] = list(getattr(instance, loop.attribute))

    def prove(self, function: Any, replaced: Any, inputs: Inputs) -> None:
        """The loop is the sum and the fused sum no less exact, in each dtype weights may have; nothing else changes.

        Raises `Unproved`. The instance is in bf16 afterwards.
        """
        whole, half = torch.float32, torch.bfloat16
        bank = Bank.of(self.experts, self.variant)
        assumed = self.instance.training if self.loop.source.assumed else None
        self._whole(whole, assumed is not False, function, replaced, inputs, bank)
        self._sum(whole, whole, bank, gradients=False)
        self.instance.to(half)
        bank = Bank.of(self.experts, self.variant)
        if self.loop.region == 0:  # its caller decides
            self._sum(half, half, bank, gradients=False)
        self._sum(half, self._weights_of(half, inputs, bank), bank, gradients=True)
        self._whole(half, assumed is True, function, replaced, inputs, bank)

    def _weights_of(self, dtype: torch.dtype, inputs: Inputs, bank: Bank) -> torch.dtype:
        """The dtype of routing weights where hidden states have `dtype`. Routers stay in fp32 that insist on it."""
        if self.loop.region == 0:
            return torch.float32
        routing = routing_of(self.loop)
        for again in (False, True):
            try:
                with torch.no_grad():
                    weights: Tensor = routing(self.instance, **_in(dtype, inputs.values(bank.hidden, bank.experts)))
                return weights.dtype
            except RuntimeError as error:
                if again:
                    words = str(error).partition("\n")[0]
                    raise Unproved(f"it fails on a probe in {dtype}: {words}".replace("torch.", "")) from error
            for child in self.instance.children():
                if not isinstance(child, (nn.ModuleList, type(self.experts[0]))):
                    child.float()
        raise AssertionError

    def _sum(self, dtype: torch.dtype, of_weights: torch.dtype, bank: Bank, gradients: bool) -> None:
        """One half of the tokens is at scale 60, all have one expert in common, another has none."""
        names, roles = dict(self.loop.seen[self.loop.region]), self.loop.roles
        hidden, weights, ids = (names[name] for name in (roles.hidden, roles.weights, roles.ids))
        ids = chosen(ids.size(0), bank.experts, ids.size(1), crowded=True)
        scale = torch.where(torch.arange(hidden.numel()) < hidden.numel() // 2, 1.0, 60.0).view(hidden.shape)
        given = (hidden * scale).to(dtype), weights.to(of_weights)
        leaves = [t.clone().requires_grad_(gradients) for t in given]
        exact_leaves = [t.double().requires_grad_(gradients) for t in given]
        where = f"in {dtype}".replace("torch.", "")
        names.update({n: leaves[0].view(x.shape) for n, x in names.items() if _shows(x, hidden)})
        names.update({roles.hidden: leaves[0], roles.weights: leaves[1], roles.ids: ids})
        with torch.set_grad_enabled(gradients):
            try:
                theirs = self.region(**names)
            except Exception as error:
                words = str(error).partition("\n")[0]
                raise Unproved(f"its loop fails {where}: {type(error).__name__}: {words}") from error
            parts = self.gather(self.experts, leaves[0])
            if parts is None:
                raise Unproved("its experts are not alike, or not of plain linear layers")
            mine = self.fused(parts, leaves[0], ids, leaves[1]).to(theirs.dtype)
            exact = combined(bank.outputs(exact_leaves[0].flatten(0, -2)), ids, exact_leaves[1]).view(mine.shape)
        _compare("sum over experts", mine, theirs, exact, dtype, where)
        if gradients:
            parameters = [p for e in self.experts for p in e.parameters()]
            self._gradients((mine, theirs, exact), leaves, exact_leaves, parameters, bank, dtype, where)

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

    def _whole(
        self, dtype: torch.dtype, training: bool, function: Any, replaced: Any, inputs: Inputs, bank: Bank
    ) -> None:
        """All outputs and gradients, the state of the generator and the input after it, with and without the loop."""
        self.instance.train(training)
        torch.default_generator.manual_seed(2)
        state = torch.get_rng_state()
        where = f"in {dtype}, {'training' if training else 'evaluation'}".replace("torch.", "")
        runs = []
        for forward in (function, replaced):
            torch.set_rng_state(state)
            given = _in(dtype, inputs.values(bank.hidden, bank.experts))
            if inputs.routed:  # routers often give them in fp32
                given[inputs.routed[1]] = given[inputs.routed[1]].float()
            leaf = given[inputs.hidden].requires_grad_(training)
            given[inputs.hidden] = x = leaf * 1 if training else leaf  # which the function may write to
            with torch.set_grad_enabled(training):
                try:
                    outputs = list(_tensors(forward(self.instance, **given)))
                except Exception as error:
                    words = str(error).partition("\n")[0]
                    raise Unproved(f"it fails on a probe {where}: {type(error).__name__}: {words}") from error
            runs.append((outputs, x, leaf, torch.get_rng_state()))
        (theirs, their_x, their_leaf, their_state), (mine, my_x, my_leaf, my_state) = runs
        if not torch.equal(their_state, my_state):
            raise Unproved(f"its loop draws random numbers {where}")
        if not torch.equal(their_x, my_x):
            raise Unproved(f"its loop writes to the hidden states {where}")
        if len(mine) != len(theirs):
            raise Unproved(f"without its loop it returns something else {where}")
        for one, other in zip(mine, theirs, strict=True):
            _same(one, other, dtype, where)
        if dtype is torch.float32 and training and any(isinstance(y, Tensor) and y.requires_grad for y in theirs):
            parameters = [parameter for parameter in self.instance.parameters() if parameter.requires_grad]
            self._whole_gradients((mine, my_leaf), (theirs, their_leaf), parameters, where)

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


def _shows(value: Any, hidden: Tensor) -> bool:
    """Whether a name is another for the hidden states, in their shape or another."""
    if not isinstance(value, Tensor) or value.numel() != hidden.numel() or value.size(-1) != hidden.size(-1):
        return False
    return torch.equal(value.reshape(hidden.shape), hidden)


def _in(dtype: torch.dtype, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}


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
        if one.dtype is not other.dtype:
            raise OtherDtype(f"without its loop it returns {one.dtype} {where}".replace("torch.", ""))
        alike = one.shape == other.shape
        if alike and not torch.equal(one, other):
            difference, size = (one.double() - other.double()).abs().max(), other.double().abs().max()
            alike = bool(difference <= _CLOSE[dtype] * size)
    else:
        alike = type(one) is type(other) and bool(one == other)
    if not alike:
        raise Unproved(f"without its loop it computes something else {where}")


def _compare(what: str, mine: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype, where: str) -> None:
    """Values by the size of their row; gradients, which are sums that cancel, by that of their matrix."""
    size = exact.detach().abs().amax((-2, -1) if "gradient" in what else -1, keepdim=True)
    unit = probing.ulp(size.clamp_min(float(size.max()) * 2**-20), dtype)  # of some rows nothing is left
    same = mine.dtype is theirs.dtype and mine.shape == theirs.shape
    if not same or not _no_worse(mine.detach(), theirs.detach(), exact.detach(), unit):
        raise Unproved(f"its {what} is not that of grouped products {where}")


def _no_worse(mine: Tensor, theirs: Tensor, exact: Tensor, unit: Tensor) -> bool:
    """Whether `mine` is no further from `exact` than `theirs` by more than one `unit`, and `theirs` near it.

    On average: the largest of some hundred roundings is random, the original's as much as ours.
    """
    errors = ((torch.stack((mine, theirs)) - exact).abs() / unit).flatten(1)
    (my_mean, their_mean), (my_most, their_most) = errors.square().mean(1).sqrt().tolist(), errors.amax(1).tolist()
    return bool(my_mean <= their_mean + 1 and their_most <= _MOST and my_most <= 2 * their_most + 8)
