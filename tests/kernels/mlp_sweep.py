"""All gated MLPs of the installed transformers, patched, and each compared with its original in fp64."""

from __future__ import annotations

import inspect
from copy import deepcopy

import torch

from tests.kernels.exact import CallsOf, InDouble, behind, error_in_ulps
from tests.kernels.modeling import swept_classes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN, INTERMEDIATE = 20, 28


def sweep(backend: str):
    """The rows of every modeling module, and class, original and fused forward of each patched site."""
    return swept_classes("swiglu", backend)


class Config:
    """A configuration that has whatever is asked for: a size, an activation, no bias, no dropout."""

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return setting(name, self.activation)


def setting(name: str, activation: str):
    if "config" in name:
        return Config(activation)
    if "act" in name:
        return activation
    if name.endswith("modes"):
        return [""] * (HIDDEN + 1)
    if "bias" in name or "gated" in name:
        return False
    if any(word in name for word in ("drop", "rate", "prob")):
        return 0.0
    return INTERMEDIATE if any(word in name for word in ("inter", "ffn", "ff", "inner", "mlp")) else HIDDEN


def instance(cls, activation: str = "silu"):
    """An instance with random weights of std 0.3, in training."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    insisted = [p.name for p in parameters if p.default is p.empty or (p.default is None and "size" in p.name)]
    with torch.random.fork_rng(devices=[]):
        mlp = cls(**{name: setting(name, activation) for name in insisted})
    generator = torch.Generator().manual_seed(5)
    for tensor in mlp.parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
    return mlp


def width_of(mlp) -> int:
    """The last dimension of its input, which its first projection takes."""
    return next(module for module in mlp.modules() if hasattr(module, "weight")).weight.shape[-1]


def worse(cls, original, fused, dtype, scale, activation="silu", op="npu_swiglu", device="cpu") -> list[tuple]:
    """What of output and gradients is of another dtype, or more than one ulp less exact than the original's."""
    mlp = instance(cls, activation).to(dtype).to(device)
    width = width_of(mlp)

    def compare(seed: int) -> list[tuple]:
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(2, 7, width, generator=generator) * scale).to(dtype).to(device)
        incoming = torch.randn(2, 7, width, generator=generator)
        return _compared(mlp, original, fused, x, incoming, op)

    first = compare(6)
    if first[0][1] != 1:
        return [("not fused", first[0][1])]
    if other := [part for part in first[1:] if part[1] != part[2]]:
        return other
    return behind(first, compare)


def _compared(mlp, original, fused, x, incoming, op) -> list[tuple]:
    """The fused calls; then of each part its name, both dtypes and shapes, and both errors in ulps."""
    theirs = run(mlp, original, x, incoming)
    with CallsOf(op) as calls:
        mine = run(mlp, fused, x, incoming)
    with InDouble():
        exact = run(deepcopy(mlp).cpu().double(), original, x.cpu().double(), incoming.double())
    found = [("calls", calls.count)]
    names = ("output", "gradient of x", *(f"gradient of {name}" for name, _ in mlp.named_parameters()))
    for name, got, expected, right in zip(names, mine, theirs, exact, strict=True):
        errors = [error_in_ulps(y.cpu(), right, expected.dtype, by_row=True) for y in (got, expected)]
        if not torch.isfinite(expected).all():  # where the original overflows there is nothing to be like
            errors = [0.0, 0.0]
        found.append((name, (got.dtype, got.shape), (expected.dtype, expected.shape), *errors))
    return found


def run(mlp, forward, x, incoming):
    """The output, then the gradients of the input and of the parameters."""
    leaf = x.detach().clone().requires_grad_()
    output = forward(mlp, leaf)
    incoming = incoming[..., : output.shape[-1]].to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [leaf, *mlp.parameters()], incoming)]
