"""Whole models of many families: fused and original give one answer and one set of gradients, in each dtype."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import npu_autopatch
from npu_autopatch.ops import rotary
from npu_autopatch.reporting import Row
from tests.counting import Fused

from .comparison import Outcome, exact_outcome, further, outcome, worse
from .families import FAMILIES, inputs, tiny

pytestmark = pytest.mark.xdist_group("families")  # of one process, which runs all of them before it patches any
PRESENT = [name for name, family in FAMILIES.items() if family.exists]
each_family = pytest.mark.parametrize("name", PRESENT)
# what the report has of a family's module besides patched sites: parts of the model that are none
NO_SITES = {
    "cohere": {"CohereLayerNorm"},
    "cohere2": {"Cohere2LayerNorm"},
    # hands its arguments to a rotary autograd function of its own; transformers 5 no longer has it
    "modernbert": {"apply_rotary_unpadded"},
}
KERNELS = {"npu_rms_norm": "rms_norm", "npu_rotary_mul": "rope", "npu_swiglu": "swiglu", "npu_geglu": "swiglu"}
KERNELS["npu_grouped_matmul"] = "moe"


@pytest.fixture(scope="module")
def unpatched(request: pytest.FixtureRequest) -> dict[tuple[str, torch.dtype], tuple[Outcome, Outcome]]:
    """The original's outcome, and the exact one, of all families that are asked for: before any of them is patched."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = dict.fromkeys(item.callspec.params["name"] for item in items)
    keys = [(name, dtype) for name in names for dtype in (torch.float32, torch.bfloat16)]
    models = {key: tiny(*key) for key in keys}
    return {
        key: (outcome(model, inputs(key[0])), exact_outcome(model, inputs(key[0]))) for key, model in models.items()
    }


@pytest.fixture(scope="module")
def patched(unpatched: Any) -> Iterator[Callable[..., Any]]:
    """Every family under one patch: each block of that would prove the sites of all of them again."""

    @functools.cache
    def of(name: str, dtype: torch.dtype) -> tuple[Outcome, dict[str, int], list[Row]]:
        """The outcome, the fused calls, and what the report has of the modules its parts come from."""
        model = tiny(name, dtype)
        homes = {type(part).__module__ for part in model.modules()} | {type(model).__module__}
        with Fused() as fused:
            got = outcome(model, inputs(name))
        return got, dict(fused.calls), [row for row in report.sites if row.module in homes]

    with npu_autopatch.patched(backend="emulate") as report:
        yield of


def test_forty_families_are_here() -> None:
    assert len(PRESENT) >= 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each_family
def test_every_layer_runs_fused_and_answer_and_gradients_are_no_worse(
    name: str, dtype: torch.dtype, unpatched: Any, patched: Any
) -> None:
    got, calls, _ = patched(name, dtype)
    assert calls == FAMILIES[name].calls
    assert not (found := worse(got, *unpatched[name, dtype])), "\n".join(found)


@each_family
def test_the_report_has_every_site_of_the_family_as_patched(name: str, patched: Any) -> None:
    _, calls, rows = patched(name, torch.float32)
    others = [row for row in rows if row.state != "patched"]
    homes = [sys.modules[row.module] for row in rows]
    no_sites = {part for part in NO_SITES.get(name, set()) if any(hasattr(home, part) for home in homes)}
    assert {row.name.rpartition(".")[2] for row in others} == no_sites, others
    assert all(row.state == "refused" and row.reason for row in others)
    kernels = {row.kernel for row in rows if row.state == "patched"}
    if "moe" in kernels:
        kernels.add("swiglu")  # between the products of experts
    assert {KERNELS[op] for op in calls if op in KERNELS} <= kernels


def _other_pairs(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return rotary.reference(x, cos, sin, "interleave" if mode == "half" else "half")


def _other_frequencies(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return rotary.reference(x, cos.roll(1, -1), sin.roll(1, -1), mode)


def _backwards(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return rotary.reference(x, cos, -sin, mode)


def _gate_for_up(halves: Tensor, *rest: Any) -> Any:
    return _OPS["npu_swiglu" if len(rest) == 1 else "npu_geglu"](torch.cat(halves.chunk(2, -1)[::-1], -1), *rest)


def _no_weight(x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return _OPS["npu_rms_norm"](x, torch.ones_like(weight), *rest)


def _first_expert(x: list[Tensor], weight: list[Tensor], *rest: Any, **named: Any) -> Any:
    if named["group_type"] == 0:
        weight = [weight[0][:1].expand_as(weight[0])] if len(weight) == 1 else weight[:1] * len(weight)
    return _OPS["npu_grouped_matmul"](x, weight, *rest, **named)


def _taken_off(rows: Tensor, order: Tensor, weights: Tensor | None, *rest: Any) -> Any:
    weights = None if weights is None else -weights  # a factor would be lost in a norm after the experts
    return _OPS["npu_moe_token_unpermute"](rows, order, weights, *rest)


_OPS: Any = {}
WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "pairs of the other mode": ("npu_rotary_mul", _other_pairs),
    "frequencies of the neighbour": ("npu_rotary_mul", _other_frequencies),
    "turned backwards": ("npu_rotary_mul", _backwards),
    "gate taken for up": ("npu_swiglu", _gate_for_up),
    "gelu of up": ("npu_geglu", _gate_for_up),
    "no weight": ("npu_rms_norm", _no_weight),
    "the first expert for all": ("npu_grouped_matmul", _first_expert),
    "each expert taken off": ("npu_moe_token_unpermute", _taken_off),
}


class Instead(TorchFunctionMode):
    """A wrong computation in place of an op."""

    def __init__(self, op: str, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.op, self.wrong = f"npu.{op}.default", wrong

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.wrong if str(function) == self.op else function)(*args, **(kwargs or {}))


@each_family
def test_a_mistake_in_an_op_would_show(name: str, unpatched: Any, patched: Any) -> None:
    original, exact = unpatched[name, torch.float32]
    model, calls = tiny(name), FAMILIES[name].calls
    mistakes = {words: WRONG[words] for words in WRONG if WRONG[words][0] in calls}
    assert mistakes
    _OPS.update({op: getattr(torch.ops.npu, op).default for op, _ in mistakes.values()})
    for words, (op, wrong) in mistakes.items():
        with Instead(op, wrong):
            answer = copy.deepcopy(model)(**inputs(name))[0].detach()
        assert further("", answer, original.answer, exact.answer, torch.float32), words
