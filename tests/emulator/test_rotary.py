"""The emulated `npu_rotary_mul` takes what the device takes, in words, and leaves unwritten what it leaves."""

from __future__ import annotations

import pytest
import torch

from npu_autopatch import emulator
from npu_autopatch.emulator.registration import ContractError


@pytest.fixture(autouse=True)
def installed():
    emulator.install()


def call(x, cos, sin=None, mode="half", **kwargs):
    return torch.ops.npu.npu_rotary_mul(x, cos, cos if sin is None else sin, mode, **kwargs)


X = torch.randn(2, 3, 5, 8)
LEGAL = {
    "half": [(1, 1, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8), (1, 3, 1, 8), (2, 3, 1, 8), (2, 1, 1, 8), (2, 3, 1, 8)],
    "interleave": [(1, 1, 5, 8), (1, 3, 1, 8), (2, 1, 1, 8)],
}
ILLEGAL = {
    "half": [(1, 3, 5, 8), (1, 1, 1, 8), (2, 1, 5, 4), (1, 1, 4, 8)],
    "interleave": [(2, 1, 5, 8), (2, 3, 5, 8), (2, 3, 1, 8)],
}


@pytest.mark.parametrize("mode", LEGAL)
def test_broadcast_forms(mode):
    for shape in LEGAL[mode]:
        assert call(X, torch.rand(shape), mode=mode).shape == X.shape
    for shape in ILLEGAL[mode]:
        with pytest.raises(ContractError, match=r"npu_rotary_mul: got .* it takes"):
            call(X, torch.rand(shape), mode=mode)


@pytest.mark.parametrize(
    ("x", "cos", "mode", "words"),
    [
        (torch.ones(2, 8), torch.ones(2, 8), "half", "rank 3 or 4"),
        (torch.ones(1, 2, 3, 7), torch.ones(1, 1, 3, 7), "half", "an even D below 896"),
        (torch.ones(1, 2, 3, 896), torch.ones(1, 1, 3, 896), "half", "an even D below 896"),
        (torch.ones(1, 1000, 3, 8), torch.ones(1, 1, 3, 8), "half", "B and N below 1000"),
        (torch.ones(40, 30, 3, 2), torch.ones(1, 1, 3, 2), "interleave", "below 1000"),
        (torch.ones(0, 2, 3, 8), torch.ones(1, 1, 3, 8), "half", "an input with elements"),
        (torch.ones(1, 2, 3, 8).double(), torch.ones(1, 1, 3, 8), "half", "float32, bfloat16 or float16"),
        (torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8), "quarter", "half or interleave"),
        (torch.ones(3, 2, 8), torch.ones(1, 2, 8), "half", "TND"),
    ],
)
def test_what_the_op_does_not_take(x, cos, mode, words):
    with pytest.raises(ContractError, match=words):
        call(x, cos, mode=mode)


def test_no_rotation_matrix():
    with pytest.raises(ContractError, match="no rotate"):
        call(X, torch.rand(1, 1, 5, 8), rotate=torch.eye(8))


def test_the_result_has_the_dtype_of_the_input_and_is_contiguous():
    x = torch.randn(2, 5, 3, 8).bfloat16().transpose(1, 2)
    y = call(x, torch.rand(1, 1, 5, 8))
    assert (y.dtype, y.is_contiguous()) == (torch.bfloat16, True)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_gradients_are_those_of_the_formula(mode):
    from npu_autopatch.ops.rotary import reference

    leaves = [torch.randn(2, 3, 5, 8), torch.rand(1, 1, 5, 8), torch.rand(1, 1, 5, 8)]
    found, expected = (
        torch.autograd.grad(function(*tensors, mode).square().sum(), tensors)
        for function in (torch.ops.npu.npu_rotary_mul, reference)
        for tensors in ([x.clone().requires_grad_() for x in leaves],)
    )
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)


def test_gradients_nobody_asked_for_are_not_written():
    grad, cos = torch.randn(2, 3, 5, 8), torch.rand(1, 1, 5, 8)
    dx, dcos, dsin = torch.ops.npu.npu_rotary_mul_backward(grad, X, cos, cos, "half")
    assert torch.isfinite(dx).all()
    assert dcos.isnan().all() and dsin.isnan().all()


def test_gradients_of_the_tables_have_a_limit():
    x, cos = torch.randn(40, 30, 1, 2), torch.rand(1, 1, 1, 2, requires_grad=True)
    y = call(x, cos)
    with pytest.raises(ContractError, match="B \\* N of at most 1024"):
        y.sum().backward()
