"""Seven published models are taken apart as they were when the result was read by a person, line by line."""

from __future__ import annotations

import functools

import pytest

from npu_autopatch.analysis.chains import OTHER
from npu_autopatch.analysis.result import DECODE, MODES, PREFILL, STATES, TRAINING, Analysis
from tests.analysis import golden

EVERY = {"embedding", "residual add and norm", "norm", "QKV", "rope", "attention core", "output head"}
ROUTED = {"router", "dispatch", "experts", "combine"}
# What each model has beside these, in its layers. Llama and GPT-OSS have no norm that follows no addition.
HAS: dict[str, set[str]] = {
    "llama-3-8b": EVERY - {"norm"} | {"MLP"},
    "qwen3-30b-a3b": EVERY | ROUTED,
    "qwen3-next-80b-a3b": EVERY
    | ROUTED
    | {"MLP", "linear attention", "causal convolution", "output gate", "shared expert gate"},
    "glm-4.5": EVERY | ROUTED | {"MLP"},
    "gpt-oss-120b": EVERY - {"norm"} | ROUTED,
    "deepseek-v3.2": EVERY | ROUTED | {"MLP", "indexer"},
    "deepseek-v4": EVERY - {"residual add and norm"} | ROUTED | {"MLP", "indexer", "compressor", "hyper-connections"},
}
ONLY_IN = {DECODE: {"cache write"}, PREFILL: {"cache write"}, TRAINING: {"loss"}}


def computing(ops: dict[str, int]) -> dict[str, int]:
    """All but copies: what a fused op returns may lie otherwise in memory than what it replaces."""
    return {name: count for name, count in ops.items() if name not in ("aten::clone", "aten::copy_")}


@functools.cache
def found(name: str) -> Analysis:
    return golden.analysis(name)


@pytest.mark.parametrize("name", golden.names())
def test_every_chain_a_model_has_is_named(name: str) -> None:
    analysis = found(name)
    assert [mode.name for mode in analysis.modes] == list(MODES)
    for mode in analysis.modes:
        named = {chain.name for part in mode.parts for chain in part.chains}
        assert HAS[name] | ONLY_IN[mode.name] <= named, mode.name
        assert OTHER not in named, mode.name
        assert not named & set().union(*(ONLY_IN[m] for m in MODES)) - ONLY_IN[mode.name], mode.name


@pytest.mark.parametrize("name", golden.names())
def test_every_chain_has_a_state_and_a_reason_and_what_could_be_tried_says_how(name: str) -> None:
    for mode in found(name).modes:
        for part in mode.parts:
            for chain in part.chains:
                judgement = chain.judgement
                assert judgement.state in STATES and judgement.reason, (mode.name, chain)
                for candidate in judgement.candidates:
                    assert all(vars(candidate).values()), candidate


@pytest.mark.parametrize("name", golden.names())
def test_launches_only_go_where_an_op_is_fused(name: str) -> None:
    for mode in found(name).modes:
        assert mode.after.launches < mode.before.launches
        assert mode.name == DECODE or mode.after.bytes < mode.before.bytes
        for part in mode.parts:
            for chain in part.chains:
                if any(op.startswith("npu::") for op in chain.ops_after):
                    assert chain.after.launches < chain.before.launches, (mode.name, chain)
                elif mode.name != TRAINING:
                    assert computing(chain.ops_after) == computing(chain.ops_before), (mode.name, chain)


@pytest.mark.parametrize("name", golden.names())
def test_the_result_is_the_one_that_was_read(name: str) -> None:
    """Else read the difference, and `python -m tests.analysis.golden` writes it."""
    assert golden.told(found(name)) == (golden.GOLDEN / f"{name}.txt").read_text()
