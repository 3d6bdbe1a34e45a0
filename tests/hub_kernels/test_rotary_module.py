"""With the package kernels installed, a rotary function is an nn.Module instance: patched in its class, kept as it is.

Runs with a version of transformers that accepts the version of kernels installed (`make test-hub-kernels`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

kernels = pytest.importorskip("kernels")

from transformers.models.glm4 import modeling_glm4  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

import npu_autopatch  # noqa: E402

FUNCTION = modeling_qwen3.apply_rotary_pos_emb
CLASS = type(FUNCTION)
FORWARD = CLASS.forward


@pytest.fixture(autouse=True)
def function_as_it_was() -> Iterator[None]:
    assert isinstance(FUNCTION, nn.Module), "this transformers does not use the kernels that is installed"
    yield
    FUNCTION.__dict__.pop("forward", None)
    assert CLASS.forward is FORWARD


def block() -> Any:
    return npu_autopatch.patched(backend="emulate", kernels="rope")


def rows(name: str = "qwen3.apply_rotary_pos_emb") -> list[Any]:
    return [row for row in npu_autopatch.report().sites if row.name.startswith(name)]


def test_the_instance_stays_and_its_class_is_patched_and_restored(fused_calls: Any) -> None:
    args = [torch.randn(2, 3, 5, 8), torch.randn(2, 4, 5, 8), torch.rand(2, 5, 8), torch.rand(2, 5, 8)]
    expected = FUNCTION(*args)
    state = dict(vars(FUNCTION))
    with block():
        assert modeling_qwen3.apply_rotary_pos_emb is FUNCTION
        assert type(FUNCTION) is CLASS
        assert [(row.state, row.variant) for row in rows()] == [("patched", "half")]
        assert inspect.signature(CLASS.forward) == inspect.signature(FORWARD)
        assert "self" in inspect.signature(CLASS.forward).parameters
        for call in (lambda: FUNCTION(*args), lambda: FUNCTION(args[0], k=args[1], sin=args[3], cos=args[2])):
            with fused_calls() as count:
                found = call()
            assert count == {"npu_rotary_mul": 2}
            for got, right in zip(found, expected, strict=True):
                torch.testing.assert_close(got, right)
        heads_last = [x.transpose(1, 2) for x in args[:2]]
        with fused_calls() as count:
            FUNCTION(*heads_last, *args[2:], unsqueeze_dim=2)
        assert count == {"npu_rotary_mul": 2}
    assert vars(FUNCTION) == state
    assert "forward" in vars(CLASS)


def test_other_functions_have_classes_of_their_own(fused_calls: Any) -> None:
    with npu_autopatch.patched(backend="emulate", kernels="rope", skip="qwen3.*"):
        assert CLASS.forward is FORWARD
        assert rows()[0].state == "skipped"
        (glm,) = rows("glm4.apply_rotary_pos_emb")
        assert (glm.state, glm.variant) == ("patched", "interleaved_halfcos_partial")
        assert type(modeling_glm4.apply_rotary_pos_emb) is not CLASS


def model(tiny_model: Any) -> Any:
    return tiny_model("Qwen3")


def test_a_model_runs_and_trains_on_it(tiny_model: Any, tokens: Any, fused_calls: Any) -> None:
    def run() -> Any:
        built = model(tiny_model)
        outcome = built(tokens, labels=tokens, use_cache=False)
        outcome.loss.backward()
        return outcome.logits, [parameter.grad for parameter in built.parameters()]

    logits, gradients = run()
    with block(), fused_calls() as count:
        found, changed = run()
    assert count == {"npu_rotary_mul": 4, "npu_rotary_mul_backward": 4}
    torch.testing.assert_close(found, logits)
    for got, right in zip(changed, gradients, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-5)


def test_what_attention_has_captured_for_kernelize_is_the_patched_instance(tiny_model: Any) -> None:
    with block():
        attention = model(tiny_model).model.layers[0].self_attn
        (captured,) = attention._hidden_kernels.values()
        assert captured is FUNCTION
        assert captured.forward.__func__ is CLASS.forward is not FORWARD


class Repository:
    """A kernel for the CPU, as the hub would give it."""

    calls = 0

    @classmethod
    def load(cls) -> type[nn.Module]:
        def apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=1):
            cls.calls += 1
            return FORWARD(FUNCTION, q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

        return kernels.layer.func._create_func_module(apply_rotary_transformers)


@pytest.mark.parametrize("order", ["kernelize first", "patch first"])
def test_kernelize_wins_for_its_instance(order: str, tiny_model: Any, tokens: Any, fused_calls: Any) -> None:
    """A user who asks for a hub kernel gets it; the report says that the instance has a forward of its own."""
    expected = model(tiny_model)(tokens).logits
    built = model(tiny_model)
    Repository.calls = 0

    def kernelize() -> None:
        with kernels.use_kernel_mapping({"rotary_pos_emb": {"cpu": Repository}}, inherit_mapping=False):
            built.kernelize()

    if order == "kernelize first":
        kernelize()
    with block():
        if order == "patch first":
            kernelize()
        with fused_calls() as count:
            found = built(tokens).logits
        assert count == {}
        assert Repository.calls == 2
        assert any(row.state == "foreign" and "(instance)" in row.name for row in rows())
    torch.testing.assert_close(found, expected)
    assert built(tokens).logits.shape == expected.shape


def test_one_graph_with_the_op() -> None:
    seen = []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(sum(node.target is torch.ops.npu.npu_rotary_mul.default for node in graph.graph.nodes))
        return graph

    args = [torch.randn(2, 3, 5, 8), torch.randn(2, 4, 5, 8), torch.rand(2, 5, 8), torch.rand(2, 5, 8)]
    with block():
        compiled = torch.compile(lambda *a: modeling_qwen3.apply_rotary_pos_emb(*a), fullgraph=True, backend=backend)
        compiled(*args)
    assert seen == [2]
    torch._dynamo.reset()
