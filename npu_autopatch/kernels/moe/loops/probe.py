"""Which names of a function are hidden states, chosen experts, routing weights and their sum: told by their values."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe.loops.cut import Loop, Roles
from npu_autopatch.kernels.moe.loops.exact import Bank, combined
from npu_autopatch.kernels.moe.loops.source import Source, chains, changes, reads
from npu_autopatch.kernels.swiglu.trace import Unproved

LEAD, TOP_K = (2, 7), 3
_SEEN = "_npu_autopatch_seen"
_NEAR = 1e-4  # of the largest value: what fp32 loses in sums of some dozens
_KINDS: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (("hidden",), ("hidden rows",)),
    2: (("hidden", "logits"), ("hidden rows", "logits")),
    3: (("hidden rows", "ids", "weights"), ("hidden", "ids", "weights")),
}
_HINTS = {"ids": ("ind", "id", "select", "expert"), "weights": ("weight", "score", "prob", "gate", "logit")}


@dataclass(frozen=True)
class Inputs:
    """What a function is called with: of each parameter it insists on, the kind."""

    kinds: dict[str, str]

    @property
    def hidden(self) -> str:
        """The parameter with the hidden states."""
        return next(name for name, kind in self.kinds.items() if kind.startswith("hidden"))

    @property
    def routed(self) -> tuple[str, str] | None:
        """The parameters with the ids and the weights, where the function is given them."""
        names = {kind: name for name, kind in self.kinds.items()}
        return (names["ids"], names["weights"]) if "ids" in names and "weights" in names else None

    def values(self, hidden: int, experts: int) -> dict[str, Tensor]:
        """Random ones."""
        tokens = LEAD[0] * LEAD[1]
        given = {
            "hidden": probing.samples(*LEAD, hidden, seed=1),
            "hidden rows": probing.samples(tokens, hidden, seed=1),
            "logits": probing.samples(tokens, experts, seed=2),
            "ids": chosen(tokens, experts),
            "weights": probing.samples(tokens, TOP_K, seed=3),
        }
        return {name: given[kind].clone() for name, kind in self.kinds.items()}


def chosen(tokens: int, experts: int, most: int = TOP_K, crowded: bool = False) -> Tensor:
    """Experts for each token, no order among them, the second unhit: int64 [tokens, most].

    If `crowded`, the first is hit by every token, where that leaves another for them.
    """
    scores = probing.samples(tokens, experts, seed=4).clone()
    scores[:, 1] = -100.0
    if crowded and most > 1:
        scores[:, 0] = 100.0
    return scores.topk(min(most, experts), sorted=False).indices


def possible(source: Source) -> Iterator[Inputs]:
    """What the function may want, the most likely first."""
    args = source.definition.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)][1:]
    required = positional[: len(positional) - len(args.defaults)]
    if any(default is None for default in args.kw_defaults):
        return
    orders = [order for kinds in _KINDS.get(len(required), ()) for order in itertools.permutations(kinds)]
    for order in sorted(orders, key=lambda order: -sum(map(_hinted, required, order))):
        yield Inputs(dict(zip(required, order, strict=True)))


def _hinted(name: str, kind: str) -> bool:
    return any(word in name for word in _HINTS.get(kind, ("hidden", "x", "states")))


def observed(source: Source, instance: nn.Module, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The values of all names before each statement of the body, and at its end. Raises what the function does."""
    body: list[ast.stmt] = []
    for statement in source.body:
        body += [_look(statement), statement]
    if not isinstance(source.body[-1], ast.Return):
        body.append(_look(source.body[-1]))
    found: list[dict[str, Any]] = []
    copies: dict[int, tuple[int, Tensor, Tensor]] = {}

    def look(values: dict[str, Any]) -> None:
        found.append({name: _copy(value, copies) for name, value in values.items() if not name.startswith(_SEEN)})

    function = source.compiled(body, {_SEEN: look, f"{_SEEN}_values": locals})
    torch.default_generator.manual_seed(1)  # what it draws, too, is the same each time; `undisturbed` puts it back
    function(instance, **inputs)
    return found


def _look(statement: ast.stmt) -> ast.stmt:
    call = ast.Call(ast.Name(f"{_SEEN}_values", ast.Load()), [], [])
    look = ast.Expr(ast.Call(ast.Name(_SEEN, ast.Load()), [call], []))
    return ast.fix_missing_locations(ast.copy_location(look, statement))


def _copy(value: Any, copies: dict[int, tuple[int, Tensor, Tensor]]) -> Any:
    """A tensor as it is now: the function may go on writing to it."""
    if not isinstance(value, Tensor):
        return value
    known = copies.get(id(value))
    if known is None or known[0] != value._version:
        known = copies[id(value)] = (value._version, value.detach().clone(), value)
    return known[1]


