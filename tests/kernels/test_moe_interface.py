"""The experts interface of transformers 5: what runs fused, what a user has asked for, and what is put back."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import npu_autopatch
from tests.counting import Fused
from tests.kernels.exact import error_in_ulps
from tests.kernels.experts_sweep import FORWARD, inputs, instance, run

moe = pytest.importorskip("transformers.integrations.moe", reason="transformers 4 has no experts interface")
NEW_NAMES = hasattr(moe.ExpertsInterface, "get_interface")


def experts_class(family: str = "qwen3_moe.Qwen3MoeExperts"):
    model, name = family.split(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def patched(**settings):
    return npu_autopatch.patched(kernels="moe", backend="emulate", **settings)


def calls(experts, given, **settings):
    """The fused calls of one forward under the patch."""
    with patched(**settings), Fused() as fused:
        run(experts, given, None)
    return {name: fused.calls[name] for name in FORWARD if fused.calls[name]}


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_what_the_default_and_generation_resolve_to_runs_fused(implementation):
    experts = instance(experts_class(), implementation)
    assert calls(experts, inputs(experts, 5, 2, 0, 1.0)) == FORWARD


@pytest.mark.skipif(not NEW_NAMES, reason="this transformers takes no new names")
def test_the_new_name_is_registered_and_runs_fused():
    experts = instance(experts_class(), "npu_grouped_mm")
    assert calls(experts, inputs(experts, 5, 2, 0, 1.0)) == FORWARD
    assert "npu_grouped_mm" not in moe.ALL_EXPERTS_FUNCTIONS


def test_an_explicit_eager_runs_the_class_s_own_loop():
    experts = instance(experts_class(), "eager")
    assert calls(experts, inputs(experts, 5, 2, 0, 1.0)) == {}


def test_a_function_the_user_has_registered_is_the_one_that_runs():
    ran = []

    def mine(self, hidden_states, top_k_index, top_k_weights):
        ran.append(self)
        return hidden_states

    moe.ALL_EXPERTS_FUNCTIONS["mine"] = mine
    moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = mine
    try:
        for implementation in ("mine", "grouped_mm"):
            experts = instance(experts_class(), implementation)
            assert calls(experts, inputs(experts, 5, 2, 0, 1.0)) == {}
        assert len(ran) == 2
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["mine"], moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]


def test_a_skipped_class_runs_the_original_and_others_fused():
    skipped, other = instance(experts_class()), instance(experts_class("mixtral.MixtralExperts"))
    given = inputs(skipped, 5, 2, 0, 1.0)
    assert calls(skipped, given, skip="qwen3_moe.Qwen3MoeExperts") == {}
    assert calls(other, inputs(other, 5, 2, 0, 1.0), skip="qwen3_moe.Qwen3MoeExperts") == FORWARD


def test_entries_and_classes_are_as_before_after_the_block():
    cls = experts_class()
    entries = type(moe.ALL_EXPERTS_FUNCTIONS)._global_mapping
    before, names = list(entries.items()), dict(vars(cls))
    with patched():
        assert list(entries.items()) != before
        with patched():
            pass
        assert list(entries.items()) != before
    assert list(entries.items()) == before
    assert all(now is then for (_, now), (_, then) in zip(entries.items(), before, strict=True))
    assert dict(vars(cls)) == names


def test_an_entry_put_over_ours_is_left_alone_and_reported():
    experts_class()
    entries = type(moe.ALL_EXPERTS_FUNCTIONS)._global_mapping
    original = entries["grouped_mm"]

    def theirs(*arguments):
        return None

    try:
        with patched():
            entries["grouped_mm"] = theirs
        assert entries["grouped_mm"] is theirs
        row = next(row for row in npu_autopatch.report().sites if row.name == "moe.grouped_mm")
        assert row.state == "foreign" and __name__ in row.reason
    finally:
        entries["grouped_mm"] = original


def test_each_class_and_each_entry_has_its_row():
    experts_class()
    with patched() as report:
        rows = {row.name: row for row in report.sites if row.kernel == "moe" and row.state == "patched"}
    assert rows["qwen3_moe.Qwen3MoeExperts"].variant == "stacked"
    assert {"moe.grouped_mm", "moe.batched_mm"} <= set(rows)
    assert ("moe.npu_grouped_mm" in rows) == NEW_NAMES


@pytest.mark.parametrize("tokens,top_k,spread", [(1, 1, True), (1, 4, True), (6, 1, False), (6, 3, True)])
def test_few_tokens_and_all_to_one_expert(tokens, top_k, spread):
    experts = instance(experts_class())
    x, ids, weights = inputs(experts, tokens, top_k, 1, 1.0)
    given = (x, ids if spread else torch.full_like(ids, 2), weights)
    incoming = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    theirs = run(experts, given, incoming)
    with patched():
        mine = run(experts, given, incoming)
    exact = run(
        instance(experts_class(), "eager").double(),
        [y.double() if y.dtype.is_floating_point else y for y in given],
        incoming.double(),
    )
    for got, expected, right in zip(mine, theirs, exact, strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        errors = [error_in_ulps(y, right, torch.float32, by_row=True) for y in (got, expected)]
        assert errors[0] <= errors[1] + 1
    assert not mine[3][1].any() and mine[3].shape == experts.gate_up_proj.shape  # the expert nobody went to


def test_no_token_runs_the_original():
    experts = instance(experts_class(), "batched_mm")
    x, ids, weights = inputs(experts, 1, 2, 0, 1.0)
    assert calls(experts, (x[:0], ids[:0], weights[:0])) == {}


@pytest.mark.skipif(not hasattr(moe, "deepgemm_bf16_experts_forward"), reason="no expert parallelism by a flag here")
@pytest.mark.parametrize(
    "family", ["qwen3_moe.Qwen3MoeExperts", "gpt_oss.GptOssExperts", "muse_spark.MuseSparkExperts"]
)
def test_experts_that_live_elsewhere_contribute_nothing(family):
    cls = experts_class(family)
    experts = instance(cls)
    experts._is_expert_parallel = True
    x, ids, weights = inputs(experts, 7, 3, 0, 1.0)
    away = torch.tensor([[True, False, False]] * 6 + [[True, True, True]])
    elsewhere = (x, ids.masked_fill(away, experts.num_experts), weights.masked_fill(away, 0.0))
    incoming = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    here = instance(cls)
    right = run(here, (x, ids, weights.masked_fill(away, 0.0)), incoming)
    with patched(), Fused() as fused:
        mine = run(experts, elsewhere, incoming)
    assert fused.calls["npu_grouped_matmul"] >= 6
    for place, (got, expected) in enumerate(zip(mine, right, strict=True)):
        if place == 2:  # a weight that stands for an expert elsewhere has no gradient here
            expected = expected.masked_fill(away, 0.0)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not NEW_NAMES, reason="transformers 5.0 multiplies tensors of one dtype only")
def test_weights_in_bf16_under_autocast_take_tokens_in_fp32_as_the_original_does():
    experts = instance(experts_class()).bfloat16()
    x, ids, weights = inputs(experts, 5, 2, 0, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = run(experts, (x, ids, weights), torch.ones_like(x))
        with patched(), Fused() as fused:
            mine = run(experts, (x, ids, weights), torch.ones_like(x))
    assert fused.calls["npu_grouped_matmul"] == 6
    assert [y.dtype for y in mine] == [y.dtype for y in theirs]
    assert error_in_ulps(mine[0], theirs[0].double(), torch.bfloat16, by_row=True) < 4


def test_frozen_experts_cost_no_product_for_their_gradient():
    experts = instance(experts_class()).requires_grad_(False)
    x, ids, weights = inputs(experts, 5, 2, 0, 1.0)
    with patched(), Fused() as fused:
        experts(x.requires_grad_(), ids, weights).sum().backward()
    assert fused.calls["npu_grouped_matmul"] == 4
    assert x.grad is not None and all(p.grad is None for p in experts.parameters())


@pytest.mark.parametrize(
    "act,op",
    [(nn.SiLU(), "npu_swiglu"), (nn.GELU(), "npu_geglu"), (nn.GELU(approximate="tanh"), "npu_geglu"), (nn.ReLU(), "")],
    ids=["silu", "gelu", "tanh", "relu"],
)
def test_the_activation_an_instance_holds_decides_at_each_call(act, op):
    experts = instance(experts_class())
    given = inputs(experts, 5, 2, 0, 1.0)
    with patched(), Fused() as fused:
        run(experts, given, None)
        assert fused.calls["npu_swiglu"] == 1
        experts.act_fn = act
        fused.calls.clear()
        mine = run(experts, given, torch.ones_like(given[0]))
    assert [fused.calls[name] for name in ("npu_swiglu", "npu_geglu")] == [op == "npu_swiglu", op == "npu_geglu"]
    assert fused.calls["npu_grouped_matmul"] == 6
    for got, expected in zip(mine, run(experts, given, torch.ones_like(given[0])), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_gate_put_on_the_class_later_is_called():
    cls = experts_class()
    experts = instance(cls)
    given = inputs(experts, 5, 2, 0, 1.0)
    default = cls._apply_gate
    with patched():
        before = run(experts, given, None)[0]
        cls._apply_gate = lambda self, both: 2 * default(self, both)
        try:
            torch.testing.assert_close(run(experts, given, None)[0], 2 * before)
        finally:
            cls._apply_gate = default


def test_a_compiler_makes_one_graph_with_the_ops_in_it():
    experts = instance(experts_class())
    given = inputs(experts, 6, 2, 0, 1.0)
    graphs = []

    def keep(graph, _):
        graphs.append(Counter(getattr(node.target, "__name__", "").partition(".")[0] for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    with patched():
        right = run(experts, given, torch.ones_like(given[0]))
        compiled = torch.compile(experts, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
        mine = run_compiled(compiled, experts, given)
    forward, backward = graphs
    assert {name: forward[name] for name in FORWARD} == FORWARD
    assert backward["npu_grouped_matmul"] == 4
    for got, expected in zip(mine, right, strict=True):
        torch.testing.assert_close(got, expected)


def run_compiled(compiled, experts, given):
    x, ids, weights = given
    x, weights = (leaf.detach().clone().requires_grad_() for leaf in (x, weights))
    output = compiled(x, ids, weights)
    return [output.detach(), *torch.autograd.grad(output.sum(), [x, weights, *experts.parameters()])]
