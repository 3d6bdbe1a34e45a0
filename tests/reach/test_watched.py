"""Which modules the finder watches: PyTorch models of transformers, and remote code."""

from __future__ import annotations

import pytest

from npu_autopatch.finder import finder, watched


@pytest.mark.parametrize(
    "name",
    [
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.deprecated.mega.modeling_mega",
        "transformers.models.from_tomorrow.modeling_from_tomorrow",
        "transformers_modules.someone.model.0a1b.modeling_odd",
        "transformers_modules.someone.model.0a1b.scaling",
        "transformers.dynamic_module_utils",
    ],
)
def test_models_and_remote_code_are_watched(name: str) -> None:
    assert watched(name)


@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        "transformers.models.qwen3",
        "transformers.models.qwen3.configuration_qwen3",
        "transformers.models.auto.modeling_auto",
        "transformers.models.t5.modeling_tf_t5",
        "transformers.models.t5.modeling_flax_t5",
        "transformers.generation.utils",
        "transformers_modules",
        "json.decoder",
        "my.transformers.models.qwen3.modeling_qwen3",
    ],
)
def test_nothing_else_is(name: str) -> None:
    assert not watched(name)
    assert finder.find_spec(name) is None
