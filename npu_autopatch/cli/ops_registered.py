"""The ops that torch_npu registers with torch, asked of a child process, where importing either may fail.

Sends one message: `missing` says why torch_npu is not there, `ops` has signatures and whether there is a gradient.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from npu_autopatch.cli import child
from npu_autopatch.cli.machine import why_no_torch_npu


def ask(environ: Mapping[str, str]) -> dict[str, Any]:
    """Run this module in a child."""
    # Without it, torch itself does not start where torch_npu has no CANN; the child imports torch_npu.
    environment = {**environ, "NPU_AUTOPATCH": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONWARNINGS": "ignore"}
    try:
        for found in child.messages(child.module(__name__), environment):
            return found
    except child.ChildError as error:
        return {"missing": f"torch cannot be imported: {error}", "ops": {}}
    return {"missing": "torch cannot be imported: the interpreter ended without a word", "ops": {}}


def _look() -> dict[str, Any]:
    missing = why_no_torch_npu()
    return {"missing": missing, "ops": {} if missing else _registered()}


def _registered() -> dict[str, dict[str, Any]]:
    import torch

    from npu_autopatch.ops.capability import differentiable

    ops: dict[str, dict[str, Any]] = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "npu":
            op = ops.setdefault(name, {"signatures": [], "differentiable": False})
            op["signatures"].append(_readable(str(schema).removeprefix("npu::")))
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            op["differentiable"] |= differentiable(f"{name}{overload}")
    return ops


def _readable(signature: str) -> str:
    """1e-06 for 9.9999999999999995e-07, and 1.0 for a number that ends in its point."""
    return re.sub(r"(?<==)-?\d+\.\d*(?:e[+-]?\d+)?", lambda number: repr(float(number[0])), signature)


if __name__ == "__main__":
    send = child.sender()
    send(_look())
    sys.stdout.flush()
    os._exit(0)  # tearing a device down may take seconds, or fail
