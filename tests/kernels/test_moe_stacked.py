"""Stacked experts that no interface serves: fused where it is legal, and else what the original computes."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import npu_autopatch
from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe import proof, stacked
from npu_autopatch.kernels.moe.stacked.gate import Gate
from npu_autopatch.kernels.moe.stacked.probe import Probe
from npu_autopatch.reporting import PATCHED, REFUSED
from tests.counting import Fused
from tests.kernels import odd_experts
from tests.kernels.exact import behind, error_in_ulps
from tests.kernels.odd import patched_copy
from tests.kernels.stacked_experts import (
    DENSE,
    EXPERTS,
    IDENTITY,
    MASKED,
    OPS,
    PRESENT,
    SEPARATE,
    TOKENS,
    arguments,
    built,
    experts_class,
    hidden_states,
    routed,
    run,
)

ORIGINAL = {name: experts_class(name).forward for name in PRESENT}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def patched():
    with npu_autopatch.patched(kernels="moe", backend="emulate") as report:
        yield report


def forward_calls(name):
    products = 3 if name in SEPARATE else 2
    calls = {"npu_moe_token_permute": 1, "npu_grouped_matmul": products, "npu_moe_token_unpermute": 1}
    return {**calls, "npu_swiglu": 1} if name in OPS else calls


def unpatched(one, *given):
    return run(one, ORIGINAL[one.name], *given)


def fused(one, *given):
    """The result of the patched class; it must have run fused, forward and backward."""
    with Fused() as calls:
        found = run(one, type(one.module).__call__, *given)
    expected = forward_calls(one.name)
    assert {name: calls.calls[name] for name in expected} == {
        # two more products for each: the gradients of its rows and of its weights, and one of its biases
        name: count * (4 if "gpt_oss" in one.name else 3) if name == "npu_grouped_matmul" else count
        for name, count in expected.items()
    }
    return found


def is_original(one, x, ids, weights):
    """The call gave what the original gives, and ran no op."""
    with Fused() as calls:
        found = type(one.module).__call__(one.module, **arguments(one, x, ids, weights))
    expected = ORIGINAL[one.name](one.module, **arguments(one, x, ids, weights))
    assert found.dtype is expected.dtype
    return torch.equal(found, expected) and not calls.calls


def given(one, seed=0, dtype=torch.float32, scale=1.0):
    ids, weights = routed(one, seed)
    return hidden_states(one, seed, dtype, scale), ids, weights.to(dtype)


@pytest.mark.parametrize("name", PRESENT)
def test_each_class_is_patched_with_its_form(name, patched):
    row = next(row for row in patched.sites if row.name == name and row.kernel == "moe")
    variants = {
        "qwen3_vl_moe.Qwen3VLMoeTextExperts": "stacked, halves+dense",
        "gpt_oss.GptOssExperts": "stacked, interleaved+clamped+dense+bias",
        "dbrx.DbrxExperts": "stacked, separate",
        "longcat_flash.LongcatFlashExperts": "stacked, halves+identity",
        "step3p7.Step3p7Experts": "stacked, own gate",
    }
    assert (row.state, row.variant) == (PATCHED, variants[name])
    assert inspect.signature(type(built(name).module).forward) == inspect.signature(ORIGINAL[name])


def comparison(name, training, dtype, scale, seed):
    """Each part of the results: its name, two descriptions, and the errors of fused and original, in ulps."""
    one = built(name)
    one.module.train(training)
    inputs = given(one, seed, dtype, scale)
    one.module.to(dtype)
    mine, theirs = fused(one, *inputs), unpatched(one, *inputs)
    exact = unpatched(built_from(one), *inputs, torch.float64)
    assert set(mine) == set(theirs)
    parts = [("calls", "", "", 0, 0)]
    for what, right in exact.items():
        assert (mine[what].dtype, mine[what].shape) == (theirs[what].dtype, theirs[what].shape)
        if what == "weights" and not training and name == DENSE[0]:
            continue  # in evaluation the original computes every expert, so that a weight of zero has a gradient
        errors = [error_in_ulps(y[what], right, dtype, by_row=True) for y in (mine, theirs)]
        parts.append((what, "", "", *errors))
    return parts


def built_from(one):
    """The same parameters in fp64."""
    other = built(one.name)
    other.module = copy.deepcopy(one.module).double()
    return other


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PRESENT)
def test_values_and_gradients_are_no_less_exact(name, training, dtype, scale):
    def compare(seed):
        return comparison(name, training, dtype, scale, seed)

    assert behind(compare(0), compare) == []


@pytest.mark.parametrize("name", PRESENT)
def test_experts_without_tokens_get_gradients_of_zero(name):
    one = built(name)
    for ids in (routed(one)[0], torch.tensor([3, 4, 5]).repeat(TOKENS, 1)):
        weights = torch.rand(ids.shape)
        found = fused(one, hidden_states(one), ids, weights)
        expected = unpatched(one, hidden_states(one), ids, weights)
        for what, parameter in one.module.named_parameters():
            assert found[what].shape == parameter.shape
            torch.testing.assert_close(found[what], expected[what], rtol=1e-4, atol=1e-5)
            if ids[0].tolist() == [3, 4, 5] and parameter.size(0) == EXPERTS:
                assert not found[what][:3].any() and found[what][3].any()


@pytest.mark.parametrize("name", PRESENT)
def test_frozen_experts_cost_no_product_for_their_gradient(name):
    one = built(name)
    one.module.requires_grad_(False)
    x, ids, weights = given(one)
    with Fused() as calls:
        output = one.module(**arguments(one, x.requires_grad_(), ids, weights))
        output.sum().backward()
    assert calls.calls["npu_grouped_matmul"] == 2 * forward_calls(name)["npu_grouped_matmul"]
    assert x.grad is not None


@pytest.mark.parametrize("name", PRESENT)
def test_in_inference_each_product_is_made_once(name):
    one = built(name)
    one.module.eval()
    ids, weights = (torch.cat((t, t)) for t in routed(one))
    x = torch.cat((hidden_states(one), hidden_states(one, seed=1)))
    with torch.inference_mode(), Fused() as calls:
        found = one.module(**arguments(one, x, ids, weights))
        assert calls.calls == forward_calls(name)
        expected = ORIGINAL[name](one.module, **arguments(one, x, ids, weights))
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in PRESENT if name in MASKED])
@pytest.mark.parametrize("training", [True, False])
def test_an_id_that_names_no_expert_contributes_nothing(name, training):
    one = built(name)
    one.module.train(training)
    x, ids, weights = given(one)
    ids[0], ids[2, 1] = EXPERTS, EXPERTS
    found, expected = fused(one, x, ids, weights), unpatched(one, x, ids, weights)
    for what, right in expected.items():
        torch.testing.assert_close(found[what], right, rtol=1e-4, atol=1e-5)
    assert not found["output"].view(TOKENS, -1)[0].any() and not found["x"].view(TOKENS, -1)[0].any()


@pytest.mark.skipif("longcat_flash.LongcatFlashExperts" not in PRESENT, reason="not in this transformers")
def test_identity_experts_give_a_token_back():
    one = built("longcat_flash.LongcatFlashExperts")
    x, ids, weights = given(one)
    ids[0] = torch.tensor([EXPERTS, EXPERTS + IDENTITY - 1, 2])
    ids[1, :2] = torch.tensor([EXPERTS, EXPERTS + 1])
    found, expected = fused(one, x, ids, weights), unpatched(one, x, ids, weights)
    for what, right in expected.items():
        torch.testing.assert_close(found[what], right, rtol=1e-4, atol=1e-5)
    one.module.num_routed_experts -= 1  # then one more of them is an identity
    assert is_original(one, x, ids, weights)
    one.module.num_routed_experts += 1
    if hasattr(one.module, "identity_expert"):
        one.module.identity_expert.register_forward_hook(lambda *_: None)
        assert is_original(one, x, ids, weights)


@pytest.mark.parametrize("name", PRESENT)
def test_a_chosen_expert_may_weigh_nothing(name):
    one = built(name)
    x, ids, weights = given(one)
    weights[:, 0] = 0.0
    found, expected = fused(one, x, ids, weights), unpatched(one, x, ids, weights)
    for what, right in expected.items():
        torch.testing.assert_close(found[what], right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in PRESENT if name in ("gpt_oss.GptOssExperts", *MASKED)])
def test_a_number_of_a_live_instance_takes_effect_at_once(name):
    one = built(name)
    x, ids, weights = given(one)
    for limit in (0.5, 3.0):
        one.module.limit = limit
        before = fused(one, x, ids, weights)
        torch.testing.assert_close(before["output"], unpatched(one, x, ids, weights)["output"], rtol=1e-5, atol=1e-5)
    if hasattr(one.module, "alpha"):
        one.module.alpha = 0.3
        found = fused(one, x, ids, weights)["output"]
        torch.testing.assert_close(found, unpatched(one, x, ids, weights)["output"], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found, before["output"])


@pytest.mark.parametrize("name", [name for name in PRESENT if name != "gpt_oss.GptOssExperts"])
def test_the_activation_of_a_live_instance_is_the_one_that_is_called(name):
    one = built(name)
    setattr(one.holder, "activation_fn" if name in SEPARATE else "act_fn", nn.Tanh())
    x, ids, weights = given(one)
    with Fused() as calls:
        found = run(one, type(one.module).__call__, x, ids, weights)
    assert calls.calls["npu_grouped_matmul"] and not calls.calls["npu_swiglu"]
    expected = unpatched(one, x, ids, weights)
    for what, right in expected.items():
        torch.testing.assert_close(found[what], right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(24, 24, 6), (24, 12, 6), (24, 48, 6), (24, 24, 24)])
@pytest.mark.parametrize("name", PRESENT)
def test_sizes_that_are_equal_by_chance_decide_nothing(name, sizes, monkeypatch):
    hidden, inner, experts = sizes
    monkeypatch.setattr("tests.kernels.stacked_experts.EXPERTS", experts)
    monkeypatch.setattr("tests.kernels.stacked_experts.HIDDEN", hidden)
    monkeypatch.setattr("tests.kernels.stacked_experts.INNER", inner)
    one = built(name, hidden, inner, experts)
    inputs = given(one)
    found, expected = fused(one, *inputs), unpatched(one, *inputs)
    for what, right in expected.items():
        torch.testing.assert_close(found[what], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRESENT)
def test_a_parameter_that_is_made_of_others_is_left_to_the_original(name):
    one = built(name)
    first = next(iter(dict(one.holder.named_parameters())))

    class Adapter(nn.Module):
        def forward(self, weight):
            return weight + 0.1

    inputs = given(one)
    parametrize.register_parametrization(one.holder, first, Adapter())
    assert is_original(one, *inputs)
    parametrize.remove_parametrizations(one.holder, first, leave_parametrized=False)
    fused(one, *inputs)


@pytest.mark.parametrize("name", PRESENT)
def test_calls_that_the_ops_cannot_take_run_the_original(name):
    one = built(name)
    x, ids, weights = given(one)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_original(one, x, ids, weights)
    one.module.double()
    assert is_original(one, x.double(), ids, weights.double())
    one.module.float()
    with pytest.raises(RuntimeError), Fused() as calls:  # as the original does
        one.module(**arguments(one, x.bfloat16(), ids, weights.bfloat16()))
    assert not calls.calls
    for parameter in one.holder.parameters():
        parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)
    if name not in SEPARATE:  # which cannot be viewed any more
        assert is_original(one, x, ids, weights)


@pytest.mark.parametrize("name", [name for name in PRESENT if name in DENSE])
def test_routing_weights_of_another_dtype_are_left_to_the_original(name):
    one = built(name)
    one.module.bfloat16().eval()
    x, ids, weights = given(one)
    if name == DENSE[0]:
        assert is_original(one, x.bfloat16(), ids, weights)


@pytest.mark.parametrize("name", [name for name in PRESENT if name not in (*DENSE, *SEPARATE)])
def test_routing_weights_in_fp32_go_with_any_dtype_where_the_original_takes_them(name):
    one = built(name)
    one.module.bfloat16()
    x, ids, weights = given(one)
    found, expected = (f(one, x.bfloat16(), ids, weights) for f in (fused, unpatched))
    exact = unpatched(built_from(one), x.bfloat16(), ids, weights, torch.float64)
    assert found["output"].dtype is torch.bfloat16 and found["weights"].dtype is torch.float32
    for what in ("output", "x"):
        mine, theirs = (error_in_ulps(y[what], exact[what], torch.bfloat16, by_row=True) for y in (found, expected))
        assert mine <= theirs + 1


@pytest.mark.parametrize("name", PRESENT)
def test_no_tokens_run_the_original(name):
    one = built(name)
    x, ids, weights = given(one)
    try:
        ORIGINAL[name](one.module, **arguments(one, x[..., :0, :], ids[:0], weights[:0]))
    except RuntimeError:  # it takes none
        return
    assert is_original(one, x[..., :0, :], ids[:0], weights[:0])


@pytest.mark.skipif("gpt_oss.GptOssExperts" not in PRESENT, reason="served by the interface")
def test_arguments_left_out_run_the_original():
    one = built("gpt_oss.GptOssExperts")
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'shape'"):
        one.module(hidden_states(one))


@pytest.mark.parametrize("name", [name for name in PRESENT if name in SEPARATE])
def test_a_child_that_holds_the_weights_and_is_watched_or_another_is_called(name):
    one = built(name)
    inputs, seen = given(one), []
    handle = one.holder.register_forward_hook(lambda *_: seen.append(1))
    assert is_original(one, *inputs) and seen
    handle.remove()
    fused(one, *inputs)

    class Other(type(one.holder)):
        pass

    one.holder.__class__ = Other
    assert is_original(one, *inputs)


@pytest.mark.parametrize("name", PRESENT)
def test_they_compile_to_one_graph_with_the_ops_and_their_gradients(name):
    torch._dynamo.reset()
    one, graphs = built(name), []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    x, ids, weights = given(one)
    eager = fused(one, x, ids, weights)
    compiled = torch.compile(one.module, fullgraph=True, backend=backend)
    found = run(one, lambda _, **named: compiled(**named), x, ids, weights)
    assert len(graphs) == 1 and "npu_moe_token_permute" in graphs[0] and "npu_moe_token_unpermute" in graphs[0]
    for what, right in eager.items():
        torch.testing.assert_close(found[what], right, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PRESENT)
def test_no_weight_is_copied_moved_or_added(name):
    one = built(name)
    before = {key: (value.data_ptr(), value._version) for key, value in one.module.state_dict().items()}
    fused(one, *given(one))
    assert {key: (value.data_ptr(), value._version) for key, value in one.module.state_dict().items()} == before


def test_every_forward_is_put_back(patched):
    ours = {name: experts_class(name).forward for name in PRESENT}
    with npu_autopatch.patched(kernels="moe", backend="emulate"):
        assert all(experts_class(name).forward is forward for name, forward in ours.items())
    assert all(experts_class(name).forward is forward for name, forward in ours.items())
    assert all(forward.__wrapped__ is ORIGINAL[name] for name, forward in ours.items())


@pytest.mark.parametrize("name", PRESENT)
def test_the_proof_rejects_what_the_forward_does_not_compute(name):
    with probing.undisturbed():
        probe = Probe(type(built(name).module), ORIGINAL[name])
        right = probe.variant()
        layout, gate = right.layout, right.gate
        wrong = {
            "gate and up exchanged": right.but(gate=replace(gate, gate_first=not gate.gate_first)),
            "weights the other way round": right.but(
                layout=replace(layout, first_transposed=not layout.first_transposed)
            ),
            "no clamp": right.but(gate=Gate(gate.split, act="act_fn")),
            "all ids name experts with weights": right.but(layout=replace(layout, identity=False)),
            "no bias": right.but(layout=replace(layout, first_bias="", down_bias="")),
        }
        stacked._prove(probe, right)
        for what, variant in wrong.items():
            same = what == "gate and up exchanged" and gate.method
            same = same or (what == "no clamp" and not (gate.method or gate.limit))
            same = same or variant == right
            if not same:
                probe.instance.float()
                if what == "no clamp":
                    probe.instance.act_fn = nn.SiLU()
                    probe.instance.limit = 1.0
                with pytest.raises(proof.Unproved):
                    stacked._prove(probe, variant)


ODD = {
    odd_experts.Plain: "",
    odd_experts.Residual: "no known form",
    odd_experts.Reversed: "no known form",
    odd_experts.Scaled: "attribute scale changes",
    odd_experts.Dropping: "calls dropout",
    odd_experts.OnlyInTraining: "in evaluation",
    odd_experts.Writing: "writes to its inputs",
    odd_experts.Twice: "not the stacked weights of two products",
    odd_experts.PassingOn: "calls after",
}


@pytest.fixture(scope="module")
def odd():
    with patched_copy(odd_experts, "moe") as look_up:
        yield look_up


@pytest.mark.parametrize("cls", ODD, ids=lambda cls: cls.__name__)
def test_an_odd_module_is_refused_with_its_reason(cls, odd):
    row, _ = odd(cls)
    assert row.state == (REFUSED if ODD[cls] else PATCHED), row.reason
    assert ODD[cls] in row.reason


def test_what_is_written_as_nobody_has_runs_fused(odd):
    experts, inputs = odd(odd_experts.Plain)[1](odd_experts.Config), odd_experts.inputs()
    with Fused() as calls:
        found = experts(*inputs)
    assert calls.calls["npu_grouped_matmul"] == 2
    torch.testing.assert_close(found, odd_experts.Plain.forward(experts, *inputs))


def test_a_flag_of_the_instance_is_asked_at_each_call(odd):
    row, cls = odd(odd_experts.Flagged)
    assert row.state == PATCHED
    experts, inputs = cls(odd_experts.Config), odd_experts.inputs()
    for flag, count in ((False, 2), (True, 0)):
        experts.doubled = flag
        with Fused() as calls:
            found = experts(*inputs)
        assert calls.calls["npu_grouped_matmul"] == count
        torch.testing.assert_close(found, odd_experts.Flagged.forward(experts, *inputs))


def test_a_parameter_that_few_instances_have_is_looked_for_at_each_call(odd):
    row, cls = odd(odd_experts.MayScale)
    assert row.state == PATCHED
    experts, inputs = cls(odd_experts.Config), odd_experts.inputs()
    for scales, count in ((None, 2), (nn.Parameter(torch.rand(4)), 0)):
        experts.scales = scales
        with Fused() as calls:
            found = experts(*inputs)
        assert calls.calls["npu_grouped_matmul"] == count
        torch.testing.assert_close(found, odd_experts.MayScale.forward(experts, *inputs))
