"""A trace: what each call of a patched site did and which condition decided; nothing to pay before and after."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

import npu_autopatch
from tests.counting import Fused


def slots() -> dict[str, Any]:
    llama = modeling_llama
    classes = {cls.__name__: vars(cls)["forward"] for cls in (llama.LlamaRMSNorm, llama.LlamaMLP)}
    return {**classes, "rotary": llama.apply_rotary_pos_emb}


def by_site(trace: Any) -> dict[str, Any]:
    return {calls.site.partition(".")[2]: calls for calls in trace.calls.values() if calls.site.startswith("llama.")}


def test_every_call_is_counted_as_what_it_was(tiny_model: Callable[..., Any], tokens: Any) -> None:
    model = tiny_model("Llama")
    with npu_autopatch.patched(backend="emulate"), npu_autopatch.trace() as trace, Fused() as fused:
        model(tokens)
        with torch.no_grad():
            model(tokens)
    norm, mlp, rotary = (by_site(trace)[name] for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"))
    assert (norm.fused, norm.original) == (fused.calls["npu_rms_norm"], 0) == (10, 0)
    assert (mlp.fused, mlp.original) == (fused.calls["npu_swiglu"], 2) == (2, 2)
    assert (2 * rotary.fused, rotary.original) == (fused.calls["npu_rotary_mul"], 0)
    (reason,) = mlp.reasons
    assert reason.startswith("not torch.is_grad_enabled() (kernels/swiglu/forward.py:")
    assert mlp.examples[reason].startswith("float32 [")


@pytest.mark.parametrize(
    "change,site,reason",
    [
        (lambda model: model.double(), "LlamaRMSNorm", "x.dtype"),
        (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()), "LlamaMLP", "op is None"),
    ],
    ids=["fp64", "relu"],
)
def test_the_condition_that_turned_a_call_away_is_named(
    tiny_model: Callable[..., Any], tokens: Any, change: Any, site: str, reason: str
) -> None:
    model = tiny_model("Llama")
    change(model)
    with npu_autopatch.patched(backend="emulate"), npu_autopatch.trace() as trace:
        model(tokens)
    calls = by_site(trace)[site]
    assert calls.original and all(reason in told for told in calls.reasons)


def test_cpu_tensors_under_the_backend_npu_are_told_by_their_device(
    tiny_model: Callable[..., Any], tokens: Any
) -> None:
    model = tiny_model("Llama")
    with npu_autopatch.patched(backend="emulate"):
        pass  # the ops are there, so that sites are patched
    with npu_autopatch.patched(backend="npu"), npu_autopatch.trace() as trace:
        model(tokens)
    for calls in by_site(trace).values():
        assert not calls.fused and all("device.type" in reason for reason in calls.reasons)


def _labelled(norm: Any) -> None:
    norm(torch.randn(2, 16).as_subclass(Labelled))


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_labelled, "type(x) not in PLAIN (kernels/rms_norm/forward.py:"),
        (lambda norm: vmap(norm)(torch.randn(3, 2, 16)), "transformed() (kernels/rms_norm/forward.py:"),
        (lambda norm: norm(torch.randn(2, 16, device="meta")), "x.device.type not in devices ("),
        (lambda norm: norm(torch.randn(2, 16).double()), "x.dtype in FLOATS (ops/rms_norm.py:"),
        (lambda norm: norm(torch.randn(16)), "1 < x.dim() < 9 (ops/rms_norm.py:"),
        (lambda norm: norm(torch.randn(0, 16)), "x.numel() > 0 (ops/rms_norm.py:"),
    ],
    ids=["subclass", "vmap", "device", "dtype", "rank", "empty"],
)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_of_a_norms_guard_the_condition_that_decided_is_named_alone(call: Any, reason: str, gated: bool) -> None:
    llama, next_ = modeling_llama.LlamaRMSNorm, modeling_qwen3_next.Qwen3NextRMSNormGated
    norm: Any = (next_ if gated else llama)(16)
    given = (lambda x: norm(x, torch.ones_like(x))) if gated else norm
    with npu_autopatch.patched(backend="npu" if "device" in reason else "emulate"), npu_autopatch.trace() as trace:
        if "device" in reason:
            norm.to("meta")
        call(given)
    (calls,) = [calls for calls in trace.calls.values() if calls.original]
    assert [told.startswith(reason) for told in calls.reasons] == [True], calls.reasons


def test_nothing_is_wrapped_before_and_after() -> None:
    originals = slots()
    with npu_autopatch.patched(backend="emulate"):
        patched = slots()
        with npu_autopatch.trace():
            assert all(slots()[name] is not patched[name] for name in patched)
            with npu_autopatch.trace():
                pass
            assert all(slots()[name] is not patched[name] for name in patched)
        assert all(slots()[name] is patched[name] for name in patched)
    assert all(slots()[name] is originals[name] for name in originals)


def test_a_trace_that_is_over_is_nobody_who_holds_a_function() -> None:
    q, cos = torch.randn(2, 2, 4, 8), torch.ones(2, 4, 8)
    kept = []
    for _ in range(2):
        with npu_autopatch.patched(backend="emulate") as report, npu_autopatch.trace() as trace:
            kept.append((trace, modeling_llama.apply_rotary_pos_emb))
            modeling_llama.apply_rotary_pos_emb(q, q, cos, cos)
        assert sum(call.fused for call in trace.calls.values()) == 1
        (row,) = [row for row in report.sites if row.name == "llama.apply_rotary_pos_emb"]
        assert "npu_autopatch." not in row.reason


def test_what_is_patched_and_undone_within_a_trace_is_followed_and_put_back(
    tiny_model: Callable[..., Any], tokens: Any
) -> None:
    originals, model = slots(), tiny_model("Llama")
    with npu_autopatch.trace() as trace:
        with npu_autopatch.patched(backend="emulate"):
            model(tokens)
        model(tokens)
    assert by_site(trace)["LlamaRMSNorm"].fused == 5
    assert all(slots()[name] is originals[name] for name in originals)


def test_a_module_imported_within_a_trace_is_followed(import_anew: Callable[[str], Any]) -> None:
    with npu_autopatch.patched(backend="emulate"), npu_autopatch.trace() as trace:
        module = import_anew("qwen3")
        module.Qwen3RMSNorm(16)(torch.randn(2, 16))
    assert trace.calls["qwen3.Qwen3RMSNorm", "rms_norm"].fused == 1


def test_an_error_leaves_the_interpreter_as_it_was(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("Llama")
    before = sys.gettrace()
    with npu_autopatch.patched(backend="emulate"), npu_autopatch.trace(), pytest.raises(RuntimeError):
        model.model.layers[0].mlp(torch.randn(2, 3))
    assert sys.gettrace() is before


def test_compiled_code_is_fused_and_not_followed(tiny_model: Callable[..., Any]) -> None:
    mlp = tiny_model("Llama").model.layers[0].mlp
    x = torch.randn(2, 3, 42)
    with npu_autopatch.patched(backend="emulate"), npu_autopatch.trace() as trace:
        got = torch.compile(mlp, backend="eager", fullgraph=True)(x)
        assert not by_site(trace)["LlamaMLP"].fused
        torch.testing.assert_close(got, mlp(x))
        assert by_site(trace)["LlamaMLP"].fused == 1


def test_json_and_table_have_every_site_that_ran(tiny_model: Callable[..., Any], tokens: Any) -> None:
    model = tiny_model("Llama")
    with npu_autopatch.patched(backend="emulate"), npu_autopatch.trace() as trace, torch.no_grad():
        model(tokens)
    whole = {entry["site"]: entry for entry in json.loads(trace.to_json())}
    assert whole["llama.LlamaRMSNorm"]["fused"] == 5
    assert sum(whole["llama.LlamaMLP"]["reasons"].values()) == whole["llama.LlamaMLP"]["original"] == 2
    table = str(trace)
    assert "swiglu  llama.LlamaMLP: 0 fused, 2 by the original" in table
    assert "decided by: not torch.is_grad_enabled()" in table
    assert max(map(len, table.splitlines())) <= 80


def test_the_environment_prints_a_table_at_exit(python: Callable[..., Any]) -> None:
    code = """
        import torch
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        LlamaRMSNorm(16)(torch.randn(2, 16))
    """
    settings = {"NPU_AUTOPATCH": "1", "NPU_AUTOPATCH_BACKEND": "emulate"}
    on = python(code, started=True, NPU_AUTOPATCH_TRACE="1", **settings)
    assert on.returncode == 0 and "rms_norm  llama.LlamaRMSNorm: 1 fused, 0 by the original" in on.stderr
    off = python(code, started=True, **settings)
    assert off.returncode == 0 and "by the original" not in off.stderr
