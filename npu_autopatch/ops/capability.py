"""Which ``npu::`` ops exist here, with which arguments, and whether they are differentiable.

Read from torch's registrations, never from a version: `2.9.0.post9` has ops that `2.10.0` lacks.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capability:
    """What is registered for one op. `missing` says in words why it cannot be used; empty if it can."""

    op: str
    missing: str
    differentiable: bool

    @property
    def available(self) -> bool:
        return not self.missing


def detect(op: str, arguments: tuple[str, ...]) -> Capability:
    """The capability of ``npu::op`` called with `arguments`, by the names its schema gives them."""
    why_not = load_torch_npu()
    schemas = torch._C._jit_get_schemas_for_operator(f"npu::{op}")
    if not schemas:
        return Capability(op, why_not or f"this torch_npu has no op {op}", False)
    names = {argument.name for argument in schemas[0].arguments}
    lacking = [name for name in arguments if name not in names]
    if lacking:
        return Capability(op, f"{op} of this torch_npu takes no argument {', '.join(lacking)}", False)
    return Capability(op, "", differentiable(op))


def load_torch_npu() -> str:
    """Import torch_npu if it is installed; why it is not usable, or an empty string."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a broken CANN shows in many types
        return f"torch_npu cannot be imported: {type(error).__name__}: {error}"
    return ""


def differentiable(op: str) -> bool:
    """Whether torch has a gradient of ``npu::op``, which may be one overload: ``npu_fusion_attention.Tensor``."""
    qualified = f"npu::{op}"
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    if not any(registered(qualified, key) for key in ("AutogradPrivateUse1", "Autograd")):
        return False
    # Since the 26.1.0 train some ops carry a kernel there whose only purpose is to raise.
    return "AutogradErrorFallback" not in torch._C._dispatch_dump(qualified)
