"""Every norm of the installed transformers: recognised as what it is, and fused no less exactly than it was."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import transformers

from tests.kernels.norm_sweep import DTYPES, SIZE, instance, settings_of, sweep, worse

CENSUS = pathlib.Path(__file__).parent.parent / "data" / f"norms-{transformers.__version__}.json"
# classes that have a row here although no fused op can serve them, with what the reason must say
REFUSED = {
    "axk2.AXK2GatedRMSNorm": "normalises nothing",
    "voxtral_realtime.VoxtralRealtimeTextAdaRmsNorm": "normalises nothing",
    "vibevoice.VibeVoiceDiffusionHeadFinalLayer": "built of other modules (Linear)",
    "hy_v4.HYV4UnweightedRMSNorm": "returns shape (2, 3, 1)",
    "hy_v4_vl.HYV4VLUnweightedRMSNorm": "returns shape (2, 3, 1)",
    "dory.DoryL2Norm": "the root of the sum of squares",
    "muse_spark.MuseSparkTextInputScaledRMSNorm": "multiplies by its weight before the norm",
    "deprecated.mega.MegaRMSNorm": "normalises nothing",
    "deprecated.mega.MegaScaleNorm": "its forward fails",
}


@pytest.fixture(scope="module")
def swept():
    return sweep("emulate")


@pytest.mark.skipif(not CENSUS.exists(), reason=f"no census for transformers {transformers.__version__}")
def test_each_norm_of_the_census_is_recognised_as_its_variant(swept):
    rows, _ = swept
    wrong = []
    for site, entry in json.loads(CENSUS.read_text()).items():
        row = rows.get(site)
        if site in REFUSED:
            if row is None or row.state != "refused" or REFUSED[site] not in row.reason:
                wrong.append((site, row))
        elif row is None or row.state != "patched" or not _same_variant(entry["bucket"], row.variant):
            wrong.append((site, entry["bucket"], row and (row.state, row.variant, row.reason)))
    assert not wrong, "\n".join(map(str, wrong))


def _same_variant(bucket: str, variant: str) -> bool:
    bucket = bucket.removeprefix("llama:").replace("_w_grouped", "_grouped").removesuffix("_w")
    if bucket == "other:unprobed":  # the census did not run these; what they compute was read from their code
        return variant in ("round_then_mul", "round_then_mul or no_upcast")
    return variant.split(" or ")[0] == bucket


def test_coverage_reaches_its_figures(swept):
    least = {"4.51.3": 58, "4.57.6": 107, "5.0.0": 121, "5.24.0": 211}.get(transformers.__version__, 58)
    assert len(swept[1]) >= least


def test_every_refused_site_says_why(swept):
    assert not [row for row in swept[0].values() if row.state != "patched" and not row.reason]


def test_values_gradients_and_dtypes_are_those_of_the_original(swept):
    """fp32, bf16, fp16, at scale 1 and 60: error against fp64 at most one ulp above the original's."""
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        for settings in settings_of(cls, swept[0][site].variant):
            for dtype in DTYPES:
                for scale in (1.0, 60.0):
                    wrong += [
                        (site, settings, dtype, scale, *w)
                        for w in worse(cls, original, fused, settings, dtype, dtype, scale)
                    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_output_dtype_for_every_pair_of_input_and_weight_dtypes(swept):
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        for settings in settings_of(cls, swept[0][site].variant):
            for x in DTYPES:
                for weight in DTYPES:
                    if x is not weight:
                        wrong += [
                            (site, settings, x, weight, *w)
                            for w in worse(cls, original, fused, settings, x, weight, 1.0)
                        ]
    assert not wrong, "\n".join(map(str, wrong))


def test_any_shape_the_original_takes(swept):
    """Ranks 1 to 5, one token, empty, and strides of every kind: the same shape and values, or the same error."""
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        norm = instance(cls, {})
        inputs = [
            torch.randn(*lead, SIZE)
            for lead in ((), (3,), (2, 1), (1, 2), (1, 1), (2, 5), (2, 3, 4), (2, 3, 2, 2), (0, 3))
        ]
        inputs += [
            torch.randn(2, SIZE, 3).transpose(1, 2),
            torch.randn(2, 3, 2 * SIZE)[..., ::2],
            torch.randn(1, SIZE).expand(4, SIZE),
        ]
        for x in inputs:
            args = (x, torch.randn(x.shape)) if original.__code__.co_argcount == 3 else (x,)
            got, expected = _outcome(fused, norm, args), _outcome(original, norm, args)
            same = type(got) is type(expected)
            if same and isinstance(got, torch.Tensor):
                same = got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
            if not same:
                wrong.append((site, tuple(x.shape), x.stride(), got, expected))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_gated_norm_without_its_gate_is_the_original(swept):
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        if original.__code__.co_argcount == 3:
            norm, x = instance(cls, {}), torch.randn(2, 3, SIZE)
            got, expected = _outcome(fused, norm, (x, None)), _outcome(original, norm, (x, None))
            if not (torch.equal(got, expected) if isinstance(expected, torch.Tensor) else type(got) is type(expected)):
                wrong.append((site, got, expected))
    assert not wrong, "\n".join(map(str, wrong))


def _outcome(forward, norm, args):
    try:
        return forward(norm, *args)
    except Exception as error:
        return error
