"""What makes a class an RMS norm, and what makes it none, on classes written for the purpose."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.kernels import odd_norms as original
from tests.kernels.exact import CallsOf
from tests.kernels.odd import patched_copy


@pytest.fixture(scope="module")
def patched():
    """The classes of `odd_norms` as those of a modeling module, patched; with the row of each."""
    with patched_copy(original, "rms_norm") as copy:
        yield copy


@pytest.mark.parametrize(
    ("cls", "variant"),
    [
        (original.Plain, "round_then_mul"),
        (original.ConstantEps, "round_then_mul"),
        (original.NoEps, "round_then_mul"),
        (original.WithHelper, "round_then_mul"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0])  # at the small scale eps decides
def test_a_norm_is_recognised_whatever_its_names(patched, cls, variant, dtype, scale):
    row, patched_class = patched(cls)
    assert (row.state, row.variant) == ("patched", variant)
    norm = patched_class(48).to(dtype)
    norm.scale.data.normal_()
    x = (torch.randn(2, 5, 48) * scale).to(dtype)
    with CallsOf("npu_rms_norm") as calls:
        got = norm(tokens=x)
    assert calls.count == 1
    expected = cls.forward(norm, x)
    assert got.dtype is expected.dtype
    assert torch.allclose(got.double(), expected.double(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-7)


def test_a_class_built_from_a_configuration_is_recognised(patched):
    row, cls = patched(original.Alone)
    assert row.state == "patched"
    norm = cls(types.SimpleNamespace(hidden_size=32, rms_norm_eps=0.5))
    x = torch.randn(2, 3, 32)
    assert torch.allclose(norm(x), F.rms_norm(x, (32,), norm.scale, 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 0.0, 1e-3])
def test_torchs_own_norm_keeps_the_meaning_of_its_eps(patched, eps, dtype):
    row, cls = patched(original.OfTorch)
    assert row.state == "patched"
    norm = cls(32, eps=eps, dtype=dtype)
    norm.weight.data.normal_()
    x = (torch.randn(2, 3, 32) * 1e-3).to(dtype)
    with CallsOf("npu_rms_norm") as calls:
        got = norm(x)
    assert calls.count == 1
    assert torch.allclose(
        got.float(), nn.RMSNorm.forward(norm, x).float(), rtol=2e-2 if dtype is not torch.float32 else 1e-5
    )


@pytest.mark.parametrize("eps", [None, -1e-6, "1e-6", torch.tensor(1e-6)])
def test_an_eps_the_op_does_not_take_is_left_to_the_original(patched, eps):
    _, cls = patched(original.Plain)
    norm, x = cls(32), torch.randn(2, 3, 32)
    norm.tiny = eps
    with CallsOf("npu_rms_norm") as calls:
        try:
            expected = original.Plain.forward(norm, x)
        except TypeError as error:
            with pytest.raises(TypeError, match=str(error).split("(")[0].replace("+", r"\+")):
                norm(x)
        else:
            assert torch.equal(norm(x), expected)
    assert calls.count == 0


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (original.ClampedInside, "at scale 60"),
        (original.InPlace, "writes to its input"),
        (original.WithEpsAsProperty, "reads softening of its class, a property"),
        (original.Detached, "gradient"),
        (original.Dropping, ""),
        (original.Biased, "no RMS norm"),
        (original.Centred, "subtracts the mean"),
        (original.TimesInput, "no RMS norm"),
        (original.Tuple, "returns tuple"),
        (original.GatedByTanh, "no RMS norm"),
        (original.Mixture, "built of other modules (Linear)"),
    ],
)
def test_what_is_no_norm_is_refused_with_the_reason(patched, cls, words):
    row, _ = patched(cls)
    assert row.state == "refused"
    assert words in row.reason


def test_a_setting_the_proof_did_not_cover_runs_the_original(patched):
    """Scaled by 2 it is no norm, so the class is refused; built with a factor of one it is, and only that is fused."""
    row, _ = patched(original.Scaled)
    assert row.state == "refused"

    row, cls = patched(original.Unscaled)
    assert row.state == "patched"
    x = torch.randn(2, 3, 32)
    for factor, fused in ((1.0, 1), (3.0, 0)):
        norm = cls(32, factor=factor)
        with CallsOf("npu_rms_norm") as calls:
            assert torch.allclose(norm(x), original.Unscaled.forward(norm, x), rtol=1e-5, atol=1e-6)
        assert calls.count == fused


@pytest.mark.parametrize("where", ["the subclass", "the instance", "the class"])
def test_an_eps_of_the_class_is_the_one_in_force(patched, where):
    row, cls = patched(original.WithEpsOfItsClass)
    assert row.state == "patched"
    derived = type("Derived", (cls,), {"tiny": 0.5} if where == "the subclass" else {})
    norm, x = derived(32), torch.randn(2, 3, 32)
    if where == "the instance":
        norm.tiny = 0.5
    with pytest.MonkeyPatch.context() as changed, CallsOf("npu_rms_norm") as calls:
        if where == "the class":
            changed.setattr(cls, "tiny", 0.5)
        assert torch.allclose(norm(x), F.rms_norm(x, (32,), norm.scale, 0.5), rtol=1e-5, atol=1e-6)
    assert calls.count == 1


def test_a_flag_of_the_class_is_followed(patched):
    row, cls = patched(original.FlaggedByItsClass)
    assert row.state == "patched"
    x = torch.randn(2, 3, 32)
    for derived, fused in ((cls, 1), (type("Doubled", (cls,), {"doubled": True}), 0)):
        norm = derived(32)
        with CallsOf("npu_rms_norm") as calls:
            assert torch.allclose(norm(x), original.FlaggedByItsClass.forward(norm, x), rtol=1e-5, atol=1e-6)
        assert calls.count == fused


def test_a_subclass_that_overrides_a_step_runs_the_original(patched):
    _, cls = patched(original.WithHelper)

    class Doubled(cls):
        def unit(self, wide):
            return 2 * super().unit(wide)

    x = torch.randn(2, 3, 32)
    with CallsOf("npu_rms_norm") as calls:
        doubled = Doubled(32)(x)
    assert calls.count == 0
    with CallsOf("npu_rms_norm") as calls:
        assert torch.allclose(doubled, 2 * cls(32)(x), rtol=1e-5, atol=1e-6)
    assert calls.count == 1


def test_probing_a_class_does_not_run_its_modules(patched):
    """A class built of others is not built at all: its constructor may load weights."""

    class Loading(original.Mixture):
        def __init__(self, width):
            raise AssertionError("built")
            self.inner = nn.Linear(width, width)

    row, _ = patched(Loading)
    assert "built of other modules" in row.reason
