"""Every experts class of the installed transformers: served, and fused no less exactly than it was."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import transformers

from tests.kernels.experts_sweep import DTYPES, sweep, worse

CENSUS = pathlib.Path(__file__).parent.parent / "data" / f"experts-{transformers.__version__}.json"
V5 = int(transformers.__version__.partition(".")[0]) >= 5
# what the census's buckets are called here
VARIANTS = {
    "aria.AriaExperts": "stacked+transposed",
    "gpt_oss.GptOssExperts": "stacked+transposed+biased+interleaved+own gate",
    "muse_spark.MuseSparkExperts": "stacked+normed",
    "nemotron_h.NemotronHExperts": "stacked+no gate",
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": "stacked+transposed+biased+own gate",
}
# what is no mixture of gated experts that a grouped product serves, and what the reason must say
REFUSED = {
    "afmoe.AfmoeExperts": "the list of experts itself",
    "deepseek_v4.DeepseekV4GroupedLinear": "not the stacked weights of two products",
    "deprecated.gptsan_japanese.GPTSanJapaneseSparseMLP": "in a dictionary",
    "inkling.InklingSharedExperts": "every token goes through every expert",
    "longcat_flash.LongcatFlashMoE": "of 2 kinds: LongcatFlashMLP, Identity",
    "nllb_moe.NllbMoeExperts": "modules of their own",
    "nllb_moe.NllbMoeSparseMLP": "in a dictionary",
    "switch_transformers.SwitchTransformersExperts": "modules of their own",
    "switch_transformers.SwitchTransformersSparseMLP": "in a dictionary",
    "vitpose_backbone.VitPoseBackboneMoeMLP": "no gated MLP",
}
LEAST = {"4.51.3": 1, "4.57.6": 27, "5.0.0": 33, "5.24.0": 73}
OWN_GATE = {"beam", "deepseek_v4", "glm5_next", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop", "minimax_m3_vl"}


@pytest.fixture(scope="module")
def swept():
    return sweep("emulate")


@pytest.mark.skipif(not V5, reason="transformers 4 has no experts interface")
def test_every_decorated_class_is_served(swept):
    rows, served = swept
    if CENSUS.exists():
        decorated = {site for site, entry in json.loads(CENSUS.read_text()).items() if entry["decorated"]}
        assert decorated == set(served), [rows.get(site) for site in decorated ^ set(served)]
    assert len(served) >= {"5.0.0": 24, "5.24.0": 68}.get(transformers.__version__, 24)


@pytest.mark.skipif(not CENSUS.exists() or not V5, reason=f"no census for transformers {transformers.__version__}")
def test_each_class_is_recognised_as_its_variant(swept):
    rows, served = swept
    wrong = []
    for site in served:
        own = site.partition(".")[0] in OWN_GATE
        right = VARIANTS.get(site, "stacked+own gate" if own else "stacked")
        if rows[site].variant != right:
            wrong.append((site, rows[site].variant, right))
    assert not wrong


def test_coverage_reaches_its_figures(swept):
    assert sum(row.state == "patched" for row in swept[0].values()) >= LEAST.get(transformers.__version__, 1)


def test_what_is_refused_is_known_and_says_why(swept):
    refused = {site: row.reason for site, row in swept[0].items() if row.state != "patched"}
    assert not [(site, reason) for site, reason in refused.items() if REFUSED.get(site, "?") not in reason]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_output_and_gradients_are_no_less_exact_than_the_originals(swept, dtype, scale):
    _, served = swept
    found = {site: parts for site, of in served.items() if (parts := worse(*of, dtype, scale))}
    assert not found, found


def test_routing_weights_in_fp32_beside_tokens_in_bf16(swept):
    _, served = swept
    found = {site: p for site, of in served.items() if (p := worse(*of, torch.bfloat16, 1.0, torch.float32))}
    assert not found, found
