"""What this machine can do, found out in a child process: ``import torch`` itself may fail there.

Sends one message: `torch`, `torch_npu` and `transformers` say why they cannot be imported, `devices` names the NPUs,
`kernels` and `ops` say what is missing.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from npu_autopatch.cli import child
from npu_autopatch.kernels import REGISTRY, load

_ALONE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def examine(environ: Mapping[str, str], backend: str) -> dict[str, Any]:
    """Run this module in a child; a second time without torch_npu if torch does not start with it."""
    environ = {**environ, "NPU_AUTOPATCH": "0"}
    found = _ask(environ, backend)
    if found["torch"] and environ.get(_ALONE) != "0":
        alone = _ask({**environ, _ALONE: "0"}, backend)
        found = {**alone, "torch": found["torch"]}
    return found


def _ask(environ: Mapping[str, str], backend: str) -> dict[str, Any]:
    nothing = {"torch_npu": "", "transformers": "", "devices": [], "kernels": {}, "ops": []}
    try:
        for found in child.messages(child.module(__name__, backend), environ):
            return {**nothing, **found}
    except child.ChildError as error:
        return {**nothing, "torch": str(error)}
    return {**nothing, "torch": "the interpreter ended without a word"}


def why_no_torch_npu() -> str:
    """Import torch_npu; why that fails, or an empty string."""
    from npu_autopatch.ops.capability import load_torch_npu

    return " ".join(load_torch_npu().split())


def devices() -> list[str]:
    """The names of the NPUs that torch can use."""
    import torch

    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return []
    return [str(npu.get_device_name(index)) for index in range(npu.device_count())]


def _look(backend: str) -> dict[str, Any]:
    if torch := _why_not("torch"):
        return {"torch": torch}
    missing = why_no_torch_npu()
    found: dict[str, Any] = {"torch": "", "torch_npu": missing, "devices": [] if missing else devices()}
    found["transformers"] = _why_not("transformers.modeling_utils")
    if backend == "emulate":
        from npu_autopatch import emulator

        emulator.install()
    return {**found, "kernels": {name: load(name).missing() for name in REGISTRY}, "ops": _ops()}


def _why_not(module: str) -> str:
    """Import a module; the first cause of a failure, or an empty string."""
    try:
        importlib.import_module(module)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return " ".join(f"{type(cause).__name__}: {cause}".split())
    return ""


def _ops() -> list[dict[str, Any]]:
    import npu_autopatch.ops as package

    found = []
    for info in pkgutil.iter_modules(package.__path__):
        capability = getattr(importlib.import_module(f"{package.__name__}.{info.name}"), "capability", None)
        if callable(capability):
            op = capability()
            found.append({"op": op.op, "missing": op.missing, "differentiable": op.differentiable})
    return found


if __name__ == "__main__":
    send = child.sender()
    send(_look(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # tearing a device down may take seconds, or fail
