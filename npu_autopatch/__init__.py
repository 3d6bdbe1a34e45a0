"""Hugging Face transformers on Ascend NPU fused kernels.

The public face: `enable`, `disable`, `patched`, `report`, `trace` and `verify`. Importing it imports nothing else;
torch comes in with the first of these that is used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself costs every start of an interpreter more than all else we import there
if TYPE_CHECKING:
    from typing import Any

    from npu_autopatch.activation import disable, enable, patched, report, trace
    from npu_autopatch.verification.verifying import verify
    from npu_autopatch.version import __version__

__all__ = ["__version__", "disable", "enable", "patched", "report", "trace", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'npu_autopatch' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    home = {"__version__": "version", "verify": "verification.verifying"}.get(name, "activation")
    return getattr(import_module(f"npu_autopatch.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
