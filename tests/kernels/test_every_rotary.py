"""Every rotary function of the installed transformers: recognised as what it is, fused no less exactly than it was."""

from __future__ import annotations

import inspect
import json
import pathlib

import pytest
import torch
import transformers

from tests.kernels.rotary_sweep import arguments, cases, sweep, worse

CENSUS = pathlib.Path(__file__).parent.parent / "data" / f"rotary-{transformers.__version__}.json"
# what no fused op can serve, and what its reason must say
REFUSED = {
    "nanochat.apply_rotary_pos_emb": "the opposite sign",
    "edgetam_video.apply_rotary_pos_emb_2d_cross_attn": "no arguments were found",
    # splits its input and calls the patched function for each axis
    "gemma4.apply_multidimensional_rope": "no arguments were found",
    # one product of q, k and v for flash attention
    "modernbert.apply_rotary_unpadded": "puts no tensors together",
    # takes angles
    "qwen2_5_omni.apply_rotary_pos_emb_vision": "not inputs and a cos and sin",
}
# buckets of the census, and the variants that are the same thing told more closely
SAME = {
    "half_vision_SHD": {"half_vision"},
    "half_halfcos": {"half_half_size_cos"},
    "complex": {"interleaved_complex"},
    # gptj, codegen and the privacy filter take tables of half the width; the others use the first half of full ones
    "interleaved_halfcos": {"interleaved_halfcos", "interleaved_half_size_cos"},
    # deepseek_v4 rotates the last dimensions, by tables of half the width
    "interleaved_halfcos_partial": {"interleaved_halfcos_partial", "interleaved_half_size_cos_partial_last"},
    # the newer code of DeepSeek uses the first half of cos, the older all of it
    "interleave_in_half_out": {"interleave_in_half_out", "interleave_in_half_out_halfcos"},
    # inkling2's vision tower
    "interleaved_fullcos": {"interleaved_fullcos", "interleaved_fullcos_vision"},
    "mrope": {"mrope_half", "mrope_half_partial", "mrope_interleaved_halfcos_partial"},
}


@pytest.fixture(scope="module")
def swept():
    return sweep("emulate")


@pytest.mark.skipif(not CENSUS.exists(), reason=f"no census for transformers {transformers.__version__}")
def test_each_function_of_the_census_is_recognised_as_its_variant(swept):
    rows, _ = swept
    wrong = []
    for site, bucket in json.loads(CENSUS.read_text()).items():
        row = rows.get(site)
        if site in REFUSED and bucket.startswith("other"):
            right = row and row.state == "refused" and REFUSED[site] in row.reason
        else:
            right = row and row.state == "patched" and row.variant in SAME.get(bucket, {bucket})
        if not right:
            wrong.append((site, bucket, row and (row.state, row.variant, row.reason)))
    assert not wrong, "\n".join(map(str, wrong))


def test_coverage_reaches_its_figures(swept):
    least = {"4.57.6": 114, "5.0.0": 137, "5.24.0": 238}.get(transformers.__version__, 61)
    assert len(swept[1]) >= least


def test_signatures_are_the_originals(swept):
    wrong = []
    for rotary in swept[1]:
        same = inspect.signature(rotary.fused) == inspect.signature(rotary.original)
        code, old = rotary.fused.__code__, rotary.original.__code__
        bound = (code.co_argcount, code.co_kwonlyargcount, code.co_flags & 12)
        if not same or bound != (old.co_argcount, old.co_kwonlyargcount, old.co_flags & 12):
            wrong.append(rotary.name)
        if code.co_varnames[: code.co_argcount] != old.co_varnames[: old.co_argcount]:
            wrong.append((rotary.name, "names"))
    assert not wrong


def test_values_gradients_and_dtypes_are_those_of_the_original(swept):
    """Every dtype, scale, batch, rank, place of the heads and stride: at most one ulp above the original's error."""
    wrong = [
        (rotary.name, str(rotary.variant), case, *problem)
        for rotary in swept[1]
        for case in cases(rotary)
        for problem in worse(rotary, case)
    ]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(map(str, wrong[:20]))


def test_arguments_by_position_are_those_by_name(swept):
    wrong = []
    for rotary in swept[1]:
        bound = arguments(rotary, next(cases(rotary)))
        order = [name for name in inspect.signature(rotary.original).parameters if name in bound]
        by_place = rotary.fused(*(bound[name] for name in order))
        by_name = rotary.fused(**bound)
        for one, other in zip(_tensors(by_place), _tensors(by_name), strict=True):
            if not torch.equal(one, other):
                wrong.append(rotary.name)
    assert not wrong


def _tensors(outcome):
    return outcome if isinstance(outcome, tuple) else (outcome,)
