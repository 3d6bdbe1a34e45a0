"""How one emulated op enters torch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_DEFINITIONS = torch.library.Library("npu", "FRAGMENT")


@dataclass(frozen=True)
class EmulatedOp:
    """One ``npu::`` op on the CPU.

    `schema` is the op's signature without the namespace, `kernel` computes it on CPU tensors and raises
    `ContractError` where the device would refuse, `shapes` is its Meta kernel. `backward` and
    `setup_context` are the autograd formula in the form of `torch.library.register_autograd`; None where
    torch_npu has none.
    """

    schema: str
    kernel: Callable[..., Any]
    shapes: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


class ContractError(RuntimeError):
    """An op got what its contract refuses: the op's name, what it got and what it takes."""

    def __init__(self, op: str, got: str, takes: str) -> None:
        super().__init__(f"{op}: got {got}; it takes {takes}")


def register(op: EmulatedOp) -> None:
    """Register `op`, next to torch_npu's own registrations where that is installed."""
    qualified = f"npu::{op.name}"
    if not torch._C._jit_get_schemas_for_operator(qualified):
        _DEFINITIONS.define(op.schema)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "Meta"):
        torch.library.register_fake(qualified, op.shapes, lib=_DEFINITIONS)
    _DEFINITIONS.impl(op.name, op.kernel, "CPU")
    if op.backward is not None:
        torch.library.register_autograd(qualified, op.backward, setup_context=op.setup_context, lib=_DEFINITIONS)
    else:
        _DEFINITIONS.impl(op.name, _without_gradient(qualified), "AutogradCPU")


def _without_gradient(qualified: str) -> Callable[..., Any]:
    """What torch_npu does for an op without a formula: a warning, and the result is cut from the graph."""
    overload = getattr(torch.ops.npu, qualified.partition("::")[2]).default

    def detached(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tree_leaves((args, kwargs))):
            warnings.warn(f"torch_npu has no gradient for {qualified}: none flows through it", stacklevel=2)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return detached
