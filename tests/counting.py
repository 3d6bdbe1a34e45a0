"""A count of the ``npu::`` calls in a block: the one that `verify` uses."""

from npu_autopatch.verification.counting import Fused

__all__ = ["Fused"]
