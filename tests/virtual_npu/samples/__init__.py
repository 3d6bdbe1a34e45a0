"""Legal calls of every emulated op, one module an op family with a dict ``SAMPLES``: op name to calls.

An op's tensors are real CPU tensors, so that a sample serves a Meta kernel, the emulator and the device alike.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def samples_of(op: str) -> list[Call]:
    """The calls of `op`; raises LookupError where nobody wrote one."""
    for module in pkgutil.iter_modules(__path__):
        calls = importlib.import_module(f"{__name__}.{module.name}").SAMPLES.get(op)
        if calls:
            return calls
    raise LookupError(f"no sample of {op}: add a module to tests/virtual_npu/samples with SAMPLES[{op!r}]")
