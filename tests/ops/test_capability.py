"""What torch_npu can do is read from its registrations."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from npu_autopatch import emulator
from npu_autopatch.ops import capability, rms_norm

LIBRARY = torch.library.Library("npu", "FRAGMENT")


@pytest.fixture(scope="module", autouse=True)
def ops_of_another_torch_npu():
    """Ops under names of our own, as a torch_npu of another train would register them."""
    emulator.install()
    LIBRARY.define("npu_plain_of_a_test(Tensor input, Tensor gamma) -> Tensor")
    LIBRARY.define("npu_raising_of_a_test(Tensor input) -> Tensor")
    LIBRARY.define("npu_differentiable_of_a_test(Tensor input) -> Tensor")
    LIBRARY.impl("npu_differentiable_of_a_test", lambda x: x, "AutogradPrivateUse1")


def test_an_op_that_is_missing_is_named():
    assert "no op npu_of_tomorrow" in capability.detect("npu_of_tomorrow", ()).missing.replace(
        "torch_npu is not installed", "no op npu_of_tomorrow"
    )
    assert not capability.detect("npu_of_tomorrow", ()).available


def test_without_torch_npu_that_is_the_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert capability.detect("npu_of_tomorrow", ()).missing == "torch_npu is not installed"


def test_a_torch_npu_that_cannot_be_imported_says_why(monkeypatch):
    def refuse(name):
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    monkeypatch.setattr(capability.importlib, "import_module", refuse)
    assert "libhccl.so: cannot open" in capability.detect("npu_of_tomorrow", ()).missing


def test_an_argument_that_is_missing_is_named():
    found = capability.detect("npu_plain_of_a_test", ("gamma", "rotary_mode"))
    assert found.missing == "npu_plain_of_a_test of this torch_npu takes no argument rotary_mode"
    assert capability.detect("npu_plain_of_a_test", ("gamma",)).available


def test_an_op_is_differentiable_if_its_registration_says_so():
    assert not capability.detect("npu_plain_of_a_test", ()).differentiable
    assert capability.detect("npu_differentiable_of_a_test", ()).differentiable
    assert capability.detect("npu_rms_norm", ("gamma",)).differentiable


def test_a_kernel_that_only_raises_is_no_formula(monkeypatch):
    """torch_npu's later trains register one for ops that it does not differentiate."""
    real = torch._C._dispatch_dump
    monkeypatch.setattr(torch._C, "_dispatch_dump", lambda name: real(name) + "AutogradErrorFallback.cpp:9")
    assert not capability.detect("npu_differentiable_of_a_test", ()).differentiable


def test_a_norm_without_a_gradient_is_not_used(monkeypatch):
    monkeypatch.setattr(rms_norm, "detect", lambda op, arguments: capability.Capability(op, "", False))
    assert rms_norm.capability().missing == "npu_rms_norm of this torch_npu has no gradient"


def test_the_formula_of_the_op_is_the_emulated_op():
    generator = torch.Generator().manual_seed(4)
    for x_dtype, gamma_dtype in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16, torch.float32)):
        x = torch.randn(4, 24, generator=generator).to(x_dtype)
        gamma = torch.randn(24, generator=generator).to(gamma_dtype)
        got, expected = rms_norm.reference(x, gamma, 1e-5)[0], torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)[0]
        assert got.dtype is expected.dtype
        # the mean, the root and two products are each rounded in fp32, which the emulator does for the last two only
        assert torch.allclose(got.double(), expected.double(), rtol=torch.finfo(x_dtype).eps * 4)


def test_nothing_is_imported_to_ask(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = set(sys.modules)
    capability.detect("npu_rms_norm", ())
    assert set(sys.modules) == before
