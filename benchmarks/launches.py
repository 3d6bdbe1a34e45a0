"""Launches and bytes a decoder layer, on the virtual NPU: ``make bench-launches``.

The difference between models of three layers and of one, halved. Sizes are small, in the proportions of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.virtual_npu import activation

activation.activate()

import torch  # noqa: E402
import transformers  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402

import npu_autopatch  # noqa: E402
from tests.virtual_npu.accounting import counted  # noqa: E402

TOKENS = 128
_SIZES = {"vocab_size": 512, "pad_token_id": 0, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
}


def build(architecture: str, changes: dict[str, int], layers: int) -> nn.Module:
    cls = getattr(transformers, architecture)
    config = cls.config_class(**_SIZES, **_HEADS, num_hidden_layers=layers, **changes)
    torch.manual_seed(0)
    model: nn.Module = cls(config).to(torch.bfloat16).to("npu")
    return model


def prefill(model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids)


def decode(model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids[:, :1])


def train(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, labels=ids).loss.backward()


def per_layer(architecture: str, changes: dict[str, int], step: Callable[..., None]) -> tuple[float, float]:
    """Launches, and MB read and written."""
    ids = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to("npu")
    found = []
    for layers in (1, 3):
        model = build(architecture, changes, layers)
        step(model, ids)
        with counted() as counts:
            step(model, ids)
        found.append((counts.launches.total(), counts.moved.total() / 1e6))
    return (found[1][0] - found[0][0]) / 2, (found[1][1] - found[0][1]) / 2


def rows() -> Iterator[tuple[str, ...]]:
    for family, (architecture, changes) in FAMILIES.items():
        for step in (prefill, decode, train):
            before = per_layer(architecture, changes, step)
            with npu_autopatch.patched():
                after = per_layer(architecture, changes, step)
            fewer = f"{1 - after[0] / before[0]:.0%}, {1 - after[1] / before[1]:.0%}"
            yield family, step.__name__, *(f"{launches:g} / {moved:.1f}" for launches, moved in (before, after)), fewer


if __name__ == "__main__":
    table = Table("model, layer", "mode", "unpatched", "patched", "fewer", box=None, title="launches / MB a layer")
    for row in rows():
        table.add_row(*row)
    Console().print(table)
