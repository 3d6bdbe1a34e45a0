"""In a child of `coverage`: imports modeling modules with the package enabled, and sends what happened to each."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from typing import Any

from npu_autopatch import enable, report
from npu_autopatch.cli import child, machine
from npu_autopatch.patcher import PatchError


def _backend() -> tuple[str, str]:
    """Where calls can be fused here, and why there."""
    names = machine.devices()
    return ("npu", ", ".join(names)) if names else ("emulate", "torch.npu sees no device")


def _import(module: str) -> str:
    """Import a module; why that fails, or an empty string. What fails in patching stands in the report."""
    try:
        importlib.import_module(module)
    except PatchError:
        return ""
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def sweep(modules: list[str], kernels: str, backend: str, send: Any) -> None:
    """Send the backend, each module, and the report of the sites in `modules`."""
    chosen = "as asked for"
    if missing := machine.why_no_torch_npu():
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # else transformers stumbles over it too
    if not backend:
        backend, chosen = ("emulate", missing) if missing else _backend()
    send({"backend": backend, "chosen": chosen})
    enable(kernels, backend=backend)
    for module in modules:
        send({"module": module, "reason": _import(module)})
    found = report()
    asked = set(modules)
    found.sites = [row for row in found.sites if row.module in asked]
    send({"report": json.loads(found.to_json())})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    sweep(**json.loads(sys.argv[1]), send=child.sender())
    os._exit(0)  # tearing 250 models down takes seconds
