"""Turns the virtual NPU on in this process."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from . import cann_library

_libraries: list[Any] = []  # a kernel lives as long as its library


def activate() -> None:
    """Load the stand-in for CANN, import torch_npu over it and serve its kernels. Call before ``import torch``."""
    if _libraries:
        return
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # an op without a kernel raises where it is called
    cann_library.load()
    with contextlib.redirect_stdout(io.StringIO()):  # torch_npu prints that ASCEND_HOME_PATH is not set
        import torch
        import torch_npu  # noqa: F401
    from npu_autopatch import emulator

    from . import aten_kernels, attention, device, rerouted

    aten, npu = (torch.library.Library(namespace, "IMPL") for namespace in ("aten", "npu"))
    _libraries.extend((aten, npu))
    aten_kernels.serve_aten(aten)
    aten_kernels.serve_casts(npu)
    attention.serve_attention(npu)
    for op in emulator.OPS:  # under torch_npu's own schemas, Meta kernels and autograd formulas
        device.serve(op.name, op.kernel, npu)
    rerouted.serve_rerouted(emulator.OPS, npu)
