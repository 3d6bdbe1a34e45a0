"""Patched MLPs and attention layers under torch.compile: one graph, the fused op in it; and shapes without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import npu_autopatch
from tests.counting import Fused

from .families import inputs, tiny

NAMES = ["llama", "qwen3", "glm4", "phi3", "deepseek_v3"]


def compiled(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """What `function` returns compiled as one graph, and the npu:: ops of that graph."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    out = torch.compile(function, backend=keep, fullgraph=True)(*args, **kwargs)
    (graph,) = graphs
    return out, npu_ops(graph)


def npu_ops(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("npu.")]


def layer(name: str) -> tuple[nn.Module, torch.Tensor, Any]:
    """The first layer, an input of it, and the cos and sin of its attention."""
    model = tiny(name).model
    x = torch.randn(2, 11, model.config.hidden_size, generator=torch.Generator().manual_seed(6))
    return model.layers[0], x, model.rotary_emb(x, torch.arange(11).repeat(2, 1))


@pytest.mark.parametrize("name", NAMES)
def test_an_mlp_is_one_graph_with_the_fused_op(name: str) -> None:
    mlp, x, _ = layer(name)
    mlp = mlp.mlp
    with npu_autopatch.patched(backend="emulate"):
        want = mlp(x)
        got, ops = compiled(mlp, x)
    assert ops == ["npu_swiglu"]
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_one_graph_with_the_fused_ops(name: str) -> None:
    block, x, tables = layer(name)
    norms = {"qwen3": 2, "deepseek_v3": 2}.get(name, 0)
    with npu_autopatch.patched(backend="emulate"):
        want = block.self_attn(hidden_states=x, position_embeddings=tables, attention_mask=None)[0]
        got, ops = compiled(block.self_attn, hidden_states=x, position_embeddings=tables, attention_mask=None)
    assert sorted(ops) == ["npu_rms_norm"] * norms + ["npu_rotary_mul"] * 2
    assert torch.equal(got[0], want)


@pytest.mark.parametrize("name", NAMES)
def test_attention_keeps_its_gradients_and_their_ops_under_aot_autograd(name: str) -> None:
    block, x, tables = layer(name)
    ops: list[str] = []

    def gradients(function: Any) -> list[torch.Tensor]:
        y = function(hidden_states=x, position_embeddings=tables, attention_mask=None)[0]
        return list(torch.autograd.grad(y.square().sum(), list(block.self_attn.parameters())))

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        ops.extend(npu_ops(graph))
        return make_boxed_func(graph.forward)

    with npu_autopatch.patched(backend="emulate"):
        want = gradients(block.self_attn)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        got = gradients(torch.compile(block.self_attn, backend=backend, fullgraph=True))
    assert ops.count("npu_rotary_mul") == ops.count("npu_rotary_mul_backward") == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_shapes_alone_is_fused_alike(name: str) -> None:
    model, ids = tiny(name, num_hidden_layers=1), inputs(name)["input_ids"]  # of DeepSeek the layer without experts
    with npu_autopatch.patched(backend="emulate"):
        with Fused() as real:
            want = model(ids, use_cache=False).logits
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, Fused() as fused:
            got = model(mode.from_tensor(ids), use_cache=False).logits
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert fused.calls == real.calls
    assert {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"} == fused.calls.keys()


@pytest.mark.parametrize("backend", ["emulate", "npu"])
@pytest.mark.parametrize("name", NAMES)
def test_on_meta_the_emulated_ops_or_the_originals_give_the_shapes(name: str, backend: str) -> None:
    block, x, tables = layer(name)
    block, x, tables = block.to("meta"), x.to("meta"), tuple(table.to("meta") for table in tables)
    with npu_autopatch.patched(backend=backend), Fused() as fused:
        attended = block.self_attn(hidden_states=x, position_embeddings=tables, attention_mask=None)[0]
        assert attended.shape == block.mlp(x).shape == x.shape
    assert fused.calls.keys() >= {"npu_rotary_mul", "npu_swiglu"} if backend == "emulate" else not fused.calls
