"""CPU kernels for ``npu::`` ops, as strict as their contracts: the backend ``emulate``.

Knows torch only. One module an op family, each with a tuple ``OPS`` of `EmulatedOp`. `install` defines the
schemas that torch_npu has not defined, and registers kernels for the CPU key, Meta kernels where the op has
none, and the autograd formula torch_npu has; an op that torch_npu does not differentiate detaches its result.
"""

from __future__ import annotations

import threading

from npu_autopatch.emulator import grouped_matmul, rms_norm, rotary, swiglu, token_permute
from npu_autopatch.emulator.registration import EmulatedOp, register

OPS: tuple[EmulatedOp, ...] = (
    *rms_norm.OPS,
    *rotary.OPS,
    *swiglu.OPS,
    *token_permute.OPS,
    *grouped_matmul.OPS,
)

_installed: list[EmulatedOp] = []
_installing = threading.Lock()


def install() -> None:
    """Make every emulated op callable on CPU tensors. Safe to call again."""
    with _installing:
        if not _installed:
            for op in OPS:
                register(op)
            _installed.extend(OPS)
