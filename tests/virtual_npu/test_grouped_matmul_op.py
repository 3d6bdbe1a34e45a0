"""Experts on ``npu:0``: torch_npu's schemas, Meta kernels and autograd under our grouped layer and the token ops."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from torch.utils.checkpoint import checkpoint

from npu_autopatch.ops import grouped_matmul as ops
from npu_autopatch.ops import token_permute

from .accounting import counted

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, CHOSEN, HIDDEN, INNER, EXPERTS = 9, 3, 16, 24, 5
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
each_form = pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])


def operands(dtype, weights_dtype=None, elsewhere=False):
    """Ids, of which one expert gets none, and what is trained: tokens, weights, two projections, a bias."""
    source = torch.Generator().manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS, generator=source).argsort(-1)[:, :CHOSEN]
    ids = torch.where(ids == 1, EXPERTS if elsewhere else 2, ids)
    shapes = (TOKENS, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER)
    x, up, down, bias = (torch.randn(shape, generator=source).to(dtype) for shape in shapes)
    weights = torch.rand(ids.shape, generator=source).to(weights_dtype or dtype) * (ids < EXPERTS)
    return ids.npu(), [t.npu().requires_grad_() for t in (x, weights, up, down, bias)]


def layer(x, ids, weights, up, down, bias, listed=False, tail=False, run=None):
    run = run or ops.op()
    rows, order = run.permute(x, ids)
    counts = run.counts(ids, EXPERTS)
    if listed:
        inner = run.grouped_linear_list(rows, up.unbind(0), counts, bias.unbind(0)).sin()
        return run.unpermute(run.grouped_linear_list(inner, down.unbind(0), counts), order, weights)
    past = torch.arange(rows.size(0), device=x.device).unsqueeze(1) >= counts.sum() if tail else None
    inner = run.grouped_linear(rows, up, counts, bias, tail=past).sin()
    return run.unpermute(run.grouped_linear(inner, down, counts, tail=past), order, weights)


def exact(ids, trained, dy):
    """Each token through its experts in fp64 on the CPU: what comes out, and the gradients."""
    ids, wide = ids.cpu(), [t.detach().cpu().double().requires_grad_() for t in trained]
    x, weights, up, down, bias = wide
    here = ids.clamp(max=EXPERTS - 1)
    inner = (torch.einsum("th,tkih->tki", x, up[here]) + bias[here]).sin()
    y = (torch.einsum("tki,tkhi->tkh", inner, down[here]) * weights.unsqueeze(-1) * (ids < EXPERTS).unsqueeze(-1)).sum(
        1
    )
    return y, torch.autograd.grad(y, wide, dy.cpu().double())


def assert_exact(ids, trained, y, gradients, dy):
    want, wants = exact(ids, trained, dy)
    for got, right, like in zip((y, *gradients), (want, *wants), (trained[0], *trained), strict=True):
        assert got.dtype is like.dtype
        error = (got.detach().cpu().double() - right).norm() / right.norm()
        assert error <= 8 * torch.finfo(y.dtype).eps


@each_dtype
@each_form
def test_experts_and_their_gradients_are_right_in_as_many_kernels_as_there_are_products(dtype, listed):
    ids, trained = operands(dtype)
    dy = torch.randn(TOKENS, HIDDEN).to(dtype).npu()
    with counted() as forward:
        y = layer(trained[0], ids, *trained[1:], listed=listed)
    with counted() as backward:
        gradients = torch.autograd.grad(y, trained, dy)
    assert_exact(ids, trained, y, gradients, dy)
    assert not gradients[2][1].any(), "zeros for the expert without rows"
    fused = [
        {name: n for name, n in c.launches.items() if "npu_moe" in name or "grouped" in name}
        for c in (forward, backward)
    ]
    names = ("npu_moe_token_permute", "npu_moe_token_unpermute")
    assert fused[0] == {**dict.fromkeys(names, 1), "npu_grouped_matmul": 2}
    assert fused[1] == {**{f"{name}_grad": 1 for name in names}, "npu_grouped_matmul": 5}
    assert not forward.transfers
    assert not backward.transfers


@each_dtype
def test_experts_elsewhere_add_nothing(dtype):
    ids, trained = operands(dtype, elsewhere=True)
    dy = torch.randn(TOKENS, HIDDEN).to(dtype).npu()
    with counted() as counts:
        y = layer(trained[0], ids, *trained[1:], tail=True)
        gradients = torch.autograd.grad(y, trained, dy)
    assert_exact(ids, trained, y, gradients, dy)
    assert not counts.transfers


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_routing_weights_in_fp32_get_their_gradient_in_fp32(dtype):
    assert token_permute.takes_mixed(), "this torch_npu writes it into memory of its own dtype"
    ids, trained = operands(dtype, torch.float32)
    dy = torch.randn(TOKENS, HIDDEN).to(dtype).npu()
    y = layer(trained[0], ids, *trained[1:])
    assert_exact(ids, trained, y, torch.autograd.grad(y, trained, dy), dy)


def test_the_op_itself_loses_its_gradient():
    x, weight = torch.randn(4, 6, device="npu"), torch.randn(2, 6, 8, device="npu", requires_grad=True)
    counts = torch.tensor([1, 3]).npu()
    y = torch_npu.npu_grouped_matmul([x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1)[0]
    y.sum().backward()
    assert weight.grad is None
    ops.grouped_linear(x, weight, counts, transposed=True).sum().backward()
    assert weight.grad is not None


@each_form
@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
def test_each_weight_is_read_once_a_product_and_never_copied(listed, transposed):
    rows, k, n = 12, 16, 32
    x = torch.randn(rows, k, device="npu", requires_grad=True)
    shape = (EXPERTS, k, n) if transposed else (EXPERTS, n, k)
    stack = torch.nn.Parameter(torch.randn(shape, device="npu"))
    each = [torch.nn.Parameter(w.clone()) for w in stack.detach()]
    counts, dy = torch.tensor([5, 1, 3, 2, 1]).npu(), torch.randn(rows, n, device="npu")
    call, weight = (ops.grouped_linear_list, each) if listed else (ops.grouped_linear, stack)
    trained = [x, *each] if listed else [x, stack]

    with counted() as forward:
        y = call(x, weight, counts, transposed=transposed)
    assert forward.launches == {"npu_grouped_matmul": 1}
    weights, ids = 4 * EXPERTS * k * n, 8 * EXPERTS
    assert forward.moved == {"npu_grouped_matmul": 4 * rows * (k + n) + weights + ids}

    with counted() as backward:
        torch.autograd.grad(y, trained, dy)
    assert backward.launches == {"npu_grouped_matmul": 2}
    assert backward.moved == {"npu_grouped_matmul": 2 * (4 * rows * (k + n) + weights + ids)}
    assert not forward.transfers
    assert not backward.transfers


def test_frozen_experts_launch_no_product_for_their_gradient():
    ids, trained = operands(torch.bfloat16)
    for tensor in trained[2:]:
        tensor.requires_grad_(False)
    y = layer(trained[0], ids, *trained[1:])
    with counted() as counts:
        torch.autograd.grad(y.sum(), trained[:2])
    assert counts.launches["npu_grouped_matmul"] == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_counting_is_on_the_device_and_leaves_off_what_is_elsewhere(dtype):
    ids = torch.tensor([[0, 5], [3, 3], [5, 1], [3, 4]], dtype=dtype).npu()
    for experts, want in ((5, [1, 1, 0, 3, 1]), (1, [1]), (2, [1, 1])):
        with counted() as counts:
            found = token_permute.counts(ids, experts)
        assert (found.dtype, found.cpu().tolist()) == (torch.int64, want)
        assert not counts.transfers
    with counted() as counts:
        token_permute.counts(ids, 5)
    assert counts.launches.total() == (1 if dtype is torch.int64 else 2)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_compiles_whole_with_torch_npus_own_meta_kernels(dtype, listed):
    ids, trained = operands(dtype)
    dy = torch.randn(TOKENS, HIDDEN).to(dtype).npu()
    found = ops.op()

    def run(ids, *trained):
        return layer(trained[0], ids, *trained[1:], listed=listed, tail=not listed, run=found)

    y = run(ids, *trained)
    want = (y, *torch.autograd.grad(y, trained, dy))
    with counted() as counts:
        y = torch.compile(run, backend="aot_eager", fullgraph=True)(ids, *trained)
        got = (y, *torch.autograd.grad(y, trained, dy))
    assert counts.launches["npu_grouped_matmul"] == 7
    assert not any("unpermute" in op for op in counts.launches)  # it returns its input, which compiled code may not
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_is_recomputed_by_its_checkpoint(reentrant):
    ids, trained = operands(torch.float32)
    dy = torch.randn(TOKENS, HIDDEN, device="npu")
    y = checkpoint(layer, trained[0], ids, *trained[1:], use_reentrant=reentrant)
    y.backward(dy)
    assert_exact(ids, trained, y, [tensor.grad for tensor in trained], dy)


def test_nothing_is_kept_in_inference():
    ids, trained = operands(torch.bfloat16)
    with torch.inference_mode(), counted() as counts:
        y = layer(trained[0], ids, *trained[1:])
    assert counts.launches["npu_grouped_matmul"] == 2
    assert (
        y.cpu().double() - exact(ids, trained, torch.zeros(TOKENS, HIDDEN))[0]
    ).norm() < 0.1 * y.float().norm().cpu()


def test_the_ops_are_detected():
    assert (ops.capability().available, ops.capability().differentiable) == (True, False)
    assert (token_permute.capability().available, token_permute.capability().differentiable) == (True, True)
    assert ops.traces()
