"""What is counted is what an NPU would launch: kernels, not views, not empty results, not copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .accounting import counted


def test_a_kernel_is_one_launch_with_the_bytes_it_reads_and_writes():
    a, b = torch.randn(4, 6, device="npu"), torch.randn(6, 2, device="npu")
    with counted() as counts:
        a @ b
    assert counts.launches == {"matmul": 1}
    assert counts.moved == {"matmul": 4 * (4 * 6 + 6 * 2 + 4 * 2)}


def test_an_expanded_operand_is_read_once():
    a, row = torch.randn(4, 6, device="npu"), torch.randn(6, device="npu")
    with counted() as counts:
        a + row.expand(4, 6)
    assert counts.moved == {"add": 4 * (4 * 6 + 6 + 4 * 6)}


def test_operands_in_a_list_are_each_read_once_and_a_transposed_view_is_no_copy():
    a, b = torch.randn(4, 6, device="npu"), torch.randn(6, 2, device="npu")
    with counted() as counts:
        torch.cat([a.t(), b], 1)
    assert counts.launches == {"cat": 1}
    assert counts.moved == {"cat": 4 * 2 * (4 * 6 + 6 * 2)}


@pytest.mark.parametrize("listed", [False, True])
def test_a_grouped_product_reads_the_weights_of_groups_with_rows_only(listed):
    x, weight = torch.randn(4, 6, device="npu"), torch.randn(5, 6, 2, device="npu")
    sizes = torch.tensor([1, 0, 3, 0, 0], device="npu")
    weights = list(weight.unbind(0)) if listed else [weight]
    with counted() as counts:
        torch.ops.npu.npu_grouped_matmul([x], weights, group_list=sizes, split_item=2, group_type=0, group_list_type=1)
    assert counts.moved == {"npu_grouped_matmul": 4 * (4 * 6 + 2 * 6 * 2 + 4 * 2) + 8 * 5}


def test_a_mutation_is_a_launch():
    a = torch.randn(4, 6, device="npu")
    with counted() as counts:
        a.add_(1)
    assert counts.launches == {"add_": 1}
    assert counts.moved == {"add_": 4 * 2 * 4 * 6}


def test_views_and_allocations_launch_nothing():
    a = torch.randn(4, 6, device="npu")
    with counted() as counts:
        a.t().unsqueeze(0)[:, 1:3].expand(5, 2, 4)
        a.view(2, 12).reshape(24).split(6)
        a.chunk(2)[0].squeeze().detach().unbind(0)
        a.diagonal(), a.narrow(0, 1, 2), a.permute(1, 0), a.select(0, 1), a.contiguous(), a.unfold(0, 2, 1)
        torch.empty(3, device="npu"), torch.empty_like(a)
    assert not counts.launches


def test_empty_results_launch_nothing():
    a = torch.randn(4, 6, device="npu")
    with counted() as counts:
        a[:0] + 1
        a[:0].clone(), a[:0].to(torch.bfloat16), a[:0].add_(1), torch.zeros(0, device="npu")
    assert not counts.launches


def test_copies_and_waits_are_transfers():
    a = torch.randn(4, 6, device="npu")
    with counted() as counts:
        a.cpu(), torch.ones(3).npu(), a.sum().item(), a.nonzero()
    assert sum(counts.transfers.values()) == 4
    assert counts.launches == {"sum": 1}


def test_counting_nests_and_ends():
    a = torch.randn(4, 6, device="npu")
    with counted() as outer:
        a + a
        with counted() as inner:
            a * a
    a - a
    assert outer.launches == {"add": 1, "mul": 1}
    assert inner.launches == {"mul": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "one row hidden"])
def test_attention_is_one_kernel_forward_and_one_backward_with_the_right_gradients(dtype, mask):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    options = {"enable_gqa": True, "is_causal": mask == "causal"}
    bits = torch.rand(2, 1, 5, 7) > 0.4
    bits[:, :, 2] = mask != "one row hidden"
    hidden = {"attn_mask": bits} if mask in ("bool", "one row hidden") else {}
    host = [t.to(dtype).double().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*host, **options, **hidden)
    want.backward(want.detach().cos())

    there = [t.to(dtype).npu().requires_grad_() for t in (q, k, v)]
    hidden = {name: t.npu() for name, t in hidden.items()}
    F.scaled_dot_product_attention(*there, **options, **hidden)  # torch_npu keeps the causal triangle it makes first
    with counted() as forward:
        got = F.scaled_dot_product_attention(*there, **options, **hidden)
    with counted() as backward:
        got.backward(want.detach().cos().to(dtype).npu())
    assert forward.launches["npu_fusion_attention_v3"] == 1
    assert backward.launches == {"npu_fusion_attention_grad_v3": 1}
    torch.testing.assert_close(got.cpu().double(), want, **_rounding(dtype))
    for a, b in zip(there, host, strict=True):
        torch.testing.assert_close(a.grad.cpu().double(), b.grad, **_rounding(dtype))


def _rounding(dtype):
    eps = torch.finfo(dtype).eps
    return {"rtol": 4 * eps, "atol": 8 * eps}


def test_attention_is_one_kernel_without_autograd_too():
    with torch.inference_mode():
        q = torch.ones(1, 2, 5, 8, device="npu")
        with counted() as counts:
            F.scaled_dot_product_attention(q, q, q)
    assert counts.launches == {"npu_fusion_attention_v3": 1}


def test_attention_with_a_float_mask_takes_the_math_path_as_on_the_device():
    q = torch.randn(1, 2, 5, 8, device="npu")
    bias = torch.randn(1, 1, 5, 5, device="npu")
    with counted() as counts:
        got = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    assert "npu_fusion_attention_v3" not in counts.launches
    torch.testing.assert_close(got.cpu(), F.scaled_dot_product_attention(*[q.cpu()] * 3, attn_mask=bias.cpu()))
