"""On the backend ``npu``, and where ops are missing: what is not fused is the original, and the report says so."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.llama.modeling_llama import LlamaMLP

import npu_autopatch
from npu_autopatch import emulator
from npu_autopatch.ops import swiglu as ops
from npu_autopatch.ops.capability import Capability
from tests.kernels.mlp_sweep import HIDDEN, instance


@pytest.fixture(autouse=True)
def ops_are_asked_for_anew():
    emulator.install()
    ops.op.cache_clear()
    yield
    ops.op.cache_clear()


def row_of(cls):
    (row,) = [row for row in npu_autopatch.report().sites if row.name.endswith(f".{cls.__name__}")]
    return row


@pytest.mark.parametrize("cls", [LlamaMLP, GlmMLP])
def test_cpu_tensors_run_the_original_in_an_npu_process(cls, fused_calls):
    mlp, x = instance(cls), torch.randn(2, 3, HIDDEN, requires_grad=True)
    expected = mlp(x)
    with npu_autopatch.patched(kernels="swiglu", backend="npu"), fused_calls() as count:
        assert row_of(cls).state == "patched"
        assert torch.equal(mlp(x), expected)
    assert count == {}


def test_without_npu_geglu_only_silu_is_fused(monkeypatch, fused_calls):
    missing = Capability("npu_geglu", "this torch_npu has no op npu_geglu", False)
    monkeypatch.setattr(ops, "geglu_capability", lambda: missing)
    with npu_autopatch.patched(kernels="swiglu", backend="emulate"):
        for activation, expected in (("silu", {"npu_swiglu": 1}), ("gelu", {}), ("gelu_pytorch_tanh", {})):
            with fused_calls() as count:
                instance(LlamaMLP, activation)(torch.randn(2, 3, HIDDEN))
            assert count == expected


def test_where_the_gradient_of_gelu_cannot_be_traced_a_compiler_sees_the_original(monkeypatch, fused_calls):
    monkeypatch.setattr(ops, "geglu_traces", lambda: False)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with npu_autopatch.patched(kernels="swiglu", backend="emulate"):
        mlp = instance(LlamaMLP, "gelu")
        x = torch.randn(2, 3, HIDDEN)
        with fused_calls() as count:
            mlp(x)
        assert count == {"npu_geglu": 1}
        torch.compile(mlp, backend=backend, fullgraph=True)(x)
    assert targets and not [target for target in targets if "npu" in target]


def test_an_op_without_a_gradient_refuses_every_site(monkeypatch):
    monkeypatch.setattr(ops, "detect", lambda op, arguments: Capability(op, "", False))
    with npu_autopatch.patched(kernels="swiglu", backend="emulate"):
        row = row_of(LlamaMLP)
        assert (row.state, row.reason) == ("refused", "npu_swiglu of this torch_npu has no gradient")
        assert not hasattr(LlamaMLP.forward, "__npu_autopatch__")
