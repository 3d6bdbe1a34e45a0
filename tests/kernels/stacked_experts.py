"""The stacked experts of the installed transformers that no interface serves, small, and arguments for them."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 24, 40, 6, 3, 7
ALL = (
    "qwen3_vl_moe.Qwen3VLMoeTextExperts",
    "gpt_oss.GptOssExperts",
    "dbrx.DbrxExperts",
    "longcat_flash.LongcatFlashExperts",
    "step3p7.Step3p7Experts",
)
DENSE = ("qwen3_vl_moe.Qwen3VLMoeTextExperts", "gpt_oss.GptOssExperts")
SEPARATE = ("dbrx.DbrxExperts",)
OPS = ("qwen3_vl_moe.Qwen3VLMoeTextExperts", "longcat_flash.LongcatFlashExperts")  # their gate is an op's
MASKED = ("gpt_oss.GptOssExperts", "step3p7.Step3p7Experts")
IDENTITY = 2  # experts of longcat_flash without weights


def experts_class(name: str) -> type[nn.Module] | None:
    """The class, where it is in the installed transformers and not served by the interface."""
    family, attribute = name.split(".")
    try:
        cls = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), attribute)
    except (ImportError, AttributeError):
        return None
    return cls if cls.forward.__code__.co_argcount > 1 else None  # the interface's forward takes anything


PRESENT = tuple(name for name in ALL if experts_class(name) is not None)


@dataclass
class Built:
    """An instance, and whether its weights lie in a child."""

    name: str
    module: nn.Module

    @property
    def holder(self) -> nn.Module:
        return self.module.mlp if hasattr(self.module, "mlp") else self.module


def built(name: str, hidden: int = HIDDEN, inner: int = INNER, experts: int = EXPERTS, **settings: Any) -> Built:
    """An instance with parameters of std 0.3, the same each time."""
    config = {
        "hidden_size": hidden,
        "expert_ffn_hidden_size": inner,
        "zero_expert_num": IDENTITY,
        "hidden_act": "silu",
        "ffn_act_fn": {"name": "silu"},
        "swiglu_limit": 2.0,
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), inner),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), experts),
        **settings,
    }
    cls = experts_class(name)
    parameters = list(inspect.signature(cls.__init__).parameters)[1:]
    made = cls(**{key: SimpleNamespace(**config) if key == "config" else config[key] for key in parameters})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return Built(name, made)


def width(one: Built) -> int:
    """How wide its hidden states are: transformers 5.0 exchanges the names of dbrx's sizes."""
    return INNER if one.name in SEPARATE and transformers.__version__.startswith("5.0.") else HIDDEN


def routed(one: Built, seed: int = 0, tokens: int = TOKENS, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
    """Ids of different experts for each token, never of the second, and weights for them."""
    generator = torch.Generator().manual_seed(seed)
    experts = EXPERTS + (IDENTITY if "longcat" in one.name else 0)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 1] = -1.0
    return scores.topk(top_k)[1], torch.rand(tokens, top_k, generator=generator) + 0.1


def arguments(one: Built, x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Any]:
    """The arguments of a forward by name: routing weights as the class takes them."""
    given: dict[str, Any] = {}
    names = list(inspect.signature(type(one.module).forward).parameters)[1:]
    if one.name in DENSE:
        spread = torch.zeros(ids.size(0), EXPERTS + 1, dtype=weights.dtype).scatter(1, ids, weights)
        weights = spread[:, :EXPERTS]
    for name in names:
        if name in ("hidden_states", "x"):
            given[name] = x
        elif name in ("router_indices", "top_k_index", "top_experts"):
            given[name] = ids
        elif name in ("routing_weights", "top_k_weights", "top_weights"):
            given[name] = weights
        else:  # of no use to dbrx
            given[name] = torch.zeros(ids.size(0), EXPERTS, dtype=weights.dtype)
    return given


def hidden_states(one: Built, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """[1, TOKENS, width], or without the first dimension where the class takes rows only."""
    generator = torch.Generator().manual_seed(50 + seed)
    x = torch.randn(1, TOKENS, width(one), generator=generator) * scale
    return (x[0] if "longcat" in one.name or "step3p7" in one.name else x).to(dtype)


def run(
    one: Built, forward: Any, x: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The output of a forward, and the gradient of everything. `dtype`: of the arithmetic, if not that of `x`."""
    incoming = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype)
    leaves = [t.to(dtype or t.dtype, copy=True).requires_grad_() for t in (x, weights)]
    output = forward(one.module, **arguments(one, leaves[0], ids, leaves[1]))
    named = dict(one.module.named_parameters())
    gradients = torch.autograd.grad(output, [*leaves, *named.values()], incoming.to(output.dtype).view_as(output))
    return {"output": output.detach(), **dict(zip(("x", "weights", *named), gradients, strict=True))}
