import os

from transformers.models.qwen9.modeling_qwen9 import Qwen9RMSNorm


class Broken9RMSNorm(Qwen9RMSNorm):
    pass


if os.environ.pop("BREAK_BROKEN9", None):
    raise ZeroDivisionError("broken9 says no")
