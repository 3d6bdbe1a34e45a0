"""Grouped linears: one product in place of a loop over experts."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import npu_autopatch
from npu_autopatch.reporting import PATCHED, REFUSED
from tests.counting import Fused
from tests.kernels import odd_linears
from tests.kernels.exact import behind, error_in_ulps
from tests.kernels.odd import patched_copy

IN, OUT, EXPERTS = 24, 40, 6
COUNTS, ROWS = [3, 0, 5, 1, 0, 2], 11
LISTED, COUNTED = "grouped linear, counts in a list", "grouped linear, counts in a tensor"
CLASSES = {
    "granitemoe.GraniteMoeParallelExperts": LISTED,
    "granitemoehybrid.GraniteMoeHybridParallelExperts": LISTED,
    "granitemoeshared.GraniteMoeSharedParallelExperts": LISTED,
    "jetmoe.JetMoeParallelExperts": LISTED,
    "aria.AriaGroupedExpertsGemm": COUNTED,
}
FUSED = {"npu_grouped_matmul": 3}  # forward, and the gradients of rows and weight


def linear_class(name):
    family, attribute = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), attribute, None)


PRESENT = tuple(name for name in CLASSES if linear_class(name) is not None)
ORIGINAL = {name: linear_class(name).forward for name in PRESENT}


@pytest.fixture(autouse=True, scope="module")
def patched():
    with npu_autopatch.patched(kernels="moe", backend="emulate") as report:
        yield report


@pytest.fixture(scope="module")
def odd():
    with patched_copy(odd_linears, "moe") as look_up:
        yield look_up


def built(name, taken=IN, made=OUT, experts=EXPERTS):
    first = (taken, made, experts) if CLASSES[name] == COUNTED else (experts, taken, made)
    module = linear_class(name)(*first)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(4)) * 0.3)
    return module


def counts(name, values=COUNTS):
    return torch.tensor(values) if CLASSES[name] == COUNTED else list(values)


def rows(seed=0, dtype=torch.float32, taken=IN, tokens=ROWS):
    return torch.randn(tokens, taken, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(module, forward, x, given, dtype=None):
    """Output, and the gradients of rows and weight."""
    x = x.to(dtype or x.dtype, copy=True).requires_grad_()
    output = forward(module, x, given)
    incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(8)).bfloat16().to(output.dtype)
    return (output.detach(), *torch.autograd.grad(output, (x, module.weight), incoming))


def fused(module, x, given):
    with Fused() as calls:
        found = run(module, type(module).__call__, x, given)
    assert calls.calls == FUSED
    return found


def is_original(name, module, x, given):
    with Fused() as calls:
        found = module(x, given)
    return torch.equal(found, ORIGINAL[name](module, x, given)) and not calls.calls


@pytest.mark.parametrize("name", PRESENT)
def test_each_class_is_patched_with_its_form(name, patched):
    row = next(row for row in patched.sites if row.name == name and row.kernel == "moe")
    assert (row.state, row.variant) == (PATCHED, CLASSES[name])
    assert inspect.signature(linear_class(name).forward) == inspect.signature(ORIGINAL[name])


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PRESENT)
def test_values_and_gradients_are_no_less_exact(name, training, dtype, scale):
    def compare(seed):
        module = built(name).to(dtype).train(training)
        x, given = rows(seed, dtype) * scale, counts(name)
        mine, theirs = fused(module, x, given), run(module, ORIGINAL[name], x, given)
        exact = run(module.double(), ORIGINAL[name], x, given, torch.float64)
        parts = [("calls", "", "", 0, 0)]
        for what, one, other, right in zip(("output", "x", "weight"), mine, theirs, exact, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            parts.append((what, "", "", *(error_in_ulps(y, right, dtype, by_row=True) for y in (one, other))))
        return parts

    assert behind(compare(0), compare) == []


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("values", [[0, 0, 11, 0, 0, 0], [0, 0, 0, 0, 0, 11], [11, 0, 0, 0, 0, 0], [1, 2, 2, 2, 2, 2]])
def test_any_counts(name, values):
    module, x = built(name), rows()
    found, expected = (run(module, f, x, counts(name, values)) for f in (type(module).__call__, ORIGINAL[name]))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    unhit = [expert for expert, count in enumerate(values) if not count]
    assert not found[2][unhit].any() and found[2].any()


@pytest.mark.skipif("aria.AriaGroupedExpertsGemm" not in PRESENT, reason="not in this transformers")
def test_rows_past_the_last_group_stay_zero():
    module, x, given = built("aria.AriaGroupedExpertsGemm"), rows(), torch.tensor([2, 0, 3, 0, 0, 1])
    found, expected = fused(module, x, given), run(module, ORIGINAL["aria.AriaGroupedExpertsGemm"], x, given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not found[0][6:].any() and not found[1][6:].any()


@pytest.mark.skipif("aria.AriaGroupedExpertsGemm" not in PRESENT, reason="not in this transformers")
def test_the_host_is_not_asked_for_the_counts(monkeypatch):
    module, asked = built("aria.AriaGroupedExpertsGemm"), []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: asked.append(self))
    module(rows(), counts("aria.AriaGroupedExpertsGemm"))
    assert not asked


@pytest.mark.parametrize("name", PRESENT)
def test_equal_sizes_decide_nothing(name):
    for taken, made, experts in ((16, 16, 6), (6, 16, 6), (6, 6, 6)):
        module, x = built(name, taken, made, experts), rows(taken=taken)
        found = fused(module, x, counts(name))
        for one, other in zip(found, run(module, ORIGINAL[name], x, counts(name)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PRESENT)
def test_a_frozen_weight_costs_no_product_for_its_gradient(name):
    module = built(name).requires_grad_(False)
    with Fused() as calls:
        module(rows().requires_grad_(), counts(name)).sum().backward()
    assert calls.calls == {"npu_grouped_matmul": 2}


@pytest.mark.parametrize("name", PRESENT)
def test_calls_that_the_op_cannot_take_run_the_original(name):
    module, x, given = built(name), rows(), counts(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_original(name, module, x, given)
    assert is_original(name, module, x[:0], counts(name, [0] * EXPERTS))
    with pytest.raises(RuntimeError), Fused() as calls:  # as the original does
        module(x.bfloat16(), given)
    assert not calls.calls
    module.double()
    assert is_original(name, module, x.double(), given)
    module.float()
    module.weight.data = module.weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert is_original(name, module, x, given)


@pytest.mark.parametrize("name", PRESENT)
def test_a_weight_that_is_made_of_others_is_left_to_the_original(name):
    class Adapter(nn.Module):
        def forward(self, weight):
            return weight + 0.1

    module = built(name)
    parametrize.register_parametrization(module, "weight", Adapter())
    assert is_original(name, module, rows(), counts(name))


@pytest.mark.parametrize("name", [name for name in PRESENT if CLASSES[name] == LISTED])
def test_a_list_that_does_not_fit_is_the_original_s_to_refuse(name):
    module = built(name)
    for values in ([3, 0, 5, 1, 0, 1], [3, 0, 5]):
        with pytest.raises((RuntimeError, IndexError)):
            module(rows(), values)
    module.num_experts = 4  # the loop ends after four
    assert is_original(name, module, rows(), counts(name))


@pytest.mark.parametrize("name", PRESENT)
def test_it_compiles_to_one_graph_with_its_gradient(name):
    torch._dynamo.reset()
    module, graphs = built(name), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    expected = fused(module, rows(), counts(name))
    found = run(module, lambda _, x, given: compiled(x, given), rows(), counts(name))
    text = "".join(str(part.graph) for part in graphs[0].modules() if isinstance(part, torch.fx.GraphModule))
    assert len(graphs) == 1 and "npu_grouped_matmul" in text
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name in PRESENT if CLASSES[name] == LISTED])
def test_counts_that_are_no_numbers_yet_when_a_graph_is_made_stay_in_it(name):
    torch._dynamo.reset()
    module, graphs = built(name), []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda x, given: module(x, given.tolist()), fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for values in (COUNTS, [2, 2, 2, 0, 0, 5]):
            torch.testing.assert_close(compiled(rows(), torch.tensor(values)), module(rows(), values))
    assert len(graphs) == 1 and "npu_grouped_matmul" in graphs[0]
    torch._dynamo.reset()


ODD = {
    odd_linears.CountsFirst: "",
    odd_linears.Reversed: "multiplies no rows",
    odd_linears.Scaled: "attribute scale changes",
    odd_linears.Biased: "not one stacked weight",
    odd_linears.Residual: "multiplies no rows",
    odd_linears.Rounded: "in bfloat16",
}


@pytest.mark.parametrize("cls", ODD, ids=lambda cls: cls.__name__)
def test_an_odd_module_is_refused_with_its_reason(cls, odd):
    row, _ = odd(cls)
    assert row.state == (REFUSED if ODD[cls] else PATCHED), row.reason
    assert ODD[cls] in row.reason


def test_arguments_may_come_the_other_way_round_and_by_name(odd):
    module, x = odd(odd_linears.CountsFirst)[1](EXPERTS, IN, OUT), rows()
    with Fused() as calls:
        found = module(rows=x, sizes=COUNTS)
    assert calls.calls == {"npu_grouped_matmul": 1}
    right = torch.cat([F.linear(part, weight) for part, weight in zip(x.split(COUNTS), module.weight, strict=True)])
    torch.testing.assert_close(found, right)
