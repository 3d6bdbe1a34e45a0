"""Twenty model types of many forms are verified; `make verify-all` does so with all that there are."""

from __future__ import annotations

import pytest

from npu_autopatch.verification.passes import MODES
from npu_autopatch.verification.verifying import verify

SAMPLE = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm4",
    "glm4_moe",
    "olmo2",
    "granite",
    "cohere2",
    "mistral",
    "starcoder2",
    "glm",
    "gpt_neox",
    "ernie4_5",
    "smollm3",
]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_model_type_is_verified_in_each_mode_and_site_by_site(model_type: str) -> None:
    found = verify(model_type, backend="emulate")
    assert found.passed, found
    assert [mode.name for mode in found.modes] == [f"{dtype} {mode}" for dtype in ("fp32", "bf16") for mode in MODES]
    called = [site for site in found.sites if site.fused or site.original]
    assert found.fused > 0
    assert all(mode.error is not None for mode in found.modes)
    for site in called:
        assert site.error is not None and site.variant, site
        assert site.fused > 0 or site.why_original, site


def test_twenty_are_here() -> None:
    assert len(set(SAMPLE)) == 20
