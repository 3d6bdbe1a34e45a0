"""Other people's patches: left alone, named in the report, and still right together with ours."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import wrapt
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers.models.llama import modeling_llama

import npu_autopatch

NORM = modeling_llama.LlamaRMSNorm
SITE = "llama.LlamaRMSNorm"


@pytest.fixture(autouse=True)
def llama_as_it_was() -> Iterator[None]:
    cls, forward = modeling_llama.LlamaRMSNorm, vars(NORM)["forward"]
    gc.collect()  # instances of earlier tests
    yield
    modeling_llama.LlamaRMSNorm = cls
    NORM.forward = forward


def rows(name: str = SITE) -> list[Any]:
    return [row for row in npu_autopatch.report().sites if row.name == name]


def theirs(code: str, name: str = "their_package.monkey") -> Any:
    """A module of another package."""
    module = types.ModuleType(name)
    exec(code, vars(module))
    return module


THEIR_FORWARD = "def forward(self, hidden_states):\n    return hidden_states + 1\n"


def test_a_forward_of_another_package_is_left_alone_and_named() -> None:
    NORM.forward = theirs(THEIR_FORWARD).forward
    with npu_autopatch.patched(backend="emulate"):
        assert torch.equal(NORM(8)(torch.zeros(2, 8)), torch.ones(2, 8))
        (row,) = rows()
        assert row.state == "foreign"
        assert "their_package.monkey" in row.reason


def test_a_forward_that_passes_for_the_original_is_left_alone_and_named() -> None:
    module = theirs(THEIR_FORWARD)
    NORM.forward = functools.wraps(NORM.forward)(module.forward)
    with npu_autopatch.patched(backend="emulate"):
        (row,) = rows()
        assert row.state == "foreign"
        assert "their_package.monkey" in row.reason
        assert torch.equal(NORM(8)(torch.zeros(2, 8)), torch.ones(2, 8))


def test_a_wrapt_wrapper_is_left_alone_and_named() -> None:
    calls = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append(instance)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(modeling_llama, "LlamaRMSNorm.forward", wrapper)
    wrapped = vars(NORM)["forward"]
    with npu_autopatch.patched(backend="emulate"):
        NORM(8)(torch.ones(2, 8))
        assert len(calls) == 1
        (row,) = rows()
        assert (row.state, __name__ in row.reason, "wrapt" in row.reason) == ("foreign", True, True)
    assert vars(NORM)["forward"] is wrapped


def test_a_class_in_place_of_the_models_is_left_alone_and_named() -> None:
    replaced = type(
        "LigerRMSNorm",
        (torch.nn.Module,),
        {"__module__": "their_kernels.norms", "forward": theirs(THEIR_FORWARD).forward},
    )
    modeling_llama.LlamaRMSNorm = replaced
    with npu_autopatch.patched(backend="emulate"):
        assert modeling_llama.LlamaRMSNorm is replaced
        (row,) = rows()
        assert row.state == "foreign"
        assert "their_kernels.norms" in row.reason


def test_a_class_replaced_by_a_partial_does_no_harm() -> None:
    modeling_llama.LlamaRMSNorm = functools.partial(NORM, eps=0.5)  # type: ignore[misc]
    with npu_autopatch.patched(backend="emulate"):
        assert modeling_llama.LlamaRMSNorm(8).variance_epsilon == 0.5


def test_an_instances_own_forward_is_left_alone_and_named(fused_calls: Any) -> None:
    norm = NORM(8)
    norm.forward = types.MethodType(theirs(THEIR_FORWARD).forward, norm)
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        assert torch.equal(norm(torch.zeros(2, 8)), torch.ones(2, 8))
        NORM(8)(torch.ones(2, 8))
        (row,) = rows(f"{SITE} (instance)")
        assert row.state == "foreign"
        assert "1 live instance has a forward of its own, from their_package.monkey" in row.reason
    assert count == {"npu_rms_norm": 1}


class Noting(ModelHook):
    def __init__(self) -> None:
        self.events: list[str] = []

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.events.append("before")
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self.events.append("after")
        return output


def test_an_accelerate_hook_added_after_the_patch_runs_around_the_fused_norm(fused_calls: Any) -> None:
    norm, x = NORM(8), torch.randn(2, 8)
    expected = norm(x)
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        hook = Noting()
        add_hook_to_module(norm, hook)
        torch.testing.assert_close(norm(x), expected)
        assert hook.events == ["before", "after"]
        remove_hook_from_module(norm)  # which leaves the bound forward it had found on the instance
    assert count == {"npu_rms_norm": 1}
    torch.testing.assert_close(norm(x), expected)


def test_an_accelerate_hook_added_before_the_patch_runs_the_original_and_is_told(fused_calls: Any) -> None:
    norm, x, hook = NORM(8), torch.randn(2, 8), Noting()
    expected = norm(x)
    add_hook_to_module(norm, hook)
    with npu_autopatch.patched(backend="emulate"):
        with fused_calls() as count:
            assert torch.equal(norm(x), expected)
        assert hook.events == ["before", "after"]
        assert count == {}
        (row,) = rows(f"{SITE} (instance)")
        assert row.state == "foreign"
        assert "accelerate.hooks" in row.reason
        remove_hook_from_module(norm)
    assert torch.equal(norm(x), expected)


def test_hooks_of_torch_run_around_the_fused_norm(fused_calls: Any) -> None:
    norm, x, events = NORM(8), torch.randn(2, 8, requires_grad=True), []
    norm.register_forward_pre_hook(lambda *_: events.append("before"))
    norm.register_forward_hook(lambda *_: events.append("after"))
    norm.register_full_backward_hook(lambda *_: events.append("backward"))
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        norm(x).sum().backward()
    assert events == ["before", "after", "backward"]
    assert count == {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}


def test_a_subclass_made_elsewhere_follows_its_base(fused_calls: Any) -> None:
    class Mine(NORM):  # type: ignore[misc, valid-type]
        pass

    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        Mine(8)(torch.ones(2, 8))
    assert count == {"npu_rms_norm": 1}


def test_a_subclass_with_a_forward_of_its_own_keeps_it(fused_calls: Any) -> None:
    class Mine(NORM):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2

    norm, x = Mine(8), torch.randn(2, 8)
    expected = norm(x)
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        torch.testing.assert_close(norm(x), expected)
    assert count == {"npu_rms_norm": 1}
    assert "forward" in vars(Mine)


def test_looking_for_instances_wakes_no_lazy_object() -> None:
    class Lazy:
        woken = False

        @property
        def __class__(self) -> type:  # type: ignore[override]
            Lazy.woken = True
            return NORM

    lazy = Lazy()
    with npu_autopatch.patched(backend="emulate"):
        npu_autopatch.report()
    assert not Lazy.woken
    assert lazy is not None
    assert sys.getrefcount(lazy) < 5
