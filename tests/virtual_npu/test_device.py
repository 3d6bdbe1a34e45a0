"""The virtual device is torch_npu's own: its name, its dispatch, its silence about lost gradients."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from transformers.utils import is_torch_npu_available

from npu_autopatch import emulator
from npu_autopatch.emulator.registration import ContractError

from .accounting import counted
from .device import serving


def test_torch_and_transformers_see_an_npu():
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.ones(2, device="npu").device == torch.device("npu:0")
    assert is_torch_npu_available(check_device=True)


def test_values_survive_the_way_to_the_device_and_back():
    x = torch.randn(3, 4, 5).transpose(0, 2)
    assert torch.equal(x.npu().cpu(), x)
    assert torch.equal(x.npu()[1:, ::2].cpu(), x[1:, ::2])
    assert x.npu().to(torch.bfloat16).to("cpu").dtype == torch.bfloat16


def test_a_kernel_writes_to_the_tensor_and_through_its_views():
    x = torch.zeros(4, 4, device="npu")
    x[1:3].add_(2)
    x.t()[0].fill_(7)
    want = torch.zeros(4, 4)
    want[1:3].add_(2)
    want.t()[0].fill_(7)
    assert torch.equal(x.cpu(), want)


def test_every_emulated_op_runs_on_the_device_under_its_own_name():
    x, gamma = torch.randn(2, 3, 8, device="npu"), torch.rand(8, device="npu")
    with counted() as counts:
        y, rstd = torch_npu.npu_rms_norm(x, gamma, 1e-6)
    want_y, want_rstd = emulator.rms_norm.npu_rms_norm(x.cpu(), gamma.cpu(), 1e-6)
    assert counts.launches == {"npu_rms_norm": 1}
    assert torch.equal(y.cpu(), want_y)
    assert torch.equal(rstd.cpu(), want_rstd)


def test_an_op_without_a_formula_loses_its_gradient_without_an_error():
    def grouped_matmul(x, weight, *, group_list, **_):
        ends = group_list.tolist()
        rows = zip([0, *ends[:-1]], ends, weight[0], strict=True)
        return [torch.cat([x[0][start:end] @ w for start, end, w in rows])]

    x = torch.randn(5, 3, device="npu", requires_grad=True)
    weight = torch.randn(2, 3, 4, device="npu", requires_grad=True)
    scale = torch.ones(4, device="npu", requires_grad=True)
    groups = torch.tensor([2, 5], device="npu")
    with serving("npu_grouped_matmul", grouped_matmul):
        (y,) = torch_npu.npu_grouped_matmul([x], [weight], group_list=groups, split_item=3, group_type=0)
        (y * scale).sum().backward()
    want = torch.cat([x[:2].cpu() @ weight[0].cpu(), x[2:].cpu() @ weight[1].cpu()])
    torch.testing.assert_close(y.cpu(), want)
    assert scale.grad is not None
    assert x.grad is None
    assert weight.grad is None


def test_an_op_with_an_error_for_a_formula_raises_in_backward():
    def add_rms_norm(x1, x2, gamma, epsilon=1e-6):
        y, rstd = emulator.rms_norm.npu_rms_norm(x1 + x2, gamma, epsilon)
        return y, rstd, x1 + x2

    x = torch.randn(2, 8, device="npu", requires_grad=True)
    with serving("npu_add_rms_norm", add_rms_norm), pytest.raises(RuntimeError, match="npu_add_rms_norm"):
        torch_npu.npu_add_rms_norm(x, x, torch.ones(8, device="npu"))[0].sum().backward()


@pytest.mark.parametrize(
    ("op", "arguments", "kernel"),
    [("npu_gemma_rms_norm", 2, "aclnnGemmaRmsNorm"), ("npu_fast_gelu", 1, "FastGelu")],
)
def test_an_op_without_a_kernel_raises_with_the_name_of_what_is_missing(op, arguments, kernel):
    x = torch.randn(8, device="npu")
    with pytest.raises(RuntimeError, match=kernel):
        getattr(torch.ops.npu, op)(*[x] * arguments)


def test_a_kernel_is_served_only_inside_its_block():
    x = torch.randn(8, device="npu")
    with serving("npu_fast_gelu", torch.nn.functional.gelu):
        torch.testing.assert_close(torch.ops.npu.npu_fast_gelu(x).cpu(), torch.nn.functional.gelu(x.cpu()))
    with pytest.raises(RuntimeError, match="FastGelu"):
        torch.ops.npu.npu_fast_gelu(x)


def test_a_refusal_of_the_contract_reaches_the_caller():
    x = torch.randn(2, 8, device="npu")
    with pytest.raises(ContractError, match=r"got input torch\.float32 with gamma torch\.bfloat16"):
        torch_npu.npu_rms_norm(x, torch.ones(8, device="npu", dtype=torch.bfloat16))
