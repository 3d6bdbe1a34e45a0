"""The loader proxy: executes a module with its own loader, then hands it over for patching."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from npu_autopatch.finder import REMOTE_CODE_LOADER, complain, remove


class AnnouncingLoader(wrapt.ObjectProxy):  # type: ignore[misc, type-arg]
    """Any loader, which announces a module after it was executed. `isinstance` still sees the real one."""

    def exec_module(self, module: ModuleType) -> None:
        real = self.__wrapped__
        # Given back before execution: pkgutil, importlib.resources and inspect look at these.
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = real
        if module.__spec__ is not None and module.__spec__.loader is self:  # type: ignore[comparison-overlap]
            module.__spec__.loader = real
        real.exec_module(module)
        loaded(sys.modules.get(module.__name__, module))


# An error while the module executes is the user's: with the file name of importlib's own frames, the interpreter
# leaves this frame out of the traceback as it does theirs.
AnnouncingLoader.exec_module.__code__ = AnnouncingLoader.exec_module.__code__.replace(
    co_filename="<frozen importlib._bootstrap_external>"
)


def announce(spec: ModuleSpec) -> None:
    """Put the proxy around the loader of `spec`; inside of a lazy loader, whose module is executed later."""
    lazy = getattr(sys.modules.get("importlib.util"), "LazyLoader", None)
    if lazy is not None and isinstance(spec.loader, lazy):
        spec.loader.loader = AnnouncingLoader(spec.loader.loader)  # type: ignore[attr-defined]
    else:
        spec.loader = AnnouncingLoader(spec.loader)  # type: ignore[assignment]


def loaded(module: Any) -> None:
    """A watched module was executed. The first one that may hold sites brings in torch, through `activation`."""
    try:
        if getattr(module, "__name__", "") == REMOTE_CODE_LOADER and "npu_autopatch.activation" not in sys.modules:
            from npu_autopatch.remote_code import wrap

            wrap(module)
            return
        from npu_autopatch.activation import module_loaded
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit among them
        remove()
        complain(f"off: it cannot be loaded: {type(error).__name__}: {error}")
        return
    module_loaded(module)
