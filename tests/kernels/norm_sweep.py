"""All norms of the installed transformers, patched, and each compared with its original in fp64."""

from __future__ import annotations

from copy import deepcopy

import torch

from npu_autopatch.kernels import probing
from tests.kernels.exact import CallsOf, InDouble, behind, error_in_ulps
from tests.kernels.modeling import swept_classes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZE = 40
# settings of a constructor, other than its defaults, that have a fused case of their own; the rest run the original
ALSO_FUSED = {
    ("Gemma3nRMSNorm", "with_scale"),
    ("Gemma4RMSNorm", "with_scale"),
    ("FalconH1RMSNormGated", "norm_before_gate"),
}


def sweep(backend: str):
    """The rows of every modeling module, and class, original and fused forward of each patched site."""
    return swept_classes("rms_norm", backend)


def settings_of(cls, variant: str) -> list[dict]:
    """Every switch of the constructor both ways, and two groups where the variant has groups."""
    switches = (
        [{}, *({name: not default} for name, default in probing.switches(cls).items())] if " or " in variant else [{}]
    )
    return switches + [{**one, "__groups__": True} for one in switches if "grouped" in variant]


def instance(cls, settings: dict):
    arguments = {name: value for name, value in settings.items() if name != "__groups__"}
    norm = probing.build(cls, SIZE, **arguments)
    if "__groups__" in settings:
        name = next(name for name in ("n_groups", "group_size") if hasattr(norm, name))
        setattr(norm, name, 2 if name == "n_groups" else SIZE // 2)
    for name in ("eps", "variance_epsilon"):
        if isinstance(getattr(norm, name, None), probing.Anything):  # a configuration's
            setattr(norm, name, 1e-5)
    generator = torch.Generator().manual_seed(5)
    for tensor in norm.parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator)
    return norm


def worse(cls, original, fused, settings, x_dtype, weight_dtype, scale, device="cpu") -> list[tuple]:
    """What of output and gradients is of another dtype, or more than one ulp less exact than the original's."""

    def compare(seed: int) -> list[tuple]:
        norm = instance(cls, settings).to(weight_dtype).to(device)
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(2, 7, SIZE, generator=generator) for _ in range(original.__code__.co_argcount - 1)]
        tensors = [(t * (scale if i == 0 else 1.0)).to(x_dtype).to(device) for i, t in enumerate(tensors)]
        incoming = torch.randn(2, 7, SIZE, generator=generator).to(device)
        return _compared(norm, original, fused, tensors, incoming)

    first = compare(6)
    calls = first[0][1]
    proved = not settings or "__groups__" in settings or (cls.__name__, *settings) in ALSO_FUSED
    if calls != 1 and (proved or calls):
        return [("not fused", calls)]
    other = [part for part in first[1:] if part[1] != part[2]]
    if other:
        return other
    return behind(first, compare)


def _compared(norm, original, fused, tensors, incoming) -> list[tuple]:
    """The fused calls; then of each part its name, both dtypes and shapes, and both errors in ulps."""
    theirs = _run(norm, original, tensors, incoming)
    incoming = incoming.to(theirs[0].dtype)
    with CallsOf("npu_rms_norm") as calls:
        mine = _run(norm, fused, tensors, incoming)
    with InDouble():
        in_double = [t.cpu().double() for t in tensors]
        exact = _run(deepcopy(norm).cpu().double(), original, in_double, incoming.cpu().double())
    found = [("calls", calls.count)]
    names = ("output", "gradient of x", "gradient", "gradient")
    for name, got, expected, right in zip(names, mine, theirs, exact, strict=False):
        errors = [error_in_ulps(y.cpu(), right, expected.dtype, by_row=name != "output") for y in (got, expected)]
        if not torch.isfinite(expected).all():  # where the original overflows there is nothing to be like
            errors = [0.0, 0.0]
        found.append((name, (got.dtype, got.shape), (expected.dtype, expected.shape), *errors))
    return found


def _run(norm, forward, tensors, incoming):
    """The output, then the gradients of the inputs and of the parameters."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = forward(norm, *leaves)
    needed = [*leaves, *norm.parameters()]
    gradients = torch.autograd.grad(output, needed, incoming.to(output.dtype), allow_unused=True)
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]
