"""What is said of each chain follows the contracts of the ops, with the numbers of the model at hand."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from typing import Any

import pytest

from npu_autopatch.analysis.judgements import JUDGES, judged
from npu_autopatch.analysis.result import (
    BY_TORCH_NPU,
    CANDIDATE,
    DECODE,
    FUSED,
    MODES,
    NO_OP,
    NOT_POSSIBLE,
    PREFILL,
    STATES,
    TRAINING,
    Judgement,
)
from npu_autopatch.cli.ops_table import table

CHAINS = [*JUDGES, "other", "no such chain"]
PAST = {"dtype": "bfloat16", "tokens": 512, "batch": 2}
ONE = {"dtype": "bfloat16", "tokens": 2, "batch": 2}
_SIZES = (
    *("heads", "kv_heads", "qk_dim", "v_dim", "head_dim", "rotated", "width", "channels", "key_dim"),
    *("value_dim", "experts", "top_k", "streams", "rows", "intermediate", "vocabulary", "projections", "queries"),
    *("keys", "index_topk", "window", "kv_rank", "rope_dim", "groups"),
)


def sdpa(qk_dim: int = 128, **facts: Any) -> dict[str, Any]:
    return {
        "implementation": "sdpa",
        "mask": "none",
        "sinks": False,
        "heads": 32,
        "kv_heads": 8,
        "queries": 256,
        "keys": 256,
        "qk_dim": qk_dim,
        "v_dim": qk_dim,
        "latent": False,
        "sparse": False,
        **PAST,
        **facts,
    }


def ops(judgement: Judgement) -> list[str]:
    return [candidate.op.removeprefix("npu_") for candidate in judgement.candidates]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_is_judged_whole_whatever_is_known_of_it(chain: str, mode: str) -> None:
    known: list[dict[str, Any]] = [{}, PAST, dict.fromkeys(_SIZES, 64), dict.fromkeys(_SIZES, 1_000_001)]
    for facts, fused in itertools.product(known, (0, 3)):
        judgement = judged(chain, mode, facts, fused, 1, "")
        assert judgement.state in STATES
        assert judgement.reason.endswith(".") and len(judgement.reason.split()) > 2
        assert bool(judgement.candidates) or judgement.state != CANDIDATE
        assert judgement.state != NOT_POSSIBLE or not judgement.candidates
        assert judgement.source or judgement.state == FUSED
        for candidate in judgement.candidates:
            entry = table().entries[candidate.op]
            for text in (candidate.prepare, candidate.check, candidate.experiment, candidate.source):
                assert text and "None" not in text and "  " not in text, text
            assert entry.hardware in candidate.check
            assert entry.since <= "2025-10" or f"from train {entry.since} on" in candidate.check


@pytest.mark.parametrize("chain", CHAINS)
def test_facts_that_are_missing_forbid_nothing(chain: str) -> None:
    for mode in MODES:
        assert judged(chain, mode, {}, 0, 0, "").state != NOT_POSSIBLE


def test_a_missing_gradient_is_written_and_never_an_impossibility() -> None:
    without = 0
    for chain in CHAINS:
        judgement = judged(chain, TRAINING, PAST, 0, 0, "")
        assert judgement.state != NOT_POSSIBLE
        for candidate in judgement.candidates:
            if table().entries[candidate.op].differentiable_since is None:
                without += 1
                assert "gradient" in candidate.prepare + candidate.check, candidate.op
    assert without >= 10


def test_what_our_kernel_runs_is_fused_here_and_says_what_did_not() -> None:
    judgement = judged("rope", PREFILL, {"rotated": 128, **PAST}, 2, 1, "the table is half as wide")
    assert judgement.state == FUSED
    assert "2 calls" in judgement.reason and "1 ran the original: the table is half as wide" in judgement.reason
    assert "apply_rotary_pos_emb" in ops(judgement)


def test_a_refusal_is_told_with_the_candidate() -> None:
    judgement = judged("norm", PREFILL, {"width": 64, **PAST}, 0, 2, "its gamma is int8")
    assert judgement.state == CANDIDATE and "its gamma is int8" in judgement.reason


def test_an_unknown_chain_has_no_op() -> None:
    assert judged("no such chain", PREFILL, {}, 0, 0, "").state == NO_OP


PLAIN = {"gated": False, "activation": "gelu"}
EDGES: list[tuple[str, str, dict[str, Any], str, dict[str, Any], str, list[str]]] = [
    # chain, mode, the last facts that pass, the state there, the first that do not, the state there, what is quoted
    ("attention core", PREFILL, sdpa(512), BY_TORCH_NPU, sdpa(513), CANDIDATE, ["512", "513"]),
    ("attention core", PREFILL, sdpa(768), CANDIDATE, sdpa(769), NOT_POSSIBLE, ["768", "769", "npu_fusion_attention"]),
    ("attention core", PREFILL, sdpa(mask="bool"), BY_TORCH_NPU, sdpa(mask="float"), CANDIDATE, ["bool", "float"]),
    ("attention core", PREFILL, sdpa(kv_heads=8), BY_TORCH_NPU, sdpa(kv_heads=5), NOT_POSSIBLE, ["32", "5"]),
    ("attention core", PREFILL, sdpa(heads=2048), BY_TORCH_NPU, sdpa(heads=2056), CANDIDATE, ["2048", "2056"]),
    *(
        ("router", mode, facts(2048), CANDIDATE, facts(2049), NOT_POSSIBLE, ["2048", "2049", "npu_moe_gating_top_k"])
        for mode in MODES
        for facts in [lambda experts: {"experts": experts, "top_k": 8, "score": "sigmoid", **PAST}]
    ),
    (
        "router",
        PREFILL,
        {"experts": 24, "groups": 8, "score": "sigmoid"},
        CANDIDATE,
        {"experts": 16, "groups": 8, "score": "sigmoid"},
        NOT_POSSIBLE,
        ["more than two", "2"],
    ),
    ("router", PREFILL, {"top_k": 1024}, CANDIDATE, {"top_k": 1025}, NOT_POSSIBLE, ["1024", "1025"]),
    *(
        ("causal convolution", mode, {"width": 3}, CANDIDATE, {"width": 4}, NOT_POSSIBLE, ["width 3", "has 4"])
        for mode in MODES
    ),
    *(
        (
            "hyper-connections",
            mode,
            {"streams": n},
            CANDIDATE,
            {"streams": n + 1},
            NOT_POSSIBLE,
            ["4, 6 or 8", str(n + 1)],
        )
        for mode in MODES
        for n in (4, 6, 8)
    ),
    *(
        ("linear attention", mode, {fact: 128}, CANDIDATE, {fact: 129}, NOT_POSSIBLE, ["128", "129"])
        for mode in (PREFILL, TRAINING)
        for fact in ("key_dim", "value_dim")
    ),
    ("linear attention", PREFILL, {"heads": 64}, CANDIDATE, {"heads": 65}, NOT_POSSIBLE, ["64", "65"]),
    ("linear attention", DECODE, {"key_dim": 256}, CANDIDATE, {"key_dim": 257}, NOT_POSSIBLE, ["256", "257"]),
    ("indexer", PREFILL, {"head_dim": 128}, CANDIDATE, {"head_dim": 129}, NOT_POSSIBLE, ["128", "129"]),
    ("indexer", PREFILL, {"heads": 64}, CANDIDATE, {"heads": 65}, NOT_POSSIBLE, ["64", "65"]),
    ("indexer", DECODE, {"top_k": 2048}, CANDIDATE, {"top_k": 2049}, NOT_POSSIBLE, ["2048", "2049"]),
    ("indexer", DECODE, {"top_k": 8192}, CANDIDATE, {"top_k": 9216}, NOT_POSSIBLE, ["8192", "9216"]),
    *(
        ("MLP", DECODE, {**PLAIN, wide: 65535}, CANDIDATE, {**PLAIN, wide: 65536}, NOT_POSSIBLE, ["65536", "npu_ffn"])
        for wide in ("width", "intermediate")
    ),
    ("experts", PREFILL, {"width": 65535}, CANDIDATE, {"width": 65536}, NOT_POSSIBLE, ["65536"]),
    ("combine", PREFILL, {"top_k": 512}, CANDIDATE, {"top_k": 513}, CANDIDATE, ["launch"]),
    (
        "loss",
        TRAINING,
        {"vocabulary": 127},
        CANDIDATE,
        {"vocabulary": 127, "rows": 200_001},
        NOT_POSSIBLE,
        ["200000", "200001", "127"],
    ),
]


@pytest.mark.parametrize(("chain", "mode", "passing", "state", "failing", "then", "quoted"), EDGES)
def test_a_hard_limit_decides_at_its_edge_and_is_quoted(
    chain: str, mode: str, passing: dict[str, Any], state: str, failing: dict[str, Any], then: str, quoted: list[str]
) -> None:
    assert judged(chain, mode, passing, 0, 0, "").state == state
    judgement = judged(chain, mode, failing, 0, 0, "")
    assert judgement.state == then
    assert all(number in judgement.reason for number in quoted), judgement.reason
    if then == NOT_POSSIBLE:
        assert "npu_" in judgement.source and "torch_npu" in judgement.source


@pytest.mark.parametrize(
    ("chain", "facts", "words"),
    [
        ("indexer", {"head_dim": 64, "heads": 32}, "Head width 64 filled with zeros to 128"),
        ("causal convolution", {"width": 2, "channels": 100}, "Width 2 filled with zeros to 3"),
        ("linear attention", {"key_dim": 64, "dtype": "float32"}, "A cast from float32 to bfloat16"),
        ("experts", {"experts": 1025}, "In 2 calls"),
        ("attention core", {**sdpa(64), "implementation": "eager", "heads": 512}, "In 2 calls"),
    ],
)
def test_what_zeros_casts_and_further_calls_can_do_is_preparation(
    chain: str, facts: dict[str, Any], words: str
) -> None:
    judgement = judged(chain, PREFILL, facts, 0, 0, "")
    assert judgement.state == CANDIDATE
    assert any(words in candidate.prepare for candidate in judgement.candidates)


@pytest.mark.parametrize(
    ("chain", "facts", "op", "train"),
    [
        ("hyper-connections", {"streams": 4}, "npu_mhc_pre", "2026-04"),
        ("linear attention", {}, "npu_chunk_gated_delta_rule", "2026-07"),
        ("indexer", {}, "npu_lightning_indexer", "2026-01"),
        ("router", {"score": "softmax", "renormalised": True}, "npu_moe_gating_top_k_softmax_v2", "2026-04"),
    ],
)
def test_what_is_young_or_for_one_device_says_so(chain: str, facts: dict[str, Any], op: str, train: str) -> None:
    found = {candidate.op: candidate for candidate in judged(chain, PREFILL, facts, 0, 0, "").candidates}
    assert f"from train {train} on" in found[op].check
    assert (chain == "hyper-connections") is ("on Ascend 950 only" in found[op].check)


def test_the_numbers_of_the_model_stand_in_the_experiment() -> None:
    for chain, facts, wanted in [
        ("norm", {"width": 2880}, "[512, 2880]"),
        ("router", {"experts": 128, "top_k": 8, "score": "softmax", "renormalised": True}, "[512, 128]"),
        ("attention core", {**sdpa(64), "implementation": "eager"}, "[2, 32, 256, 64]"),
        ("linear attention", {"heads": 32, "key_dim": 128, "value_dim": 128}, "32 heads of 128"),
    ]:
        assert wanted in judged(chain, PREFILL, {**facts, **PAST}, 0, 0, "").candidates[0].experiment


def test_the_addition_before_a_fused_norm_is_still_to_be_won() -> None:
    facts = {"width": 2048, "norm_fused": True, "across": True, **PAST}
    judgement = judged("residual add and norm", TRAINING, facts, 1, 0, "")
    assert judgement.state == FUSED and ops(judgement) == ["add_rms_norm"]
    assert "npu_rms_norm_backward" in judgement.candidates[0].prepare
    assert "next layer" in judgement.candidates[0].prepare
    assert ops(judged("residual add and norm", PREFILL, facts, 1, 0, "")) == ["add_rms_norm", "add_rms_norm_v2"]


@pytest.mark.parametrize(("chain", "mode", "facts", "state"), [(*edge[:2], *edge[4:6]) for edge in EDGES])
def test_the_numbers_quoted_from_a_contract_stand_in_our_table(
    chain: str, mode: str, facts: dict[str, Any], state: str
) -> None:
    if state != NOT_POSSIBLE:
        return
    judgement = judged(chain, mode, facts, 0, 0, "")
    for clause in judgement.reason.rstrip(".").split("; npu_"):
        op, takes = clause.removeprefix("npu_").split(" takes ")
        numbers = re.findall(r"\d+", takes.partition("; this one has ")[0])
        if numbers and f"documentation of npu_{op}" not in judgement.source:
            assert any(number in limits(f"npu_{op}") for number in numbers), clause


def limits(op: str) -> str:
    """What the table has on an op, and on the one that its own entry refers to or that a source names with it."""
    told = " ".join(table().entries[op].limits)
    for other in re.findall(r"As (npu_\w+)", told):
        told += " ".join(table().entries[other].limits)
    third = "npu_fused_linear_cross_entropy_loss_with_max_sum_backward"
    return told + (" ".join(table().entries[third].limits) if op == "npu_fused_linear_online_max_sum" else "")


def test_judging_imports_no_torch() -> None:
    code = (
        "import sys; from npu_autopatch.analysis.judgements import judged; judged('norm', 'prefill', {}, 0, 0, '');"
        "print([name for name in ('torch', 'transformers', 'torch_npu') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_latent_of_another_width_is_written_all_the_same() -> None:
    written = [ops(judged("cache write", DECODE, {"latent": True, "kv_rank": rank}, 0, 0, "")) for rank in (512, 256)]
    assert written == [["kv_rmsnorm_rope_cache_v2", "scatter_pa_kv_cache"], ["scatter_pa_kv_cache"]]


@pytest.mark.parametrize("kind", ["layer norm", "group norm"])
def test_norms_that_torch_has_a_kernel_for_are_told_apart(kind: str) -> None:
    judgement = judged("norm", PREFILL, {"kind": kind}, 0, 0, "")
    assert judgement.state == BY_TORCH_NPU and not judgement.candidates
    assert kind in judgement.reason and f"aten::native_{kind.replace(' ', '_')}" in judgement.source


def test_keys_of_an_indexer_can_be_written_in_place() -> None:
    judgement = judged("cache write", DECODE, {"read_by": "indexer"}, 0, 0, "")
    assert (judgement.state, ops(judgement)) == (CANDIDATE, ["scatter_nd_update_"])