def loops(source: Source, instance: nn.Module) -> list[tuple[int, str]]:
    """The loops at the top of the body, by place, over a list of modules, by attribute."""
    lists = ((place, _looped(statement, source.me, instance)) for place, statement in enumerate(source.body))
    return [(place, attribute) for place, attribute in lists if attribute]


def _looped(statement: ast.stmt, me: str, instance: nn.Module) -> str:
    """The list of modules that the statement loops over; empty if it is no loop, or over none."""
    if not isinstance(statement, ast.For):
        return ""
    names = {chain[0] for chain in chains(me, statement) if chain}
    lists = [name for name in names if isinstance(getattr(instance, name, None), nn.ModuleList)]
    return lists[0] if len(lists) == 1 else ""


def with_branch(source: Source, instance: nn.Module) -> Source:
    """The source through the branch that loops over a list of modules, if an instance decides on it by itself.

    The instance is left in the mode, training or evaluation, that takes the branch.
    """
    for place, statement in enumerate(source.body):
        if not isinstance(statement, ast.If) or reads(statement.test) != {source.me}:
            continue
        for mode in (True, False):
            instance.train(mode)
            taken = source.through(place, instance)
            if loops(taken, instance):
                return taken
    return source


def recognised(source: Source, place: int, attribute: str, seen: list[dict[str, Any]], bank: Bank) -> Loop:
    """The loop at `place` and its roles. Raises `Unproved`."""
    before = seen[place]
    hidden = _of(before, lambda x: x.is_floating_point() and x.dim() > 1 and x.size(-1) == bank.hidden)
    if not hidden:
        raise Unproved("no hidden states are among its names before the loop")
    ids = _of(before, lambda x: not x.is_floating_point() and x.dim() == 2 and _are_ids(x, bank.experts))
    if not ids:
        raise Unproved("no chosen experts, [tokens, top_k], are among its names before the loop")
    shapes = {value.shape for value in ids.values()}
    weights = _of(before, lambda x: x.is_floating_point() and x.shape in shapes)
    if not weights:
        raise Unproved("no weights of the chosen experts, [tokens, top_k], are among its names before the loop")
    sums: dict[tuple[str, ...], Tensor] = {}
    for end in range(place + 1, len(seen)):
        after = seen[end]
        results = [name for name in changes(source.body[end - 1]) if _is_sum(after.get(name), bank.hidden)]
        if not results:
            continue
        near = _nearest(source, place, end)
        for triple in itertools.product(*(sorted(names, key=near) for names in (hidden, ids, weights))):
            if triple not in sums:
                exact = _sum(bank, *(before[name] for name in triple))
                if exact is None or not exact.any():  # nothing adds up to nothing, whatever the names are
                    continue
                sums[triple] = exact
            exact = sums[triple]
            for name in results:
                got = after[name]
                if got.shape == before[triple[0]].shape and _near(got.reshape(exact.shape), exact):
                    return Loop(source, attribute, place, end, Roles._make((*triple, name)), seen)
    raise Unproved("what its loop adds up is not each token's experts, weighted")


def _of(names: dict[str, Any], is_one: Any) -> dict[str, Tensor]:
    return {name: value for name, value in names.items() if isinstance(value, Tensor) and is_one(value)}


def _are_ids(x: Tensor, experts: int) -> bool:
    return x.dtype in (torch.int64, torch.int32) and x.numel() > 0 and int(x.min()) >= 0 and int(x.max()) < experts


def _is_sum(value: Any, hidden: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.size(-1) == hidden


def _sum(bank: Bank, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor | None:
    rows = hidden.reshape(-1, hidden.size(-1)).double()
    if not rows.size(0) == ids.size(0) == weights.size(0) or ids.shape != weights.shape:
        return None
    with torch.no_grad():
        return combined(bank.outputs(rows), ids, weights.double())


def _near(got: Tensor, exact: Tensor) -> bool:
    return bool((got.double() - exact).abs().max() <= _NEAR * exact.abs().max())


def _nearest(source: Source, place: int, end: int) -> Any:
    """By how many assignments a name is away from what the loop reads: of two that hold the same, it reads one."""
    distance: dict[str, int] = {}
    names, steps = reads(*source.body[place:end]), 0
    while names - distance.keys():
        new = names - distance.keys()
        distance.update(dict.fromkeys(new, steps))
        steps += 1
        makers = [statement for statement in source.body[:place] if changes(statement) & new]
        names = reads(*makers)
    return lambda name: (distance.get(name, len(distance)), name)
