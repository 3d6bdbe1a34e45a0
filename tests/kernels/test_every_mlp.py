"""Every gated MLP of the installed transformers: recognised as what it is, and fused no less exactly than it was."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import transformers

from tests.kernels.exact import CallsOf
from tests.kernels.mlp_sweep import DTYPES, instance, sweep, width_of, worse

CENSUS = pathlib.Path(__file__).parent.parent / "data" / f"mlps-{transformers.__version__}.json"
# what the census counts as no target, with what the reason must say
REFUSED = {
    "bitnet.BitNetMLP": "ffn_sub_norm and down_proj, not one projection (BitNetRMSNorm)",
    "deepseek_v4.DeepseekV4MLP": "computes with limit",
    "dory.DoryMLP": "computes with suv_gate, suv_scale, suv_up",
    "falcon_h1.FalconH1MLP": "computes with gate_multiplier, down_multiplier",
    "gemma3n.Gemma3nTextMLP": "_gaussian_topk",
    "glm5_next.Glm5NextTextMLP": "computes with swiglu_limit",
    "glm5_next.Glm5NextVisionMLP": "computes with swiglu_limit",
    "inkling.InklingMLP": "computes with global_scale",
    "minimax_m3_vl.MiniMaxM3VLDenseMLP": "computes with swiglu_limit, swiglu_alpha",
    "phi4_multimodal.Phi4MultimodalAudioMLP": "first goes through layer_norm",
    "step3p7.Step3p7MLP": "computes with limit",
    "xlstm.xLSTMFeedForward": "reads config.weight_mode",
}
# in the census, but plainly no gated MLP: one normalises and shuffles first, the other is not called with a tensor
NO_SITE = {
    "aria.AriaGroupedExpertsMLP",
    "aya_vision.AyaVisionMultiModalProjector",
    "cohere2_vision.Cohere2VisionMultiModalProjector",
}
# the census could not build this one; its forward is that of all the others
UNBUILT = {"qwen2_moe.Qwen2MoeMLP"}


@pytest.fixture(scope="module")
def swept():
    return sweep("emulate")


@pytest.mark.skipif(not CENSUS.exists(), reason=f"no census for transformers {transformers.__version__}")
def test_each_mlp_of_the_census_is_recognised_as_its_variant(swept):
    rows, _ = swept
    wrong = []
    for site, entry in json.loads(CENSUS.read_text()).items():
        row = rows.get(site)
        if site in REFUSED:
            right = row is not None and row.state == "refused" and REFUSED[site] in row.reason
        elif site in NO_SITE:
            right = row is None
        else:
            bucket = "sep" if site in UNBUILT else entry["bucket"]
            right = row is not None and row.state == "patched" and _bucket(row.variant) == bucket
        if not right:
            wrong.append((site, entry["bucket"], row and (row.state, row.variant, row.reason)))
    assert not wrong, "\n".join(map(str, wrong))


def _bucket(variant: str) -> str:
    """The variant as the census names it, which looks at neither the order of halves nor the dtype of the product."""
    form = variant.partition(",")[0].replace("separate", "sep")
    return form.replace("_up_first", "").replace("+upcast", "")


def test_coverage_reaches_its_figures(swept):
    least = {"4.51.3": 54, "4.57.6": 99, "5.0.0": 109, "5.24.0": 184}.get(transformers.__version__, 54)
    assert len(swept[1]) >= least


def test_every_refused_site_says_why(swept):
    assert not [row for row in swept[0].values() if row.state != "patched" and not row.reason]


def test_few_classes_have_a_row_that_are_no_gated_mlp(swept):
    refused = [row.name for row in swept[0].values() if row.state != "patched"]
    assert len(set(refused) - set(REFUSED)) <= 8, refused


def test_the_variant_says_when_it_fuses(swept):
    rows, sites = swept
    for site, (cls, _, fused) in sites.items():
        mlp = instance(cls)
        x = torch.randn(2, 3, width_of(mlp))
        with torch.no_grad(), CallsOf("npu_swiglu") as calls:
            fused(mlp, x)
        assert calls.count == (0 if "under gradients only" in rows[site].variant else 1), site


def test_values_gradients_and_dtypes_are_those_of_the_original(swept):
    """fp32, bf16, fp16, at scale 1 and 60: error against fp64 at most one ulp above the original's."""
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        for dtype in DTYPES:
            for scale in (1.0, 60.0):
                wrong += [(site, dtype, scale, *w) for w in worse(cls, original, fused, dtype, scale)]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_both_forms_of_gelu_are_fused_exactly(swept, activation):
    """One class of each variant: the activation is its instance's."""
    classes = {row.variant: swept[1][site] for site, row in swept[0].items() if row.state == "patched"}
    wrong = []
    for variant, (cls, original, fused) in classes.items():
        if any(type(module).__name__.startswith("GELU") for module in instance(cls, activation).modules()):
            for dtype in DTYPES:
                found = worse(cls, original, fused, dtype, 1.0, activation, "npu_geglu")
                wrong += [(variant, cls, dtype, *w) for w in found]
    assert not wrong, "\n".join(map(str, wrong))


def test_any_shape_the_original_takes(swept):
    """Ranks 1 to 5, one token, empty, and strides of every kind: the same shape and values, or the same error."""
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        mlp = instance(cls)
        size = width_of(mlp)
        leads = ((), (3,), (2, 1), (1, 2), (1, 1), (2, 5), (2, 3, 4), (2, 3, 2, 2), (0, 3))
        inputs = [torch.randn(*lead, size) for lead in leads]
        inputs += [
            torch.randn(2, size, 3).transpose(1, 2),
            torch.randn(2, 3, 2 * size)[..., ::2],
            torch.randn(1, size).expand(4, size),
        ]
        for x in inputs:
            got, expected = _outcome(fused, mlp, x), _outcome(original, mlp, x)
            same = type(got) is type(expected)
            if same and isinstance(got, torch.Tensor):
                same = got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
            if not same:
                wrong.append((site, tuple(x.shape), x.stride(), got, expected))
    assert not wrong, "\n".join(map(str, wrong))


def _outcome(forward, mlp, x):
    try:
        return forward(mlp, x)
    except Exception as error:
        return error
