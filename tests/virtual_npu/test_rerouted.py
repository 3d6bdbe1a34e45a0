"""An emulated op is served under every name by which torch_npu runs it, and counted under the callers' name."""

from __future__ import annotations

import torch
import torch_npu

from npu_autopatch.emulator.registration import EmulatedOp

from .accounting import counted
from .device import serve
from .rerouted import serve_rerouted


def permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    order = indices.flatten().argsort(stable=True)
    return tokens[order // indices.shape[1]], order.argsort().int()


def permute_grad(tokens, grad_permuted_tokens, indices, sorted_indices, padded_mode=False):
    return grad_permuted_tokens[sorted_indices.long()].unflatten(0, indices.shape).sum(1)


def unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    rows = permuted_tokens[sorted_indices.long()]
    return rows if probs is None else (rows.unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1)


def unpermute_grad(permuted_tokens, grad, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    with torch.enable_grad():
        wanted = [permuted_tokens.detach().requires_grad_()]
        wanted += [] if probs is None else [probs.detach().requires_grad_()]
        unpermuted = unpermute(wanted[0], sorted_indices, *wanted[1:])
    return torch.autograd.grad(unpermuted, wanted, grad)


KERNELS = (permute, permute_grad, unpermute, unpermute_grad)
OPS = [EmulatedOp(f"npu_moe_token_{kernel.__name__}()", kernel, kernel) for kernel in KERNELS]


def test_tokens_permuted_and_unpermuted_have_the_gradients_of_the_experts_they_visit():
    torch.manual_seed(0)
    tokens = torch.randn(5, 6, requires_grad=True)
    probs = torch.rand(5, 2, requires_grad=True)
    indices = torch.randint(0, 3, (5, 2), dtype=torch.int32)
    want = (tokens.cos().unsqueeze(1) * probs.unsqueeze(-1)).sum(1)
    want.sin().sum().backward()

    there, there_probs = (t.detach().npu().requires_grad_() for t in (tokens, probs))
    with torch.library._scoped_library("npu", "IMPL") as library:
        serve("npu_moe_token_permute", permute, library)
        serve_rerouted(OPS, library)
        with counted() as counts:
            permuted, sorted_indices = torch_npu.npu_moe_token_permute(there, indices.npu())
            got = torch_npu.npu_moe_token_unpermute(permuted.cos(), sorted_indices, there_probs)
            got.sin().sum().backward()
    torch.testing.assert_close(got.cpu(), want)
    torch.testing.assert_close(there.grad.cpu(), tokens.grad)
    torch.testing.assert_close(there_probs.grad.cpu(), probs.grad)
    fused = {name: count for name, count in counts.launches.items() if "npu_" in name}
    assert fused == dict.fromkeys((op.name for op in OPS), 1)
