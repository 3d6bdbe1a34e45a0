"""All experts classes that run through the interface of transformers 5, each compared with its own code in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import npu_autopatch
from npu_autopatch.kernels import probing
from npu_autopatch.kernels.moe import tiny
from tests.counting import Fused
from tests.kernels.exact import InDouble, behind, error_in_ulps
from tests.kernels.modeling import modules

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORWARD = {"npu_moe_token_permute": 1, "npu_grouped_matmul": 2, "npu_moe_token_unpermute": 1}


def sweep(backend: str) -> tuple[dict[str, Any], dict[str, tuple[type[nn.Module], Any]]]:
    """The rows of the kernel in every modeling module; class and fused function of each served by the interface."""
    classes = {(name, cls.__name__): cls for name, module in modules().items() for cls in probing.classes(module)}
    with npu_autopatch.patched(kernels="moe", backend=backend) as report:
        rows = {row.name: row for row in report.sites if row.kernel == "moe" and row.module in modules()}
        found = {row.name: classes[row.module, row.name.rpartition(".")[2]] for row in rows.values()}
        served = {
            site: (cls, vars(cls)["_npu_grouped_mm"]) for site, cls in found.items() if "_npu_grouped_mm" in vars(cls)
        }
    return rows, served


def instance(cls: type[nn.Module], implementation: str = "grouped_mm") -> nn.Module:
    """An instance with unequal sizes, random weights of std 0.3, as models of this implementation have it."""
    with torch.random.fork_rng(devices=[]):
        return tiny.build(cls, _experts_implementation=implementation)


def inputs(experts: nn.Module, tokens: int, top_k: int, seed: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights in fp32: each token has different experts, in no order; one expert of all has no token."""
    generator = torch.Generator().manual_seed(seed)
    first = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj
    count = first.size(0)
    ids = torch.stack([torch.randperm(count - 1, generator=generator)[:top_k] for _ in range(tokens)])
    ids = ids + (ids >= 1)  # the second has none
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return torch.randn(tokens, hidden(experts), generator=generator) * scale, ids, weights


def hidden(experts: nn.Module) -> int:
    """The size that it takes and gives."""
    return experts.down_proj.size(2 if experts.is_transposed else 1)


def worse(cls, fused, dtype, scale, weights_in=None, device="cpu", top_k=3) -> list[tuple]:
    """What of output and gradients is of another dtype, or more than one ulp less exact than the original's."""
    experts = instance(cls).to(dtype).to(device)

    def compare(seed: int) -> list[tuple]:
        generator = torch.Generator().manual_seed(seed + 1)
        x, ids, weights = inputs(experts, 7, top_k, seed, scale)
        given = (x.to(dtype).to(device), ids.to(device), weights.to(weights_in or dtype).to(device))
        return _compared(experts, fused, given, torch.randn(x.shape, generator=generator).to(dtype))

    first = compare(6)
    if first[0][1] != FORWARD:
        return [("not fused", first[0][1])]
    if other := [part for part in first[1:] if part[1] != part[2]]:
        return other
    return behind(first, compare)


def _compared(experts, fused, given, incoming) -> list[tuple]:
    def replaced(x, ids, weights):
        return fused(experts, x, ids, weights, _turned_away)

    theirs, mine = run(experts, given, incoming), run(experts, given, incoming, replaced)
    with Fused() as calls:
        run(experts, given, None, replaced)
    with InDouble():
        exact = run(
            _doubled(experts),
            [y.cpu().double() if y.is_floating_point() else y.cpu() for y in given],
            incoming.cpu().double(),
        )
    found: list[tuple] = [("calls", {name: calls.calls[name] for name in FORWARD})]
    names = ("output", "gradient of x", "gradient of weights", *(name for name, _ in experts.named_parameters()))
    for name, got, expected, right in zip(names, mine, theirs, exact, strict=True):
        errors = [error_in_ulps(y.cpu(), right, expected.dtype, by_row=True) for y in (got, expected)]
        if not torch.isfinite(expected).all():  # where the original overflows there is nothing to be like
            errors = [0.0, 0.0]
        found.append((name, (got.dtype, got.shape), (expected.dtype, expected.shape), *errors))
    return found


def _doubled(experts: nn.Module) -> nn.Module:
    double = instance(type(experts), "batched_mm").double()
    double.load_state_dict({name: tensor.cpu().double() for name, tensor in experts.state_dict().items()})
    return double


def _turned_away(*arguments):
    raise AssertionError("the guard turned the call away")


def run(experts, given, incoming, forward=None):
    """The output, then the gradients of the input, the routing weights and the parameters.

    Without `incoming` no gradient is asked for. `forward` stands for what the instance would run.
    """
    x, ids, weights = given
    forward = forward or experts
    if incoming is None:
        with torch.no_grad():
            return [forward(x, ids, weights)]
    x, weights = (leaf.detach().clone().requires_grad_() for leaf in (x, weights))
    output = forward(x, ids, weights)
    gradients = torch.autograd.grad(output, [x, weights, *experts.parameters()], incoming.to(output))
    return [output.detach(), *gradients]
