"""torch.compile and torch.export see the fused op, in one graph, whatever came first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

import npu_autopatch

NORMS = {
    "llama": modeling_llama.LlamaRMSNorm,
    "gemma2": modeling_gemma2.Gemma2RMSNorm,
    "qwen3_next": modeling_qwen3_next.Qwen3NextRMSNorm,
    "qwen3_next gated": modeling_qwen3_next.Qwen3NextRMSNormGated,
}


@pytest.fixture(autouse=True)
def no_compiled_code_is_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def calls_of(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.npu.npu_rms_norm.default for node in graph.graph.nodes)


class Graphs:
    """A backend that notes how many times each graph it is given calls the op."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = torch._dynamo.lookup_backend(backend)
        self.fused: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.fused.append(calls_of(graph))
        return self.backend(graph, inputs)


class Two(torch.nn.Module):
    """Two norms one level down, where Dynamo does not guard what forward is."""

    def __init__(self, cls: type[torch.nn.Module]) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([cls(8), cls(8)])
        for norm in self.norms:
            torch.nn.init.normal_(norm.weight)
        self.gates = cls.forward.__code__.co_argcount - 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = norm(x, *[x] * self.gates) + 1
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_compiles_to_one_graph_with_the_op_and_its_gradient(name: str, dtype: torch.dtype) -> None:
    model, graphs = Two(NORMS[name]).to(dtype), Graphs()
    x = torch.randn(3, 8, dtype=dtype)
    with npu_autopatch.patched(backend="emulate"):
        eager = x.clone().requires_grad_()
        expected = model(eager)
        expected.sum().backward()
        compiled = x.clone().requires_grad_()
        found = torch.compile(model, fullgraph=True, backend=graphs)(compiled)
        found.sum().backward()
    assert graphs.fused == [2]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(compiled.grad, eager.grad)


def test_a_whole_model_compiles_to_one_graph(tiny_model: Any, tokens: Any, norms: dict[str, int]) -> None:
    model, graphs = tiny_model("Qwen3"), Graphs()
    expected = model(tokens, use_cache=False).logits
    with npu_autopatch.patched(backend="emulate"):
        found = torch.compile(model, fullgraph=True, backend=graphs)(tokens, use_cache=False).logits
    assert graphs.fused == [norms["Qwen3"]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_inductor_compiles_a_norm() -> None:
    model, graphs, x = Two(NORMS["llama"]), Graphs("inductor"), torch.randn(3, 8)
    expected = model(x)
    with npu_autopatch.patched(backend="emulate"):
        compiled = torch.compile(model, fullgraph=True, backend=graphs)
        torch.testing.assert_close(compiled(x), expected)
    assert graphs.fused == [2]


def test_a_model_compiled_and_run_before_the_patch_is_reached_and_let_go() -> None:
    model, graphs, x = Two(NORMS["llama"]), Graphs(), torch.randn(3, 8)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    expected = compiled(x)
    with npu_autopatch.patched(backend="emulate"):
        torch.testing.assert_close(compiled(x), expected)
    assert torch.equal(compiled(x), expected)
    assert graphs.fused == [0, 2, 0]


def test_a_model_compiled_under_the_patch_is_let_go_with_it() -> None:
    model, graphs, x = Two(NORMS["gemma2"]), Graphs(), torch.randn(3, 8)
    npu_autopatch.enable(backend="emulate")
    try:
        compiled = torch.compile(model, fullgraph=True, backend=graphs)
        fused = compiled(x)
        assert torch.equal(compiled(x), fused)
    finally:
        npu_autopatch.disable()
    torch.testing.assert_close(compiled(x), fused)
    assert graphs.fused == [2, 0]


@pytest.mark.parametrize("name", ["llama", "qwen3_next gated"])
def test_dynamic_shapes_compile_once(name: str) -> None:
    model, graphs, compiles = Two(NORMS[name]), Graphs(), []
    with npu_autopatch.patched(backend="emulate"):
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
        for length in (3, 5, 17):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(compiled(x), model(x))
            compiles.append(len(graphs.fused))
    assert set(graphs.fused) == {2}
    assert len(set(compiles)) == 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next gated"])
def test_export_holds_the_op(name: str, strict: bool) -> None:
    model, x = Two(NORMS[name]).eval(), torch.randn(3, 8)
    expected = model(x)
    with npu_autopatch.patched(backend="emulate"):
        exported = torch.export.export(model, (x,), strict=strict)
    assert calls_of(exported.graph_module) == 2
    assert exported.state_dict.keys() == model.state_dict().keys()
    torch.testing.assert_close(exported.module()(x), expected)


@pytest.mark.parametrize("name", NORMS)
def test_fake_tensors_have_the_shape_and_dtype_of_real_ones(name: str, fused_calls: Any) -> None:
    for dtype, weight in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        model, x = Two(NORMS[name]).to(weight), torch.randn(2, 3, 8).to(dtype)
        expected = model(x)
        with (
            npu_autopatch.patched(backend="emulate"),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            fused_calls() as count,
        ):
            found = model(mode.from_tensor(x))
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert count == {"npu_rms_norm": 2}


@pytest.mark.parametrize("backend", ["emulate", "npu"])
@pytest.mark.parametrize("name", NORMS)
def test_meta_tensors_are_fused_where_emulated_and_else_run_the_original(
    name: str, backend: str, fused_calls: Any
) -> None:
    with npu_autopatch.patched(backend="emulate"):
        pass  # the ops are there, so that sites are patched
    with npu_autopatch.patched(backend=backend), torch.device("meta"), fused_calls() as count:
        assert NORMS[name].forward.__npu_autopatch__
        found = Two(NORMS[name])(torch.empty(2, 3, 8))
    assert (found.shape, found.device.type) == ((2, 3, 8), "meta")
    assert count == ({"npu_rms_norm": 2} if backend == "emulate" else {})


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_op() -> None:
    model, x = Two(NORMS["llama"]), torch.randn(3, 8)
    with npu_autopatch.patched(backend="emulate"):
        traced = torch.jit.trace(model, x)
    assert "npu_rms_norm" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), model(x))
