"""A model computed in fp64 throughout: what both answers are measured against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class InDouble(TorchFunctionMode):
    """Every cast to a narrower float becomes one to fp64, so that a module's own forward computes in fp64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args = tuple(torch.float64 if arg in _FLOATS else arg for arg in args) if function is Tensor.to else args
        kwargs = {key: torch.float64 if value in _FLOATS else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def doubled(module: nn.Module) -> nn.Module:
    """`module` in fp64, its experts by batched products: torch's grouped one on a CPU is not for fp64."""
    for config in (getattr(part, "config", None) for part in module.modules()):
        if config is not None and getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "batched_mm"
    return module.double()


def double(value: Any) -> Any:
    """A tensor of floats in fp64; anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
