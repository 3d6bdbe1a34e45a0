"""Small models with experts for the device: how they are run, and what they launch, told from their modules."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import npu_autopatch
from npu_autopatch.verification.choices import Choices
from npu_autopatch.verification.comparison import Pass
from npu_autopatch.verification.small import small_model
from tests.models.moe_families import inputs
from tests.models.moe_passes import of_model

from .accounting import Counts

NAMES = ("mixtral", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
BALANCED = {"mixtral", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "gpt_oss"}  # by a loss of their own
FORWARD = ("npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute", "npu_swiglu")
_BACKWARD = ("npu_moe_token_permute_grad", "npu_moe_token_unpermute_grad", "npu_swiglu_backward")


def case(name: str, dtype: torch.dtype, seed: int = 3) -> tuple[Any, dict[str, Any]]:
    """A model in training, and tokens with labels and, where the model has one, a wish for its auxiliary loss."""
    model: Any = small_model(name, dtype).train()
    batch = inputs(model, seed=seed)
    batch["labels"] = batch["input_ids"]
    if name in BALANCED:
        batch["output_router_logits"] = True
    return model, batch


def there(batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` on the device."""
    return {name: value.npu() if isinstance(value, Tensor) else value for name, value in batch.items()}


def at(choices: Choices, device: str) -> Choices:
    """The choices of a pass, for one on `device`."""
    moved = Choices()
    moved.kept = [kept.to(device) for kept in choices.kept]
    return moved


def compared(name: str, dtype: torch.dtype, seeds: Iterable[int]) -> list[tuple[Pass, Pass, Pass]]:
    """For each seed of inputs: a forward and backward patched, as the original, and of the original in fp64."""
    cases = [case(name, dtype, seed) for seed in seeds]
    on_device = [(copy.deepcopy(model).npu(), there(batch)) for model, batch in cases]
    with npu_autopatch.patched():
        mine = [of_model(*each)[0] for each in on_device]
    return [
        (got, of_model(*each, got.choices)[0], of_model(*host, at(got.choices, "cpu"), exact=True)[0])
        for got, each, host in zip(mine, on_device, cases, strict=True)
    ]


def in_double(model: Any) -> Any:
    """A copy in fp64, its experts by batched products: torch's grouped one on a CPU is not for fp64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("batched_mm")
    return model


def experts(model: nn.Module) -> list[nn.Module]:
    """Its modules with stacked experts, one for each layer that has them."""
    return [m for m in model.modules() if "gate_up_proj" in m._parameters and m.gate_up_proj.dim() == 3]


def forwards(model: nn.Module, learning: bool = True) -> Counter[str]:
    """What one forward of `model` launches for its experts and, where it is `learning`, for its other gated MLPs."""
    layers = experts(model)
    gated = [m for m in layers if type(m)._apply_gate.__name__ == "_default_apply_gate"]
    gated += [m for m in model.modules() if learning and "gate_proj" in m._modules]
    calls = dict(zip(FORWARD, (len(layers), 2 * len(layers), len(layers), len(gated)), strict=True))
    return +Counter(calls)


def backwards(model: nn.Module) -> Counter[str]:
    """What one backward launches for them: of each product that of its input, of its weight and of its bias."""
    forward = forwards(model)
    calls = Counter({grad: forward[op] for grad, op in zip(_BACKWARD, (FORWARD[0], *FORWARD[2:]), strict=True)})
    biases = sum(getattr(m, "gate_up_proj_bias", None) is not None for m in experts(model))
    calls["npu_grouped_matmul"] = 2 * forward["npu_grouped_matmul"] + 2 * biases
    return +calls


def launched(counts: Counts) -> Counter[str]:
    """Of what was launched, the ops of experts and gates."""
    return Counter({op: count for op, count in counts.launches.items() if op in {*FORWARD, *_BACKWARD}})
