"""The emulator refuses what the op's contract refuses, in words, and differentiates what torch_npu differentiates."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_autopatch import emulator
from npu_autopatch.emulator.registration import ContractError, EmulatedOp, register

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LEGAL = {(x, x) for x in FLOATS} | {(x, torch.float32) for x in FLOATS}


@pytest.fixture(autouse=True)
def installed():
    emulator.install()


@pytest.mark.parametrize("gamma", FLOATS)
@pytest.mark.parametrize("x", FLOATS)
def test_pairs_of_dtypes(x, gamma):
    call = lambda: torch.ops.npu.npu_rms_norm(torch.randn(2, 3, 8).to(x), torch.randn(8).to(gamma), 1e-6)  # noqa: E731
    if (x, gamma) in LEGAL:
        y, rstd = call()
        assert (y.dtype, rstd.dtype, rstd.shape) == (x, torch.float32, (2, 3, 1))
    else:
        with pytest.raises(ContractError, match=rf"npu_rms_norm: got input {x} with gamma {gamma}; it takes"):
            call()


@pytest.mark.parametrize(
    ("x", "gamma", "eps", "words"),
    [
        (torch.ones(()), torch.ones(1), 1e-6, "rank 0; it takes rank 1 to 8"),
        (torch.ones((1,) * 8 + (4,)), torch.ones(4), 1e-6, "rank 9; it takes rank 1 to 8"),
        (torch.ones(2, 4), torch.ones(3), 1e-6, r"gamma \(3,\) for input \(2, 4\)"),
        (torch.ones(2, 0), torch.ones(0), 1e-6, "non-empty gamma"),
        (torch.ones(2, 4), torch.ones(4), -1e-6, "epsilon of 0 or more"),
        (torch.ones(2, 4).double(), torch.ones(4).double(), 1e-6, "float64"),
    ],
)
def test_what_the_op_does_not_take(x, gamma, eps, words):
    with pytest.raises(ContractError, match=words):
        torch.ops.npu.npu_rms_norm(x, gamma, eps)


def test_the_backward_refuses_rank_one():
    x = torch.ones(4, requires_grad=True)
    y, _ = torch.ops.npu.npu_rms_norm(x, torch.ones(4), 1e-6)
    with pytest.raises(ContractError, match="npu_rms_norm_backward: got input of rank 1; it takes rank 2 to 8"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_have_the_dtypes_of_the_device(dtype):
    """The kernel gives dgamma in fp32; autograd brings it to the weight's dtype."""
    x, gamma = torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype)
    _, rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(x, x, gamma, rstd)
    assert (dx.dtype, dgamma.dtype) == (dtype, torch.float32)
    gamma.requires_grad_()
    torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)[0].sum().backward()
    assert gamma.grad.dtype is dtype


def test_values_and_gradients_against_fp64():
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(12, dtype=torch.float64, requires_grad=True)
    incoming = torch.randn(2, 5, 12)
    exact = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * gamma
    right = torch.autograd.grad(exact, (x, gamma), incoming.double())
    x32, gamma32 = x.detach().float().requires_grad_(), gamma.detach().float().requires_grad_()
    y, _ = torch.ops.npu.npu_rms_norm(x32, gamma32, 1e-3)
    assert torch.allclose(y.double(), exact, rtol=1e-6, atol=1e-6)
    for got, expected in zip(torch.autograd.grad(y, (x32, gamma32), incoming), right, strict=True):
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_gamma_may_span_several_dimensions():
    x, gamma = torch.randn(2, 3, 4, 5), torch.randn(4, 5)
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, 0.0)
    assert rstd.shape == (2, 3, 1, 1)
    assert torch.allclose(y, torch.nn.functional.rms_norm(x, (4, 5), gamma, 0.0), rtol=1e-5, atol=1e-6)


def test_strides_and_empty_inputs():
    gamma = torch.randn(6)
    x = torch.randn(2, 6, 3).transpose(1, 2)
    assert torch.allclose(
        torch.ops.npu.npu_rms_norm(x, gamma, 0.1)[0], torch.ops.npu.npu_rms_norm(x.contiguous(), gamma, 0.1)[0]
    )
    assert torch.ops.npu.npu_rms_norm(torch.ones(0, 6), gamma, 0.1)[0].shape == (0, 6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fake_and_meta_tensors_have_the_real_shapes(dtype):
    real = torch.ops.npu.npu_rms_norm(torch.ones(2, 3, 8, dtype=dtype), torch.ones(8), 1e-6)
    meta = torch.ops.npu.npu_rms_norm(
        torch.ones(2, 3, 8, dtype=dtype, device="meta"), torch.ones(8, device="meta"), 1e-6
    )
    with FakeTensorMode():
        fake = torch.ops.npu.npu_rms_norm(torch.ones(2, 3, 8, dtype=dtype), torch.ones(8), 1e-6)
    for got in (meta, fake):
        assert [(t.shape, t.dtype, t.stride()) for t in got] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_an_op_without_a_formula_loses_its_gradient_as_on_the_device():
    register(EmulatedOp("npu_without_formula_(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape)))
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="no gradient for npu::npu_without_formula_"):
        assert not torch.ops.npu.npu_without_formula_(x).requires_grad


def test_a_second_derivative_is_missed_with_a_warning():
    x = torch.randn(2, 8, requires_grad=True)
    y, _ = torch.ops.npu.npu_rms_norm(x, torch.ones(8), 1e-6)
    with pytest.warns(UserWarning, match="no gradient for npu::npu_rms_norm_backward"):
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    assert torch.isfinite(gradient).all()


def test_a_first_derivative_comes_without_a_warning(recwarn):
    x = torch.randn(2, 8, requires_grad=True)
    torch.ops.npu.npu_rms_norm(x, torch.ones(8), 1e-6)[0].pow(3).sum().backward()
    assert not recwarn.list


def test_the_op_passes_torchs_own_check():
    x, gamma = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(torch.ops.npu.npu_rms_norm.default, (x, gamma, 1e-6))
