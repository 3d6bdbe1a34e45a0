"""The backend `emulate` where torch_npu is installed: it takes the place of nothing there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def test_torch_npu_can_be_imported_after_cpu_tensors_were_fused() -> None:
    """Its ops are defined only once, and a second definition ends the process."""
    code = """
        from tests.virtual_npu import cann_library
        cann_library.load()
        import sys
        import torch
        print("torch_npu" in sys.modules)
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        import npu_autopatch
        with npu_autopatch.patched(backend="emulate"):
            norm = LlamaRMSNorm(8)
            y = norm(torch.ones(2, 8))
            y.sum().backward()
        print(type(y.grad_fn).__name__, norm.weight.grad.shape)
        import torch_npu
        print(torch.npu.is_available())
    """
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(PROJECT)}
    lines = [line.removeprefix("        ") for line in code.splitlines()]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, fused, last = [line for line in done.stdout.splitlines() if not line.startswith("Warning")]
    assert (first, last) == ("False", "True")
    assert "npu_rms_norm" in fused and "torch.Size([8])" in fused
