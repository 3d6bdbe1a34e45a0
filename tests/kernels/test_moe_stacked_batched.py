"""Experts that each have their own tokens already, whose products stay bmm; and experts that are left alone."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

import npu_autopatch
from npu_autopatch.reporting import PATCHED, REFUSED
from tests.counting import Fused
from tests.kernels.exact import behind, error_in_ulps

ORIGINAL = Llama4TextExperts.forward
HIDDEN, INNER, EXPERTS, TOKENS = 24, 40, 6, 5
FUSED = {"npu_swiglu": 1, "npu_swiglu_backward": 1}


@pytest.fixture(autouse=True, scope="module")
def patched():
    with npu_autopatch.patched(kernels="moe", backend="emulate") as report:
        yield report


def built(**settings):
    sizes = {"num_local_experts": EXPERTS, "intermediate_size": INNER, "hidden_size": HIDDEN, "hidden_act": "silu"}
    module = Llama4TextExperts(SimpleNamespace(**sizes, **settings))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(noise * 0.3)
    return module


def some(seed=0, dtype=torch.float32, scale=1.0):
    x = torch.randn(EXPERTS * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return (x * scale).to(dtype)


def run(module, forward, x, dtype=None):
    x = x.to(dtype or x.dtype, copy=True).requires_grad_()
    output = forward(module, x)
    return (output.detach(), *torch.autograd.grad(output.sum(), (x, *module.parameters())))


def fused(module, x):
    with Fused() as calls:
        found = run(module, type(module).__call__, x)
    assert calls.calls == FUSED
    return found


def is_original(module, x):
    with Fused() as calls:
        found = module(x)
    return torch.equal(found, ORIGINAL(module, x)) and not calls.calls


def test_the_gate_between_the_products_is_one_op(patched):
    row = next(row for row in patched.sites if row.name == "llama4.Llama4TextExperts" and row.kernel == "moe")
    assert (row.state, row.variant) == (PATCHED, "batched, halves")


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_values_and_gradients_are_no_less_exact(training, dtype, scale):
    def compare(seed):
        module, x = built().to(dtype).train(training), some(seed, dtype, scale)
        mine, theirs = fused(module, x), run(module, ORIGINAL, x)
        parts = [("calls", "", "", 0, 0)]
        for what, one, other, right in zip(
            ("output", "x", "first", "down"),
            mine,
            theirs,
            run(module.double(), ORIGINAL, x, torch.float64),
            strict=True,
        ):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            parts.append((what, "", "", *(error_in_ulps(y, right, dtype, by_row=True) for y in (one, other))))
        return parts

    assert behind(compare(0), compare) == []


def test_calls_that_the_op_cannot_take_run_the_original():
    module, x = built(), some()
    with torch.autocast("cpu", torch.bfloat16):
        assert is_original(module, x)
    assert is_original(module, x[:0])
    assert is_original(module.double(), x.double())
    module.float().act_fn = nn.Tanh()
    assert is_original(module, x)
    module.act_fn = nn.SiLU()
    fused(module, x)

    class Adapter(nn.Module):
        def forward(self, weight):
            return weight + 0.1

    parametrize.register_parametrization(module, "down_proj", Adapter())
    assert is_original(module, x)


def test_it_compiles_to_one_graph():
    torch._dynamo.reset()
    module, graphs = built(), []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    found = run(module, lambda _, x: compiled(x), some())
    assert len(graphs) == 1 and "npu_swiglu" in graphs[0]
    for one, other in zip(found, fused(module, some()), strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


REFUSALS = {
    "inkling.InklingSharedExperts": "every token goes through every expert",
    "nllb_moe.NllbMoeExperts": "its experts are modules of their own",
    "switch_transformers.SwitchTransformersExperts": "its experts are modules of their own",
}


def modeling(name):
    """The module of a class; None where the installed transformers has no such class."""
    family, attribute = name.split(".")
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        return None
    return module if hasattr(module, attribute) else None


@pytest.mark.parametrize("name", [name for name in REFUSALS if modeling(name) is not None])
def test_what_is_not_served_says_why(name, patched):
    row = next(row for row in patched.sites if row.name == name and row.kernel == "moe")
    assert row.state == REFUSED and REFUSALS[name] in row.reason
