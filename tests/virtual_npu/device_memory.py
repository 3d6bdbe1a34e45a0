"""Device memory is host memory: CPU views of NPU tensors, and NPU tensors made from CPU ones."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of the NPU tensor `tensor`, without autograd."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size() * tensor.element_size()
    memory = (ctypes.c_byte * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def contiguous_on_device(tensor: Tensor) -> Tensor:
    """A new contiguous NPU tensor with the values of the CPU tensor `tensor`: what an NPU kernel returns."""
    return like_on_device(tensor.contiguous())


def like_on_device(tensor: Tensor) -> Tensor:
    """A new NPU tensor with the values and the strides of the CPU tensor `tensor`."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    if tensor.numel():
        host_view(out).copy_(tensor)
    return out
