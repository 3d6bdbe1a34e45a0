"""The kernels, in the order they are tried. Names and places only: nothing of torch is imported here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_autopatch.kernels.base import Kernel

REGISTRY = {
    "rms_norm": "npu_autopatch.kernels.rms_norm",
    "swiglu": "npu_autopatch.kernels.swiglu",
    "rope": "npu_autopatch.kernels.rope",
    "moe": "npu_autopatch.kernels.moe",
}


def load(name: str) -> Kernel:
    """The kernel of that name."""
    kernel: Kernel = import_module(REGISTRY[name]).KERNEL
    return kernel
