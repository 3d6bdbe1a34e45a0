"""A norm's time on the device, original against fused: ``python -m benchmarks.device``, on a machine with an NPU.

The first thing to measure there. Ratios are taken within one run; the tensors are those of a decoder layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import npu_autopatch

ROUNDS, CALLS = 20, 50
SHAPES = ((1, 1, 4096), (1, 4096, 4096), (4, 4096, 4096), (1, 4096, 32, 128))


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


def rows() -> Iterator[tuple[str, ...]]:
    for cls in (Qwen3RMSNorm, Gemma2RMSNorm, Qwen3NextRMSNormGated):
        for shape in SHAPES:
            norm = cls(shape[-1]).to(torch.bfloat16).to("npu")
            x = torch.randn(shape, device="npu").to(torch.bfloat16).requires_grad_()
            inputs = (x, torch.randn_like(x)) if cls is Qwen3NextRMSNormGated else (x,)

            def forward(norm: torch.nn.Module = norm, inputs: tuple[torch.Tensor, ...] = inputs) -> None:
                with torch.no_grad():
                    norm(*inputs)

            def both(norm: torch.nn.Module = norm, inputs: tuple[torch.Tensor, ...] = inputs) -> None:
                norm(*inputs).sum().backward()

            for name, call in (("forward", forward), ("forward and backward", both)):
                original = microseconds(call)
                with npu_autopatch.patched():
                    fused = microseconds(call)
                times = f"{original:.1f}", f"{fused:.1f}", f"{original / fused:.2f}"
                yield cls.__name__, "x".join(map(str, shape)), name, *times


def main() -> int:
    if not getattr(torch, "npu", None) or not torch.npu.is_available():
        print("there is no NPU here: run npu-autopatch doctor to see what is missing", file=sys.stderr)
        return 1
    table = Table("norm", "shape, bf16", "what", "original µs", "fused µs", "times faster", box=None)
    for row in rows():
        table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
