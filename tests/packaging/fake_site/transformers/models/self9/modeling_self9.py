"""Replaces itself in sys.modules, as lazy packages do."""

import sys
import types

from transformers.models.qwen9 import modeling_qwen9

_other = types.ModuleType(__name__)
_other.__spec__ = __spec__
_other.__file__ = __file__


class Self9RMSNorm(modeling_qwen9.nn.Module):
    __init__ = modeling_qwen9.Qwen9RMSNorm.__init__
    forward = modeling_qwen9.Qwen9RMSNorm.forward


Self9RMSNorm.__module__ = __name__
_other.Self9RMSNorm = Self9RMSNorm
sys.modules[__name__] = _other
