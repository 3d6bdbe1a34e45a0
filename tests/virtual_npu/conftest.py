"""Turns the device on before anything here imports torch; without torch_npu nothing here is collected."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from . import cann_library

HERE = Path(__file__).parent


def _activate() -> None:
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # an op without a kernel raises where it is called
    cann_library.load()
    with contextlib.redirect_stdout(io.StringIO()):  # torch_npu prints that ASCEND_HOME_PATH is not set
        import torch
        import torch_npu  # noqa: F401
    from . import aten_kernels, attention, device

    aten, npu = (torch.library.Library(namespace, "IMPL") for namespace in ("aten", "npu"))
    _libraries.extend((aten, npu))
    aten_kernels.serve_aten(aten)
    aten_kernels.serve_casts(npu)
    attention.serve_attention(npu)
    device.serve_emulator(npu)


_libraries: list[object] = []  # a kernel lives as long as its library
collect_ignore: list[str] = []

if cann_library.installed():
    _activate()
else:
    collect_ignore.extend(p.name for p in HERE.glob("test_*.py") if p.name != "test_installed.py")
