"""Time on the device, original against fused: ``python -m benchmarks.device``, on a machine with an NPU.

The first thing to measure there. Ratios are taken within one run; the tensors are those of a decoder layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Glm4Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.glm4 import modeling_glm4
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import npu_autopatch

ROUNDS, CALLS = 20, 50
SHAPES = ((1, 1, 4096), (1, 4096, 4096), (4, 4096, 4096))
Case = tuple[str, str, Callable[[], Callable[..., object]], tuple[Tensor, ...]]


def microseconds(call: Callable[[], object]) -> float:
    """The best mean of `CALLS` calls, by events on the device."""
    best = float("inf")
    for _ in range(ROUNDS):
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.npu.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / CALLS)
    return best


def random(*shape: int, gradient: bool = True) -> Tensor:
    return torch.randn(shape, device="npu").to(torch.bfloat16).requires_grad_(gradient)


def norms() -> Iterator[Case]:
    for cls in (modeling_qwen3.Qwen3RMSNorm, Gemma2RMSNorm, Qwen3NextRMSNormGated):
        for shape in (*SHAPES, (1, 4096, 32, 128)):
            norm = cls(shape[-1]).to(torch.bfloat16).to("npu")
            inputs = (random(*shape), random(*shape))[: 2 if cls is Qwen3NextRMSNormGated else 1]
            yield cls.__name__, "x".join(map(str, shape)), lambda norm=norm: norm, inputs


def mlps() -> Iterator[Case]:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288}
    for mlp in (modeling_qwen3.Qwen3MLP(Qwen3Config(**sizes)), modeling_glm4.Glm4MLP(Glm4Config(**sizes))):
        mlp = mlp.to(torch.bfloat16).to("npu")
        for shape in SHAPES:
            yield type(mlp).__name__, "x".join(map(str, shape)), lambda mlp=mlp: mlp, (random(*shape),)


def rotary() -> Iterator[Case]:
    for module in (modeling_qwen3, modeling_glm4):
        for rows, tokens in ((1, 1), (1, 4096), (4, 4096)):
            q, k = (random(rows, tokens, heads, 128).transpose(1, 2) for heads in (32, 8))
            tables = (random(rows, tokens, 128, gradient=False).cos(), random(rows, tokens, 128, gradient=False).sin())
            name = f"{module.__name__.rpartition('_')[2]} rotary"
            yield name, f"{rows}x{tokens}x(32+8)x128", lambda m=module: m.apply_rotary_pos_emb, (q, k, *tables)
    q, k = random(4096, 16, 80), random(4096, 16, 80)
    tables = (torch.randn(4096, 80, device="npu").cos(), torch.randn(4096, 80, device="npu").sin())
    yield "qwen2_vl vision", "4096x16x80", lambda: modeling_qwen2_vl.apply_rotary_pos_emb_vision, (q, k, *tables)


def experts() -> Iterator[Case]:
    """Of Qwen3-30B-A3B, in transformers 5 by what a model runs, and what it runs in generation, without a patch."""
    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    for implementation in ("grouped_mm", "batched_mm"):
        config._experts_implementation = implementation
        layer = modeling_qwen3_moe.Qwen3MoeExperts(config)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        layer = layer.to(torch.bfloat16).to("npu")
        for tokens in (1, 4096) if implementation == "grouped_mm" else (1,):
            scores, ids = torch.rand(tokens, 128, device="npu").topk(8)
            inputs = (random(tokens, 2048), ids, scores.to(torch.bfloat16).requires_grad_())
            yield f"qwen3_moe experts, {implementation}", f"{tokens}x2048", lambda layer=layer: layer, inputs


def rows() -> Iterator[tuple[str, ...]]:
    for cases in (norms, mlps, rotary, experts):
        for name, shape, current, inputs in cases():

            def forward(current: Callable[..., object] = current, inputs: tuple[Tensor, ...] = inputs) -> None:
                with torch.no_grad():
                    current()(*inputs)

            def both(current: Callable[..., object] = current, inputs: tuple[Tensor, ...] = inputs) -> None:
                outcome = current()(*inputs)
                outputs = outcome if isinstance(outcome, tuple) else (outcome,)
                torch.autograd.backward([output.sum() for output in outputs])

            for what, call in (("forward", forward), ("forward and backward", both)):
                original = microseconds(call)
                with npu_autopatch.patched():
                    fused = microseconds(call)
                yield name, shape, what, f"{original:.1f}", f"{fused:.1f}", f"{original / fused:.2f}"


def main() -> int:
    if not getattr(torch, "npu", None) or not torch.npu.is_available():
        print("there is no NPU here: run npu-autopatch doctor to see what is missing", file=sys.stderr)
        return 1
    table = Table("what", "shape, bf16", "pass", "original µs", "fused µs", "times faster", box=None)
    for row in rows():
        table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
