"""What every op asks of the tensors of a call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# What the dispatcher can take to an op: no DTensor, no other subclass. The last two stand for tensors being traced.
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
# Under torch.func's grad, vmap and the like the ops have no rule.
transformed = torch._C._are_functorch_transforms_active


def autocasting(x: Tensor) -> bool:
    """Whether ops on the device of `x` run under autocast; not on the meta device, of which torch cannot be asked."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
