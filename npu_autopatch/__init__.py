"""Hugging Face transformers on Ascend NPU fused kernels.

The public face: `enable`, `disable`, `patched` and `report`. Importing it imports nothing else; torch comes in
with the first of these that is used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself costs every start of an interpreter more than all else we import there
if TYPE_CHECKING:
    from typing import Any

    from npu_autopatch.activation import disable, enable, patched, report
    from npu_autopatch.version import __version__

__all__ = ["__version__", "disable", "enable", "patched", "report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'npu_autopatch' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"npu_autopatch.{'version' if name == '__version__' else 'activation'}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
