"""What `analyze` counts without values is what the real torch_npu launches, op by op."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

import npu_autopatch
from npu_autopatch.analysis.analysing import analyze
from tests.virtual_npu.accounting import counted

TOKENS = 24
SIZES = {"vocab_size": 96, "pad_token_id": 0, "hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
FAMILIES = {"Llama": {}, "Qwen3": {}, "Qwen3Moe": EXPERTS}
# torch_npu multiplies by another name, and makes the causal mask of its attention in each call; what it is given lies
# in memory as [batch, tokens, heads, width], and is copied
SAME = {"mm": "matmul", "_npu_dtype_cast": "_to_copy"}
SAME |= {"_scaled_dot_product_fused_attention_overrideable": "npu_fusion_attention_v3"}
WITH_ATTENTION = ("ones", "triu", "clone")


def config(family: str, layers: int) -> Any:
    cls = getattr(transformers, f"{family}Config")
    return cls(**SIZES, **HEADS, **FAMILIES[family], num_hidden_layers=layers)


def launched(family: str) -> dict[str, float]:
    """The launches of a prefill by op, a layer: half of what three layers launch more than one."""
    found = []
    for layers in (1, 3):
        torch.manual_seed(0)
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config(family, layers)).to(torch.bfloat16).to("npu")
        ids = torch.randint(1, 96, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to("npu")
        with torch.no_grad(), counted() as counts:
            model(ids)
        found.append(Counter(counts.launches))
    return _named({name: (found[1][name] - found[0][name]) / 2 for name in found[1]})


def _named(launches: Any) -> dict[str, float]:
    found: Counter[str] = Counter()
    for name, count in launches.items():
        short = name.split("::")[-1].partition(".")[0]
        found[SAME.get(short, short)] += count
    return {name: count for name, count in found.items() if count and name not in WITH_ATTENTION}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_layer_launches_what_analyze_counts(family: str) -> None:
    (layer, _) = analyze(config(family, 3), tokens=TOKENS).modes[0].parts
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for chain in layer.chains:
        before.update(chain.ops_before)
        after.update(chain.ops_after)
    assert launched(family) == _named(before)
    with npu_autopatch.patched():
        patched = launched(family)
    assert patched == _named(after)
    assert patched["npu_rms_norm"] == after["npu::npu_rms_norm"] > 1


def test_experts_that_are_fused_launch_what_analyze_counts() -> None:
    """Unpatched, torch_npu runs one product a group, which torch itself counts as one op."""
    (layer, _) = analyze(config("Qwen3Moe", 3), tokens=TOKENS).modes[0].parts
    after: Counter[str] = Counter()
    for chain in layer.chains:
        after.update(chain.ops_after)
    with npu_autopatch.patched():
        assert launched("Qwen3Moe") == _named(after)
