"""One layer of experts in each form: stacked, stacked and transposed, and a list as transformers 4 has it in blocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import npu_autopatch
from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Match
from npu_autopatch.kernels.moe import loops

FORMS = ("stacked", "transposed", "listed")
# fewer rows than the smallest weight has, so that nothing but weights and their gradients is of a weight's size
TOKENS, TOP_K = 4, 2
HIDDEN, INNER, EXPERTS = 48, 40, 6
_CONFIG = {
    "hidden_size": HIDDEN,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER),
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    "num_experts_per_tok": TOP_K,
    "hidden_act": "silu",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


class Expert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class Block(nn.Module):
    """Routes, and loops over a list of experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.gate(hidden_states)
        scores, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        scores = (scores / scores.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
        together = torch.zeros_like(hidden_states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for index in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[index].squeeze(0))
            rows = self.experts[index](hidden_states[None, token].reshape(-1, hidden_states.size(-1)))
            together.index_add_(0, token, (rows * scores[token, slot, None]).to(hidden_states.dtype))
        return together


@dataclass(frozen=True)
class Product:
    """A grouped product: the weights of all experts, in one parameter or a list, and the bias of all."""

    weights: list[nn.Parameter]
    bias: nn.Parameter | None = None

    @property
    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def moved(self, rows: int, groups: int) -> int:
        """What it reads and writes without a bias: the rows, what they become, the weights of `groups`, the counts."""
        like = self.weights[0]
        each = rows * (like.size(-1) + like.size(-2)) * like.element_size()
        return each + self.bytes // EXPERTS * groups + 8 * EXPERTS


@dataclass(frozen=True)
class Layer:
    """Experts on the device, their products, how many of them tokens visit, and their call on the hidden states."""

    module: nn.Module
    products: list[Product]
    visited: int
    run: Callable[[nn.Module, Tensor], Tensor]
    hidden: Tensor

    @property
    def weights(self) -> list[nn.Parameter]:
        return [weight for product in self.products for weight in product.weights]


def layer(form: str, dtype: torch.dtype = torch.float32, implementation: str = "grouped_mm") -> Layer:
    """A layer of `form`, the same at every call."""
    config = SimpleNamespace(**_CONFIG, _experts_implementation=implementation)
    cls = dict(zip(FORMS, (Qwen3MoeExperts, GptOssExperts, Block), strict=True))[form]
    module, generator = cls(config), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    module = module.to(dtype).npu()
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).npu()
    if form == "listed":
        columns = [[getattr(expert, name).weight for expert in module.experts] for name in ("w1", "w3", "w2")]
        chosen = module.gate(hidden).topk(TOP_K).indices
        return Layer(module, [Product(column) for column in columns], len(chosen.unique()), _alone, hidden)
    names = ("gate_up_proj", "down_proj")
    products = [Product([getattr(module, name)], getattr(module, f"{name}_bias", None)) for name in names]
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices.npu()
    visited = len(ids.unique())
    scores = torch.rand(TOKENS, TOP_K, generator=generator).to(dtype).npu()
    return Layer(module, products, visited, lambda module, hidden: module(hidden, ids, scores), hidden)


def _alone(module: nn.Module, hidden: Tensor) -> Tensor:
    return module(hidden)


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Every form on the fused ops; `Block`, which is in no modeling module, through its form of the kernel."""
    (site,) = loops.find(sys.modules[__name__])
    with probing.undisturbed():
        match = loops.prove(site, ("npu",))
    assert isinstance(match, Match), match
    original = Block.forward
    with npu_autopatch.patched(kernels="moe"):
        Block.forward = match.replacement
        try:
            yield
        finally:
            Block.forward = original
