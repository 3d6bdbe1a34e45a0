"""What makes a class a gated MLP, and what makes it none, on classes written for the purpose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.kernels import odd_mlps as original
from tests.kernels.exact import CallsOf
from tests.kernels.odd import patched_copy

SEPARATE = "separate, under gradients only"


@pytest.fixture(scope="module")
def patched():
    """The classes of `odd_mlps` as those of a modeling module, patched; with the row of each."""
    with patched_copy(original, "swiglu") as copy:
        yield copy


MATCHED = [
    (original.Plain, SEPARATE, "npu_swiglu"),
    (original.UpFirst, SEPARATE, "npu_swiglu"),
    (original.Upcast, "separate+upcast, under gradients only", "npu_swiglu"),
    (original.FunctionalSiLU, SEPARATE, "npu_swiglu"),
    (original.FunctionalGELU, SEPARATE, "npu_geglu"),
    (original.FunctionalTanhGELU, SEPARATE, "npu_geglu"),
    (original.Both, "fused", "npu_swiglu"),
    (original.BothBySlice, "fused", "npu_swiglu"),
    (original.BothByView, "fused", "npu_swiglu"),
    (original.BothUpFirst, "fused_up_first, SiLU under gradients only", "npu_swiglu"),
    (original.Dropping, "separate+dropout, under gradients only", "npu_swiglu"),
    (original.DroppingLast, "separate+dropout, under gradients only", "npu_swiglu"),
    (original.DroppingByNumber, "separate+dropout, under gradients only", "npu_swiglu"),
    (original.CastToWeight, "separate+dropout, under gradients only", "npu_swiglu"),
]


@pytest.mark.parametrize(("cls", "variant", "op"), MATCHED, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_a_gated_mlp_is_recognised_whatever_its_names(patched, cls, variant, op, dtype, training):
    row, patched_class = patched(cls)
    assert row is not None and (row.state, row.variant) == ("patched", variant)
    mlp = patched_class().to(dtype).train(training)
    x = torch.randn(2, 5, 12).to(dtype)
    torch.manual_seed(4)
    with CallsOf(op) as calls:
        got = mlp(tokens=x)
    assert calls.count == 1
    torch.manual_seed(4)
    expected = cls.forward(mlp, x)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got == 0, expected == 0), "another mask of the dropout"
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (original.InnerNorm, "through between and back"),
        (original.InnerNormOrDropout, None),  # inherits its forward
        (original.NormFirst, None),
        (original.Multiplied, None),
        (original.MultipliedByInstanceMLP, "ratio"),
        (original.MultipliedOutput, "ratio"),
        (original.ClampedAt7, "scale 60"),
        (original.ClampedAt100, "scale 60"),
        (original.ClampedProduct, "scale 60"),
        (original.SparseMLP, "ratio"),
        (original.ResidualMLP, "fails on a probe"),
        (original.SecondInput, None),
        (original.Interleaved, "interleaved"),
        (original.SquaredGate, "not an activated gate times another projection"),
        (original.PlusOne, "not an activated gate times another projection"),
        (original.RoundedActivation, "dtypes of the projections are not alike"),
        (original.CastBack, "not what the last of its modules returned"),
        (original.Detached, "gradient"),
        (original.DetachedOutput, "gradient"),
        (original.InPlaceMLP, "writes to"),
        (original.Remembering, None),
        (original.Branching, "branches"),
        (original.SecondActivated, "branches"),
        (original.OtherInTraining, "in training"),
        (original.OptionalDropout, "does without lose"),
        (original.LastDimensionByNumber, None),
        (original.TwiceTheSame, "not an activated gate"),
        (original.Ungated, None),
        (original.WithHelperMLP, "uses halved"),
        (original.InheritedForward, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_other_step_is_refused_with_the_reason_or_is_no_site(patched, cls, words):
    row, patched_class = patched(cls)
    assert "forward" not in vars(cls) or not hasattr(vars(patched_class)["forward"], "__npu_autopatch__")
    if words is None:
        assert row is None or row.state == "refused"
    else:
        assert row is not None and row.state == "refused"
        assert words in row.reason


def test_an_inherited_forward_is_served_by_the_patch_of_its_base(patched):
    row, cls = patched(original.InheritedForward)
    assert row is None
    with CallsOf("npu_swiglu") as calls:
        cls()(torch.randn(2, 12))
    assert calls.count == 1


def test_what_a_view_does_not_take_fails_as_it_did(patched):
    _, cls = patched(original.BothByView)
    mlp = cls()
    with pytest.raises(ValueError, match="not enough values to unpack"):
        mlp(torch.randn(3, 12))
    with CallsOf("npu_swiglu") as calls:
        assert torch.equal(mlp(torch.ones(1, 2, 12), 2.0), original.BothByView.forward(mlp, torch.ones(1, 2, 12), 2.0))
    assert calls.count == 0, "the option goes to the original"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_cast_to_the_weight_as_it_was(patched, dtype):
    _, cls = patched(original.CastToWeight)
    mlp = cls().eval().to(dtype)
    mlp.back.float()
    x = torch.randn(2, 3, 12).to(dtype)
    with CallsOf("npu_swiglu") as calls:
        got = mlp(x)
    expected = original.CastToWeight.forward(mlp, x)
    assert calls.count == 1
    assert got.dtype is expected.dtype is torch.float32
    assert torch.allclose(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("weight", [torch.int8, None])
def test_a_quantised_weight_leaves_the_product_as_it_is(patched, weight):
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = None if weight is None else torch.zeros(2, dtype=weight)

        def forward(self, x):
            self.got = x.dtype
            return x.float()

    _, cls = patched(original.CastToWeight)
    mlp = cls().bfloat16()
    mlp.back = Quantised()
    with CallsOf("npu_swiglu") as calls:
        mlp(torch.randn(2, 12).bfloat16())
    assert calls.count == 1
    assert mlp.back.got is torch.bfloat16


def test_signatures_are_those_of_the_originals(patched):
    import inspect

    for cls, _, _ in MATCHED:
        fused = vars(patched(cls)[1])["forward"]
        assert fused.__npu_autopatch__
        assert inspect.signature(fused) == inspect.signature(cls.forward)
        assert (
            fused.__code__.co_varnames[: fused.__code__.co_argcount]
            == cls.forward.__code__.co_varnames[: cls.forward.__code__.co_argcount]
        )
