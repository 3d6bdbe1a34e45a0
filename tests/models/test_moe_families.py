"""Whole models with experts: every layer of them runs fused, and all they return is no worse than without.

Each model is compared as a whole, and each of its blocks alone on what the model gave it. Expected values are those of
the same model in fp64, its experts one after the other, that chooses the same experts.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import npu_autopatch
from npu_autopatch.reporting import Row
from npu_autopatch.verification.comparison import Pass, errors, unlike

from .comparison import behind
from .moe_families import FAMILIES, PRESENT, V5, inputs, tiny, with_labels
from .moe_passes import Call, blocks, of_block, of_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# what is rounded does not depend on the mode, nor what runs on the dtype
CASES = (("fp32", "train"), ("fp32", "eval"), ("bf16", "train"))
# whose experts the kernel refuses: the report says why
REFUSED = {"doge", "nllb-moe", "switch_transformers"}
if not V5:
    REFUSED |= {"longcat_flash"}  # experts that do nothing are modules of another class
if transformers.__version__ == "5.0.0":
    REFUSED |= {"afmoe"}  # a list that is itself the class with the loop
# whose config asks for the loop of the class itself, by default
EAGER = {"openai_privacy_filter"}
# experts by name, but no text goes through them
NO_TEXT = {"dots3_note_vision_encoder", "vitpose", "vitpose_backbone"}
DEPRECATED = {"gptsan-japanese"}  # their modules are where no module is watched
SERVED = [name for name in PRESENT if name not in REFUSED | EAGER]
# all tests of a family in one process, which runs it under the patch once
GROUPED = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SERVED]
each_family = pytest.mark.parametrize("name", GROUPED)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_case = pytest.mark.parametrize(("dtype", "mode"), CASES)


@dataclass
class Runs:
    """What a family did under the patch."""

    rows: list[Row]
    blocks: dict[str, Row]
    passes: dict[tuple[str, str], tuple[Pass, list[Call]]] = field(default_factory=dict)
    alone: dict[str, list[tuple[Call, Pass]]] = field(default_factory=dict)
    few: Pass | None = None
    generated: torch.Tensor | None = None


def case(name: str, dtype: str, mode: str, **batch: int) -> tuple[Any, dict[str, Any]]:
    model = tiny(name, DTYPES[dtype]).train(mode == "train")
    return model, with_labels(name, model, inputs(model, **batch))


@functools.cache
def patched(name: str) -> Runs:
    """All of a family under one patch: each time anew it would prove every module that is loaded."""
    model = tiny(name)
    homes = {type(part).__module__ for part in model.modules()}
    with npu_autopatch.patched(kernels="moe", backend="emulate") as report:
        rows = [row for row in report.sites if row.module in homes and row.kernel == "moe"]
        runs = Runs(rows, blocks(model, rows))
        for dtype, mode in CASES:
            runs.passes[dtype, mode] = of_model(*case(name, dtype, mode), watched=runs.blocks)
        for dtype in DTYPES:
            model = case(name, dtype, "train")[0]
            calls = runs.passes[dtype, "train"][1]
            runs.alone[dtype] = [(call, of_block(model.get_submodule(call.name), call)) for call in calls]
        runs.generated = generated(name)
        if name in SERVED:
            runs.few = of_model(*case(name, "fp32", "train", rows=1, tokens=2))[0]
    return runs


def generated(name: str) -> torch.Tensor | None:
    """Three tokens after a few, by the greatest logit and with a cache; None from a model that generates none."""
    model = tiny(name)
    if not model.can_generate():
        return None
    batch = inputs(model, rows=2, tokens=5)
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if model.config.is_encoder_decoder:
        given["decoder_start_token_id"] = 0
    return model.generate(**given, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0)


def least(row: Row) -> Counter[str]:
    """The fused calls of one call of a block, by the form in which its experts are written."""
    if row.variant.startswith("grouped linear"):
        return Counter(npu_grouped_matmul=1)
    if row.variant.startswith("batched"):
        return Counter(npu_swiglu=1)
    return Counter(npu_moe_token_permute=1, npu_grouped_matmul=2, npu_moe_token_unpermute=1)


def test_every_model_type_with_experts_is_here() -> None:
    known = (
        {family.model_type for family in FAMILIES.values()} | NO_TEXT | DEPRECATED | {"Glm4vMoe_text"}
    )  # by another name
    missing = []
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:
            continue
        parts = {part.model_type for part in vars(config).values() if isinstance(part, PretrainedConfig)}
        parts |= {config.get_text_config(decoder=True).model_type}
        has = re.search(r'"(moe_)?(num|n)_(routed_|local_)?experts"', json.dumps(config.to_dict(), default=str))
        if has and not known & {model_type, *parts}:
            missing.append(model_type)
    assert not missing


def draws(name: str, dtype: str, mode: str) -> list[tuple[Pass, Pass, Pass]]:
    """As many more passes of a family, on other tokens each: under the patch, as the original, and exact."""
    cases = [case(name, dtype, mode, seed=seed) for seed in range(100, 112)]
    with npu_autopatch.patched(kernels="moe", backend="emulate"):
        mine = [of_model(*each)[0] for each in cases]
    return [
        (got, *(of_model(*each, got.choices, exact=exact)[0] for exact in (False, True)))
        for got, each in zip(mine, cases, strict=True)
    ]


@each_case
@each_family
def test_every_layer_of_experts_runs_fused_and_all_returned_is_no_worse(name: str, dtype: str, mode: str) -> None:
    runs = patched(name)
    got, calls = runs.passes[dtype, mode]
    model, batch = case(name, dtype, mode)
    original, theirs = of_model(model, batch, got.choices, watched=runs.blocks)
    exact, _ = of_model(model, batch, got.choices, exact=True)
    assert original.choices.spent and exact.choices.spent and not original.calls
    assert dtype == "bf16" or original.choices.differing == exact.choices.differing == 0
    assert [call.name for call in calls] == [call.name for call in theirs] != []
    for call in calls:
        assert not (lacking := least(runs.blocks[call.name]) - call.calls), (call.name, lacking)
    fused = sum((call.calls for call in calls), Counter())
    assert got.calls["npu_grouped_matmul"] >= 3 * fused["npu_grouped_matmul"]  # and for each the input's and weights'
    for op, gradient in GRADIENTS.items():
        assert got.calls[gradient] >= fused[op]
    assert not (found := unlike(got, original, runs.blocks)), "\n".join(found)
    if behind([errors(got, original, exact, DTYPES[dtype])]):
        # a mean over a few numbers is itself a matter of luck, and so is the sum of all rounding before one of them
        found = behind(errors(*passes, DTYPES[dtype]) for passes in draws(name, dtype, mode))
        assert not found, "\n".join(found)


GRADIENTS = {
    "npu_moe_token_permute": "npu_moe_token_permute_grad",
    "npu_moe_token_unpermute": "npu_moe_token_unpermute_grad",
    "npu_swiglu": "npu_swiglu_backward",
}


@each_dtype
@each_family
def test_each_block_alone_is_no_worse(name: str, dtype: str) -> None:
    runs = patched(name)
    model = case(name, dtype, "train")[0]
    for call, got in runs.alone[dtype]:
        block = model.get_submodule(call.name)
        original = of_block(block, call, got.choices)
        exact = of_block(block, call, got.choices, exact=True)
        assert got.calls and not original.calls
        found = unlike(got, original) + behind([errors(got, original, exact, DTYPES[dtype])])
        assert not found, "\n".join([call.name, *found])


@each_family
def test_experts_that_no_token_visits_have_gradients_of_zeros(name: str) -> None:
    runs = patched(name)
    assert runs.few is not None
    # in fp64 an expert that is visited has no gradient that is lost
    exact, calls = of_model(
        *case(name, "fp32", "train", rows=1, tokens=2), runs.few.choices, exact=True, watched=runs.blocks
    )
    visited = tuple(call.name for call in calls)
    unvisited = 0
    for path, gradient in runs.passes["fp32", "train"][0].gradients.items():
        # a token that sees itself alone gives its query no gradient, but for rounding
        if gradient is None or "attention" in path or not path.startswith(visited):
            continue
        mine, theirs = runs.few.gradients[path], exact.gradients[path]
        assert mine is not None, path
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        for of_mine, of_theirs in zip(*((mine, theirs) if mine.dim() > 1 else ([mine], [theirs])), strict=True):
            if not of_theirs.any():
                assert not of_mine.any(), path
                unvisited += 1
    assert bool(unvisited) != (name == "mixtral, every expert")


@each_family
def test_generation_gives_the_same_tokens(name: str) -> None:
    original = generated(name)
    if original is None:
        assert not tiny(name).can_generate()
    else:
        assert torch.equal(patched(name).generated, original)


@pytest.mark.parametrize("name", [name for name in PRESENT if name in REFUSED | EAGER])
def test_a_family_that_is_not_served_stays_as_it_was_and_the_report_says_why(name: str) -> None:
    runs = patched(name)
    if name in REFUSED:
        assert not runs.blocks and all(row.state == "refused" and row.reason for row in runs.rows)
    got, _ = runs.passes["fp32", "eval"]
    original, _ = of_model(*case(name, "fp32", "eval"), got.choices)
    assert not got.calls
    assert all(torch.equal(got.returned[key], value) for key, value in original.returned.items())
