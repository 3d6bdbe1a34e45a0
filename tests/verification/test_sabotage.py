"""A kernel that is wrong in any way fails the verification, which names its site and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from npu_autopatch import emulator
from npu_autopatch.verification.passes import TRAINING
from npu_autopatch.verification.result import Verification
from npu_autopatch.verification.verifying import verify


def _op(name: str) -> Any:
    return getattr(torch.ops.npu, name).default


def _other_sign(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return _op("npu_rotary_mul")(x, cos, -sin, mode)


def _without_gradient(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return _op("npu_rotary_mul")(x, cos, sin, mode).detach()


def _with_offset(x: Tensor, weight: Tensor, eps: float) -> Any:
    return _op("npu_rms_norm")(x, weight + 1, eps)


def _weight_without_gradient(x: Tensor, weight: Tensor, eps: float) -> Any:
    return _op("npu_rms_norm")(x, weight.detach(), eps)


def _last_bits_lost(x: Tensor, weight: Tensor, eps: float) -> Any:
    result, *rest = _op("npu_rms_norm")(x, weight, eps)
    return (result * (1 + 2.0**-8), *rest)


def _next_expert(x: list[Tensor], weight: list[Tensor], *rest: Any, **named: Any) -> Any:
    if named["group_type"] == 0:
        weight = [weight[0].roll(1, 0)] if len(weight) == 1 else [*weight[1:], weight[0]]
    return _op("npu_grouped_matmul")(x, weight, *rest, **named)


def _gate_for_up(halves: Tensor, dim: int = -1) -> Tensor:
    return _op("npu_swiglu")(torch.cat(halves.chunk(2, -1)[::-1], -1), dim)


def _raising(*_: Any) -> Any:
    raise RuntimeError("aclnnSwiGlu failed")


class Instead(TorchFunctionMode):
    """A wrong computation in place of an op, for models; a proof runs outside of any mode and sees the right one."""

    def __init__(self, op: str, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.op, self.wrong = f"npu.{op}.default", wrong

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.wrong if str(function) == self.op else function)(*args, **(kwargs or {}))


def sabotaged(model_type: str, op: str, wrong: Callable[..., Any]) -> Verification:
    emulator.install()
    with Instead(op, wrong):
        return verify(model_type, backend="emulate")


EXPERTS = {"qwen3_moe.Qwen3MoeExperts", "qwen3_moe.Qwen3MoeSparseMoeBlock"}  # of transformers 5, and of 4
CASES: dict[str, tuple[str, str, Callable[..., Any], set[str]]] = {
    "rope sign": ("qwen3", "npu_rotary_mul", _other_sign, {"qwen3.apply_rotary_pos_emb"}),
    "missing gradient": ("qwen3", "npu_rotary_mul", _without_gradient, {"qwen3.apply_rotary_pos_emb"}),
    "norm offset": ("qwen3", "npu_rms_norm", _with_offset, {"qwen3.Qwen3RMSNorm"}),
    "missing gradient of a weight": ("qwen3", "npu_rms_norm", _weight_without_gradient, {"qwen3.Qwen3RMSNorm"}),
    "fp32 as exact as bf16": ("qwen3", "npu_rms_norm", _last_bits_lost, {"qwen3.Qwen3RMSNorm"}),
    "expert order": ("qwen3_moe", "npu_grouped_matmul", _next_expert, EXPERTS),
    "gate for up": ("qwen3", "npu_swiglu", _gate_for_up, {"qwen3.Qwen3MLP"}),
    "an op that raises": ("qwen3", "npu_swiglu", _raising, {"qwen3.Qwen3MLP"}),
}


@pytest.mark.parametrize("words", CASES)
def test_what_is_sabotaged_is_named(words: str) -> None:
    model_type, op, wrong, sites = CASES[words]
    found = sabotaged(model_type, op, wrong)
    assert not found.passed
    named = {site.name for site in found.sites if site.problems}
    assert named and named <= sites, found.problems
    assert any(mode.problems for mode in found.modes if mode.name == f"fp32 {TRAINING}")


def test_what_lacks_a_gradient_is_named_with_the_parameter() -> None:
    found = sabotaged("qwen3", "npu_rms_norm", _weight_without_gradient)
    assert "qwen3.Qwen3RMSNorm: fp32 training, weight: no gradient" in found.problems
    assert "fp32 training: model.norm.weight: no gradient" in found.problems
