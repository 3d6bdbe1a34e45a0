"""Which layers are alike, and that few of each kind stand for all of them at their real sizes."""

from __future__ import annotations

import pytest

from npu_autopatch.analysis import layers
from npu_autopatch.verification.source import architecture
from tests.analysis import golden

# of each model, how many layers are built, and how many each kind has
KINDS = {
    "llama-3-8b": (2, [32]),
    "qwen3-30b-a3b": (2, [48]),
    "qwen3-next-80b-a3b": (3, [36, 12]),
    "glm-4.5": (3, [3, 89]),
    "gpt-oss-120b": (3, [18, 18]),
    "deepseek-v3.2": (3, [3, 58]),
    "deepseek-v4": (5, [2, 1, 20, 20]),
}


@pytest.mark.parametrize("name", golden.names())
def test_few_layers_stand_for_all_of_a_published_model(name: str) -> None:
    found = architecture(golden.CONFIGS / f"{name}.json")
    model, alike = layers.fewer(found.config, found.cls)
    built, kinds = KINDS[name]
    paths = [path for path, _ in model.named_modules() if path and layers.layer_of(path) == path]
    assert len(paths) == built
    assert sorted(map(len, alike.values())) == sorted(kinds)
    assert sorted(n for numbers in alike.values() for n in numbers) == list(range(found.config.num_hidden_layers))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    widest = max(max(p.shape) for p in model.parameters())
    assert widest >= found.config.vocab_size


def test_kinds_that_no_list_tells_are_all_built() -> None:
    """Jamba's attention layers come by a period; a model of the first two layers would have none."""
    found = architecture("jamba")
    model, alike = layers.fewer(found.config, found.cls)
    assert sorted(map(len, alike.values())) == [4, 12, 16]
    assert sum(layers.layer_of(path) == path != "" for path, _ in model.named_modules()) == 32


def test_encoder_and_decoder_are_counted_apart() -> None:
    found = architecture("t5")
    _, alike = layers.fewer(found.config, found.cls)
    assert {path.rpartition(".")[0]: len(numbers) for path, numbers in alike.items() if len(numbers) > 1} == {
        "encoder.block": 5,
        "decoder.block": 5,
    }
