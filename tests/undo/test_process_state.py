"""Nothing of the process differs after a block, or after patching at import, whatever the user has set."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next

import npu_autopatch

MODULES = (modeling_llama, modeling_qwen3, modeling_gemma2, modeling_qwen3_next)


def attributes() -> dict[tuple[str, ...], Any]:
    """Every attribute of every module and of every class in it, by identity."""
    found: dict[tuple[str, ...], Any] = {}
    for module in MODULES:
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = value
            if isinstance(value, type):
                found.update({(module.__name__, name, key): item for key, item in vars(value).items()})
    return found


def torch_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "dispatch modes": _len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "torch function": torch._C._is_torch_function_enabled(),
        "threads": torch.get_num_threads(),
        "anomaly": torch.is_anomaly_enabled(),
    }


def generators() -> list[bytes]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        state = torch.get_rng_state().numpy().tobytes()
    return [state, repr(random.getstate()).encode(), repr(numpy.random.get_state()).encode()]


def test_nothing_differs_after_a_block() -> None:
    with npu_autopatch.patched(backend="emulate"):
        pass  # what is imported with the first block stays imported
    before = attributes(), list(sys.meta_path), dict(sys.modules), sys.path[:], torch_state(), generators()
    with npu_autopatch.patched(backend="emulate"):
        inside = attributes()
        assert torch_state() == before[4]
        assert generators() == before[5]
    after = attributes(), list(sys.meta_path), dict(sys.modules), sys.path[:], torch_state(), generators()
    changed = {key for key in inside if inside[key] is not before[0].get(key)}
    served = {key for key in changed if key[-2:] == ("Qwen3NextExperts", "_npu_grouped_mm")}
    assert bool(served) == hasattr(modeling_qwen3_next, "Qwen3NextExperts")
    listed = {key for key in changed if key[-2:] == ("Qwen3NextSparseMoeBlock", "forward")}
    assert bool(listed) != bool(served)  # transformers 4 has the loop over its experts in the block
    changed -= served | listed
    assert {key[-1] for key in changed} == {"forward", "apply_rotary_pos_emb"}
    assert {key[0] for key in changed if key[-1] != "forward"} == {module.__name__ for module in MODULES}
    assert {key[-2] for key in changed if key[-1] == "forward"} == {
        "LlamaRMSNorm",
        "Qwen3RMSNorm",
        "Gemma2RMSNorm",
        "Qwen3NextRMSNorm",
        "Qwen3NextRMSNormGated",
        "LlamaMLP",
        "Qwen3MLP",
        "Gemma2MLP",
        "Qwen3NextMLP",
    }
    assert after[0].keys() == before[0].keys()
    assert [key for key in after[0] if after[0][key] is not before[0][key]] == []
    assert all(mine is theirs for mine, theirs in zip(after[1], before[1], strict=True))
    assert after[2:] == before[2:]


@contextlib.contextmanager
def _set(setter: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


@contextlib.contextmanager
def _under_deterministic_algorithms() -> Iterator[None]:
    with _set(torch.use_deterministic_algorithms, True, False):
        yield


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "default dtype bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default dtype float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default device meta": lambda: _set(torch.set_default_device, "meta", None),
    "torch.device(meta)": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic algorithms": _under_deterministic_algorithms,
    "a FakeTensorMode": FakeTensorMode,
    "anomaly detection": torch.autograd.detect_anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_patching_at_import_sees_and_leaves_the_users_torch(
    surroundings: str, import_anew: Callable[[str], Any]
) -> None:
    with npu_autopatch.patched(backend="emulate"):
        with SURROUNDINGS[surroundings]():
            before = torch_state(), generators()
            module = import_anew("olmo2")
            assert (torch_state(), generators()) == before
        (row,) = [row for row in npu_autopatch.report().sites if row.name == "olmo2.Olmo2RMSNorm"]
        assert (row.state, row.variant) == ("patched", "fp32_mul")
        assert module.Olmo2RMSNorm.forward.__npu_autopatch__ == "fp32_mul"


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_block_sees_and_leaves_the_users_torch(surroundings: str) -> None:
    with SURROUNDINGS[surroundings]():
        before = torch_state(), generators()
        with npu_autopatch.patched(backend="emulate"):
            assert (torch_state(), generators()) == before
            assert modeling_llama.LlamaRMSNorm.forward.__npu_autopatch__ == "round_then_mul"
            assert modeling_qwen3_next.Qwen3NextRMSNormGated.forward.__npu_autopatch__ == "gated_post_silu"
        assert (torch_state(), generators()) == before


def test_random_numbers_are_those_of_an_unpatched_process(import_anew: Callable[[str], Any]) -> None:
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    expected = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    with npu_autopatch.patched(backend="emulate"):
        assert import_anew("olmo2").Olmo2RMSNorm.forward.__npu_autopatch__
        assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == expected
