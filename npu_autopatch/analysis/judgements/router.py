"""Routers: scores over the experts and the choice of the best."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import TIMED, Attempt, Limit, at_most, contract, no_op, tried
from npu_autopatch.analysis.result import Judgement


def router(case: Case) -> Judgement:
    """The weights and ids of each token's experts."""
    score = case.word("score") or "softmax"
    if score == "softmax":
        renormalised = case.flag("renormalised")
        attempts = {
            True: [_chosen_first(case)],
            False: [_all_first(case)],
            None: [_chosen_first(case), _all_first(case)],
        }
        return tried(case, "Softmax and choice fit into one launch.", *attempts[renormalised])
    if score == "sigmoid":
        return tried(case, "Sigmoid, groups, choice and normalisation fit into one launch.", _groups(case))
    return no_op(
        f"No router op scores with {score}. npu_moe_gating_top_k comes nearest, with softmax (norm_type=0) or sigmoid "
        "(norm_type=1); from train 2026-10 on it also takes experts from a table of token ids (input_ids, tid2eid), "
        "but weighs them by the same two.",
        contract("npu_moe_gating_top_k"),
    )


def _chosen_first(case: Case) -> Attempt:
    return Attempt(
        "npu_moe_gating_top_k_softmax_v2",
        "renorm=1: the softmax runs over the chosen ones, which is softmax, choice and normalisation in one. The "
        "logits cast to fp32 first where the model computes in it (gpt-oss does not); ids cast from int32 where it "
        "hands on int64.",
        _experiment(case, "npu_moe_gating_top_k_softmax_v2(logits.float(), k={k}, renorm=1)"),
        "Ties may be chosen in another order: count the tokens whose sets differ.",
        limits=(at_most(case.number("top_k"), 1024, "a choice of experts"),),
        gradient="with w the weights: dlogits of the chosen = w * (dw - sum(dw * w)), scattered to their ids",
    )


def _all_first(case: Case) -> Attempt:
    return Attempt(
        "npu_moe_gating_top_k_softmax",
        "The logits cast to fp32 first where the model computes in it; ids cast from int32 where it hands on int64.",
        _experiment(case, "npu_moe_gating_top_k_softmax(logits.float(), k={k})"),
        "The weights are not normalised. Ties may be chosen in another order: count the tokens whose sets differ. Not "
        "for Ascend 950.",
        limits=(at_most(case.number("top_k"), 1024, "a choice of experts"),),
        gradient="with p = softmax(logits) computed again and dp the weights' gradient scattered to their ids: "
        "p * (dp - sum(dp * p))",
    )


def _groups(case: Case) -> Attempt:
    experts, groups = case.number("experts"), case.number("groups") or 1
    size = None if experts is None else experts // groups
    raw = (
        " The weights are not normalised here, the op's are: gather them from its third result (out_flag=True) by the "
        "ids."
        if case.flag("renormalised") is False
        else ""
    )
    trained = " out_flag=True and norm_type=1 for the gradient, which is of the logits only." if case.training else ""
    padded = None if size is None else -(-size // 32) * 32 * groups
    return Attempt(
        "npu_moe_gating_top_k",
        "The logits of rank 2 in fp32 and the correction bias in their dtype; norm_type=1, renorm=0, "
        f"group_count={groups}, k_group as the config's, group_select_mode=1 (the two best of a group), "
        f"routed_scaling_factor and eps as the model's.{raw}{trained} ids cast from int32.",
        _experiment(
            case,
            f"npu_moe_gating_top_k(logits, {{k}}, bias=bias, group_count={groups}, group_select_mode=1, norm_type=1)",
        ),
        "The wheel documents that groups, each filled up to a multiple of 32, hold at most 2048 experts together"
        + (f" (here {padded})." if padded else ".")
        + " The Meta kernel of its backward is missing: it cannot be traced in training.",
        limits=(
            at_most(experts, 2048, "a number of experts"),
            Limit(
                "more than two experts a group", "" if size is None else str(size), None if size is None else size > 2
            ),
        ),
    )


def _experiment(case: Case, call: str) -> str:
    logits = case.shape("tokens", "experts")
    compared = ", and the gradient of the logits in fp64" if case.training else ""
    return (
        f"On logits {logits}: {call.format(k=case.told('top_k'))} against the model's own router: the same sets of "
        f"ids, weights within an ulp of fp32{compared}. {TIMED}"
    )
