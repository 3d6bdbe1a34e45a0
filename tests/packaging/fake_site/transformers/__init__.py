"""A stand-in for transformers: lazy in the same way, with model families as small as they get."""

import importlib
import sys
import types

__version__ = "5.99.0"

_STRUCTURE = {
    "Qwen9Model": "transformers.models.qwen9.modeling_qwen9",
    "Qwen9RMSNorm": "transformers.models.qwen9.modeling_qwen9",
    "AutoModel": "transformers.models.auto.modeling_auto",
}


class _LazyModule(types.ModuleType):
    def __getattr__(self, name):
        if name not in _STRUCTURE:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_STRUCTURE[name]), name)
        setattr(self, name, value)
        return value


_lazy = _LazyModule(__name__, __doc__)
_lazy.__dict__.update({k: v for k, v in globals().items() if k.startswith("__")})
sys.modules[__name__] = _lazy
