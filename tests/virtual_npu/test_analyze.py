"""What `analyze` counts without values is what the real torch_npu launches, op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import npu_autopatch
from npu_autopatch.analysis.analysing import analyze
from npu_autopatch.analysis.recording import Recorder
from npu_autopatch.analysis.result import MODES, PREFILL, TRAINING
from tests.virtual_npu.accounting import counted

TOKENS = 24
SIZES = {"vocab_size": 96, "pad_token_id": 0, "hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
FAMILIES = {"Llama": {}, "Qwen3": {}, "Qwen3Moe": EXPERTS}
# torch_npu has other names for these
SAME = {"mm": "matmul", "_npu_dtype_cast": "_to_copy", "_npu_dtype_cast_backward": "_to_copy", "scatter_": "scatter"}
SAME |= {"_scaled_dot_product_fused_attention_overrideable": "npu_fusion_attention_v3", "new_zeros": "zeros"}
SAME |= {"_scaled_dot_product_fused_attention_overrideable_backward": "npu_fusion_attention_grad_v3"}
# one op of torch that is two launches, here as torch_npu counts them: of a slice zeros and a copy, of a product two
TWO = {"slice_backward": ("zeros", "copy_"), "matmul_backward": ("matmul", "matmul")}
# It makes the causal mask of its attention in each call; what it is given lies in memory as [batch, tokens, heads,
# width], and is copied. The gradient of the weight of a linear layer comes transposed, and is copied into place.
WITH_ATTENTION = ("ones", "triu", "clone")
WITH_LINEAR = "new_empty_strided"


def config(family: str, layers: int) -> Any:
    cls = getattr(transformers, f"{family}Config")
    return cls(**SIZES, **HEADS, **FAMILIES[family], num_hidden_layers=layers)


def launched(family: str, training: bool = False) -> dict[str, float]:
    """The launches of a prefill, or of a step of training, by op, a layer: half of what three launch more than one."""
    found = []
    for layers in (1, 3):
        torch.manual_seed(0)
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config(family, layers)).to(torch.bfloat16).to("npu")
        ids = torch.randint(1, 96, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to("npu")
        with torch.set_grad_enabled(training), counted() as counts:
            if training:
                model.train()(ids, labels=ids, use_cache=False).loss.backward()
            else:
                model(ids)
        found.append(Counter(counts.launches))
    return _named({name: (found[1][name] - found[0][name]) / 2 for name in found[1]})


def _named(launches: Any) -> dict[str, float]:
    found: Counter[str] = Counter()
    for name, count in launches.items():
        short = name.split("::")[-1].partition(".")[0]
        for one in TWO.get(short, (SAME.get(short, short),)):
            # analyze counts a slice's gradient as the two it is
            found[one] += count / 2 if short == "slice_backward" else count
    found["copy_"] -= found[WITH_LINEAR]
    return {name: count for name, count in found.items() if count and name not in (*WITH_ATTENTION, WITH_LINEAR)}


def counts_of(family: str, mode: int) -> tuple[Counter[str], Counter[str]]:
    """What `analyze` counts of a layer in a mode, before and after."""
    layer = analyze(config(family, 3), tokens=TOKENS).modes[mode].parts[0]
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for chain in layer.chains:
        before.update(chain.ops_before)
        after.update(chain.ops_after)
    return before, after


@pytest.mark.parametrize("mode", [PREFILL, TRAINING])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_layer_launches_what_analyze_counts(family: str, mode: str) -> None:
    before, after = counts_of(family, MODES.index(mode))
    assert launched(family, mode == TRAINING) == _named(before)
    with npu_autopatch.patched():
        patched = launched(family, mode == TRAINING)
    assert patched == _named(after)
    assert patched["npu_rms_norm"] == after["npu::npu_rms_norm"] > 1
    if mode == TRAINING:
        assert patched["npu_rms_norm_backward"] == patched["npu_rms_norm"]
        assert patched["npu_swiglu"] == patched["npu_swiglu_backward"] == 1


@pytest.mark.parametrize("mode", [PREFILL, TRAINING])
def test_experts_that_are_fused_launch_what_analyze_counts(mode: str) -> None:
    """Unpatched, torch_npu runs one product a group, which torch itself counts as one op."""
    _, after = counts_of("Qwen3Moe", MODES.index(mode))
    with npu_autopatch.patched():
        assert launched("Qwen3Moe", mode == TRAINING) == _named(after)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :3],
        lambda x: x[:, 1],
        lambda x: x.diagonal(),
        lambda x: torch.nn.functional.dropout(x, 0.3, True),
        lambda x: torch.nn.functional.layer_norm(x, (6,)),
    ],
    ids=["slice", "select", "diagonal", "dropout", "layer norm"],
)
def test_what_is_one_op_or_two_there_counts_so(function: Callable[[Tensor], Tensor]) -> None:
    recorder = Recorder(torch.nn.Module(), [])
    with recorder:
        function(torch.empty(4, 6, device="meta", requires_grad=True)).sum().backward()
    with counted() as counts:
        function(torch.ones(4, 6, device="npu", requires_grad=True)).sum().backward()
    made = sum(count for name, count in counts.launches.items() if name == "ones")  # the input itself
    assert sum(op.launches for op in recorder.found.ops) == sum(counts.launches.values()) - made
