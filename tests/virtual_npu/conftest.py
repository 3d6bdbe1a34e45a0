"""Turns the device on before anything here imports torch; without torch_npu nothing here is collected."""

from __future__ import annotations

from pathlib import Path

from . import activation, cann_library

collect_ignore: list[str] = []

if cann_library.installed():
    activation.activate()
else:
    collect_ignore.extend(p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_installed.py")
