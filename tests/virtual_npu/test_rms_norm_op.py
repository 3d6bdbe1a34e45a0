"""`npu_rms_norm` through torch_npu's own dispatch: values, gradients, dtypes, refusals, tracing."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from torch._subclasses import FakeTensorMode

from npu_autopatch.emulator.registration import ContractError
from npu_autopatch.ops import rms_norm

from .accounting import counted
from .samples.rms_norm import PAIRS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ILLEGAL = [
    (x, gamma) for x in (*FLOATS, torch.float64) for gamma in (*FLOATS, torch.float64) if (x, gamma) not in PAIRS
]
EPS = 1e-5
every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda d: f"x {d[0]} gamma {d[1]}".replace("torch.", ""))


def operands(dtypes, shape=(3, 5, 24), normed=(24,)):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtypes[0]).npu().requires_grad_()
    return x, torch.rand(normed).add(0.5).to(dtypes[1]).npu().requires_grad_()


def exact(x, gamma):
    """The norm in fp64 on the CPU, and the operands it can be differentiated by."""
    x, gamma = (t.detach().cpu().double().requires_grad_() for t in (x, gamma))
    dims = tuple(range(-gamma.dim(), 0))
    return x * (x.square().mean(dims, keepdim=True) + EPS).rsqrt() * gamma, x, gamma


def assert_rounded_once(got, want):
    """`got` is fp32 work, rounded once to its dtype."""
    error = (got.detach().cpu().double() - want.detach()).abs()
    fp32 = 16 * torch.finfo(torch.float32).eps * want.abs().max()
    assert (error <= torch.finfo(got.dtype).eps * want.abs() + fp32).all(), f"{error.max():.2e}"


@every_pair
@pytest.mark.parametrize("normed", [(24,), (5, 24)], ids=str)
def test_forward_and_backward_are_one_kernel_each_with_one_rounding(dtypes, normed):
    x, gamma = operands(dtypes, normed=normed)
    want, x64, gamma64 = exact(x, gamma)
    with counted() as forward:
        y, rstd = torch_npu.npu_rms_norm(x, gamma, EPS)
    assert forward.launches == {"npu_rms_norm": 1}
    assert y.grad_fn.name() == "NpuRmsNormBackward0"
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert not rstd.requires_grad
    assert_rounded_once(y, want)

    grad = torch.randn(x.shape).to(x.dtype)
    with counted() as backward:
        y.backward(grad.npu())
    want.backward(grad.double())
    assert backward.launches["npu_rms_norm_backward"] == 1
    assert_rounded_once(x.grad, x64.grad)
    assert_rounded_once(gamma.grad, gamma64.grad)


@every_pair
def test_the_gradient_of_the_weight_has_the_dtype_of_the_weight(dtypes):
    x, gamma = operands(dtypes)
    torch_npu.npu_rms_norm(x, gamma, EPS)[0].sum().backward()
    assert gamma.grad.dtype == gamma.dtype
    assert x.grad.dtype == x.dtype


@pytest.mark.parametrize("trained", ["x", "gamma"])
def test_only_what_is_trained_gets_a_gradient(trained):
    x, gamma = operands((torch.float32, torch.float32))
    x.requires_grad_(trained == "x")
    gamma.requires_grad_(trained == "gamma")
    torch_npu.npu_rms_norm(x, gamma, EPS)[0].square().sum().backward()
    assert (x.grad is not None, gamma.grad is not None) == (trained == "x", trained == "gamma")


@pytest.mark.parametrize("dtypes", ILLEGAL, ids=lambda d: f"x {d[0]} gamma {d[1]}".replace("torch.", ""))
def test_an_illegal_pair_of_dtypes_is_refused(dtypes):
    x, gamma = operands(dtypes)
    with pytest.raises(ContractError, match="npu_rms_norm: got input"):
        torch_npu.npu_rms_norm(x, gamma, EPS)


@pytest.mark.parametrize(
    ("shape", "normed"),
    [((3, 8), (7,)), ((3, 8), (1,)), ((3, 8), (3,)), ((), ()), ((1,) * 8 + (8,), (8,)), ((3, 0), (0,))],
)
def test_an_illegal_shape_is_refused(shape, normed):
    with pytest.raises(ContractError, match="npu_rms_norm: got"):
        torch_npu.npu_rms_norm(torch.ones(shape, device="npu"), torch.ones(normed, device="npu"), EPS)


def test_a_missing_weight_is_refused():
    with pytest.raises(RuntimeError, match="gamma"):
        torch_npu.npu_rms_norm(torch.ones(3, 8, device="npu"), None, EPS)


def test_a_non_contiguous_input_gives_the_same_values_and_gradients():
    x, gamma = operands((torch.float32, torch.float32), shape=(3, 24, 5))
    strided = x.transpose(1, 2)
    assert not strided.is_contiguous()
    y = torch_npu.npu_rms_norm(strided, gamma, EPS)[0]
    y.square().sum().backward()
    want, x64, gamma64 = exact(strided, gamma)
    want.square().sum().backward()
    assert y.is_contiguous()
    assert_rounded_once(y, want)
    assert_rounded_once(x.grad.transpose(1, 2), x64.grad)
    assert_rounded_once(gamma.grad, gamma64.grad)


def test_an_empty_batch_gives_an_empty_result_and_launches_nothing():
    x, gamma = operands((torch.float32, torch.float32), shape=(0, 24))
    with counted() as counts:
        y = torch_npu.npu_rms_norm(x, gamma, EPS)[0]
    assert y.shape == (0, 24)
    assert not counts.launches


@every_pair
def test_fake_and_meta_tensors_have_the_shapes_and_dtypes_of_real_ones(dtypes):
    x, gamma = (t.detach() for t in operands(dtypes))
    real = [(t.shape, t.dtype) for t in torch_npu.npu_rms_norm(x, gamma, EPS)]
    assert [(t.shape, t.dtype) for t in torch_npu.npu_rms_norm(x.to("meta"), gamma.to("meta"), EPS)] == real
    with FakeTensorMode() as mode:
        fake = torch_npu.npu_rms_norm(mode.from_tensor(x), mode.from_tensor(gamma), EPS)
    assert [(t.shape, t.dtype) for t in fake] == real
    assert {t.device for t in fake} == {torch.device("npu:0")}


def test_autocast_leaves_the_dtypes_of_the_op_alone():
    x, gamma = operands((torch.float32, torch.float32))
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch_npu.npu_rms_norm(x, gamma, EPS)[0].dtype == torch.float32


def test_the_op_compiles_whole_and_keeps_its_gradient():
    x, gamma = operands((torch.bfloat16, torch.bfloat16))

    def norm(x, gamma):
        return torch.ops.npu.npu_rms_norm(x, gamma, EPS)[0]

    want = torch.autograd.grad(norm(x, gamma).square().sum(), (x, gamma))
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    with counted() as counts:
        got = torch.autograd.grad(compiled(x, gamma).square().sum(), (x, gamma))
    assert counts.launches["npu_rms_norm"] == counts.launches["npu_rms_norm_backward"] == 1
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@every_pair
def test_our_call_has_the_strides_that_tracing_promises(dtypes):
    """The op itself has not: its Meta kernel gives the results the strides of x, the device makes them contiguous."""
    x, gamma = (t.detach() for t in operands(dtypes, shape=(3, 24, 5)))
    strided = x.transpose(1, 2)
    real = [t.stride() for t in rms_norm.op()(strided, gamma, EPS)]
    with FakeTensorMode() as mode:
        promised = rms_norm.op()(mode.from_tensor(strided), mode.from_tensor(gamma), EPS)
    assert [t.stride() for t in promised] == real
