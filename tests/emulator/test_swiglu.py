"""`npu_swiglu` and `npu_geglu` on the CPU: refused in words what the contract refuses, else right to the rounding."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from npu_autopatch import emulator
from npu_autopatch.emulator.registration import ContractError
from tests.kernels.exact import error_in_ulps

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GELUS = [(approximate, left) for approximate in (0, 1) for left in (False, True)]


@pytest.fixture(autouse=True)
def installed():
    emulator.install()


def swiglu(x, *settings):
    return torch.ops.npu.npu_swiglu(x, *settings)


def geglu(x, *settings):
    return torch.ops.npu.npu_geglu(x, *settings)[0]


def exact(x, activation, left=True, dim=-1):
    a, b = x.double().chunk(2, dim)
    return activation(a) * b if left else a * activation(b)


@pytest.mark.parametrize("op", [swiglu, geglu])
@pytest.mark.parametrize(
    ("x", "settings", "words"),
    [
        (torch.ones(()), (), "rank 0; it takes rank 1 to 8"),
        (torch.ones((1,) * 8 + (4,)), (), "rank 9; it takes rank 1 to 8"),
        (torch.ones(2, 3), (), "size 3 at dim -1; it takes an even size"),
        (torch.ones(3, 2), (0,), "size 3 at dim 0; it takes an even size"),
        (torch.ones(2, 4), (2,), "dim 2 for an input of rank 2"),
        (torch.ones(0, 4), (), "at least one element"),
        (torch.ones(2, 0), (), "at least one element"),
        (torch.ones(2, 4).double(), (), "float64"),
        (torch.ones(2, 4).int(), (), "int32"),
        (torch.ones(4, 2).t(), (), "a contiguous input"),
    ],
)
def test_what_the_ops_do_not_take(op, x, settings, words):
    with pytest.raises(ContractError, match=words):
        op(x, *settings)


def test_an_unknown_approximation_is_refused():
    with pytest.raises(ContractError, match="approximate 2; it takes 0 for the exact gelu, 1 for tanh"):
        geglu(torch.ones(2, 4), -1, 2)


@pytest.mark.parametrize("op", ["npu_swiglu_backward", "npu_geglu_grad"])
def test_the_backward_refuses_a_gradient_of_another_shape_or_dtype(op):
    x, half = torch.ones(2, 4), torch.ones(2, 2)
    rest = (half,) if "geglu" in op else ()
    for wrong in (torch.ones(2, 4), half.bfloat16()):
        with pytest.raises(ContractError, match="grad_output"):
            getattr(torch.ops.npu, op)(wrong, x, *rest)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu_activates_the_first_half_and_rounds_once(dtype, dim):
    x = torch.randn(4, 6, 8).to(dtype).requires_grad_()
    right = x.detach().double().requires_grad_()
    want = exact(right, F.silu, dim=dim)
    got = swiglu(x, dim)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, want.shape, True)
    assert error_in_ulps(got, want, dtype) <= (0.51 if dtype is not torch.float32 else 8)
    incoming = torch.randn(want.shape)
    (mine,), (theirs,) = (torch.autograd.grad(y, t, incoming.to(y.dtype)) for y, t in ((got, x), (want, right)))
    assert mine.dtype is dtype
    assert torch.allclose(mine.double(), theirs, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("approximate", "left"), GELUS)
def test_geglu_has_both_forms_and_both_sides(dtype, approximate, left):
    def gelu(x):
        return F.gelu(x, approximate=("none", "tanh")[approximate])

    x = torch.randn(4, 6).to(dtype).requires_grad_()
    right = x.detach().double().requires_grad_()
    want = exact(right, gelu, left)
    got, activated = torch.ops.npu.npu_geglu(x, -1, approximate, left)
    assert not activated.requires_grad
    assert torch.allclose(activated.double(), gelu(right.chunk(2, -1)[not left]), rtol=1e-2, atol=1e-3)
    assert torch.allclose(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    incoming = torch.randn(want.shape)
    (mine,), (theirs,) = (torch.autograd.grad(y, t, incoming.to(y.dtype)) for y, t in ((got, x), (want, right)))
    assert torch.allclose(mine.double(), theirs, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_by_default_geglu_activates_the_second_half_by_tanh():
    x = torch.randn(3, 8)
    assert torch.equal(geglu(x), geglu(x, -1, 1, False))
    assert not torch.allclose(geglu(x), geglu(x, -1, 1, True))


@pytest.mark.parametrize("op", [swiglu, geglu])
def test_fake_and_meta_tensors_have_the_real_shapes(op):
    real = op(torch.ones(2, 3, 8, dtype=torch.bfloat16))
    with FakeTensorMode():
        fake = op(torch.ones(2, 3, 8, dtype=torch.bfloat16))
    for got in (op(torch.ones(2, 3, 8, dtype=torch.bfloat16, device="meta")), fake):
        assert (got.shape, got.dtype, got.stride()) == (real.shape, real.dtype, real.stride())
