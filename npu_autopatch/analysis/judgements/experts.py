"""Mixtures of experts between the router and the sum: dispatch, experts, combine, and the shared expert's gate."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    TIMED,
    Attempt,
    Limit,
    at_most,
    below,
    documentation,
    fused,
    tried,
)
from npu_autopatch.analysis.judgements.mlp import clip, clipped
from npu_autopatch.analysis.result import Judgement

_MOE = "the kernel moe"
_SORTED_AS_FP32 = 16_777_215


def dispatch(case: Case) -> Judgement:
    """The tokens sorted to their experts."""
    if case.fused:
        return fused(case, _MOE, _sort_and_count(case))
    why = "A loop picks the rows of one expert at a time; a sort brings all of them to all experts in one launch."
    return tried(case, why, _permute(case), _sort_and_count(case))


def experts(case: Case) -> Judgement:
    """The products of the experts and the activation between them."""
    activation = (clip(case),) if case.flag("interleaved") or clipped(case) else ()
    if case.fused:
        return fused(case, _MOE, *activation, *((_accumulate(case),) if case.training else ()))
    return tried(case, "All experts of a layer fit into one launch a product.", _grouped(case), *activation)


def combine(case: Case) -> Judgement:
    """The rows of the experts brought back, weighted and summed."""
    if case.fused:
        return fused(case, _MOE, _with_shared(case))
    return tried(
        case, "Weighting, bringing back and summing fit into one launch.", _unpermute(case), _with_shared(case)
    )


def shared_gate(case: Case) -> Judgement:
    """The shared expert times the sigmoid of a gate."""
    why = (
        "No op multiplies by a sigmoid, but the product and the sum with the routed experts can go into the "
        "combination, whose weights are free."
    )
    return tried(case, why, _as_one_more_slot(case))


def _permute(case: Case) -> Attempt:
    top_k = case.number("top_k")
    return Attempt(
        "npu_moe_token_permute",
        f"The ids as [tokens, {case.told('top_k')}]; tokens of an expert elsewhere get an id past the last, and sort "
        "to the end.",
        f"On tokens {case.shape('tokens', 'width')} {case.dtype} and ids of {case.counted('experts')}: rows and order "
        f"against argsort(ids, stable=True); its order is the inverse of argsort's. {TIMED}",
        limits=(at_most(top_k, 512, "a number of experts a token"), _sortable(case)),
    )


def _sort_and_count(case: Case) -> Attempt:
    return Attempt(
        "npu_moe_init_routing_v2",
        f"ids int32; expert_num={case.told('experts')}, quant_mode=-1, expert_tokens_num_type=1 and "
        "expert_tokens_num_flag=True: the counts come with the rows, as int64 that npu_grouped_matmul reads with "
        "group_list_type=1. Sorting and counting are one launch; now the counting is one or two of its own.",
        f"On tokens {case.shape('tokens', 'width')} {case.dtype}, {case.told('top_k')} of {case.counted('experts')}: "
        f"rows, order and counts against npu_moe_token_permute and bincount. {TIMED}",
        "row_idx_type 0 gives the order by gather with -1 for what is dropped, 1 by scatter with an uninitialised "
        "tail.",
        limits=(at_most(case.number("experts"), 10240, "a number of experts"),),
        gradient="npu_moe_token_permute_grad with its order (row_idx_type=0): each token's rows gathered and summed",
        source=documentation("npu_moe_init_routing_v2"),
    )


def _grouped(case: Case) -> Attempt:
    count = case.number("experts")
    calls = f" In {-(-count // 1024)} calls, of at most 1024 experts each." if count and count > 1024 else ""
    bias = " Biases as fp32 where the rows are bf16." if case.flag("interleaved") else ""
    gate = {"silu": " npu_swiglu between the two products.", "gelu": " npu_geglu between the two products."}
    between = gate.get(case.word("activation").lower()[:4], "")
    return Attempt(
        "npu_grouped_matmul",
        "The rows sorted by expert, the weights stacked as [experts, in, out] (a transposed view is read without a "
        "copy), the counts as int64 on the device: group_type=0, split_item=2, "
        f"group_list_type=1.{between}{bias}{calls}",
        f"On {case.counted('rows')}, {case.counted('experts')} of {case.told('width')} to {case.told('intermediate')} "
        f"{case.dtype}, some of them without a row: npu_grouped_matmul([x], [w], group_list=counts, split_item=2, "
        "group_type=0, group_list_type=1)[0] against a loop of "
        f"products{', and both gradients' if case.training else ''}. {TIMED}",
        "At most 1024 experts a call with stacked weights, 128 with listed ones. Rows past the last group are "
        "uninitialised memory. Train 2025-07 refuses the gradient of the weights.",
        limits=(
            below(case.number("width"), 65536, "a width"),
            below(case.number("intermediate"), 65536, "an intermediate width"),
        ),
        gradient="dx is the product with the transposed weights, dw the one with group_type=2 of x.t() and dy "
        "(split_item=3), left out for frozen weights",
    )


def _accumulate(case: Case) -> Attempt:
    return Attempt(
        "npu_grouped_matmul_add_",
        "An fp32 buffer of the weights' gradients that lives across steps of accumulation, as [experts * in, out], "
        "and running sums instead of counts: the gradient is added where it is, in fp32, without a bf16 gradient and "
        "an addition.",
        f"{case.counted('experts')} of {case.told('width')} to {case.told('intermediate')}, {case.counted('rows')}, "
        f"two steps: the buffer against fp64 and against two bf16 gradients added. {TIMED}",
        "At most 1024 groups. Only for optimisers that read such a buffer.",
        gradient="",
    )


def _unpermute(case: Case) -> Attempt:
    return Attempt(
        "npu_moe_token_unpermute",
        f"The order as npu_moe_token_permute gave it (int32), the weights as probs [tokens, {case.told('top_k')}].",
        f"On rows {case.shape('rows', 'width')} {case.dtype}: the op against index_add of the weighted rows and fp64"
        f"{', with both gradients' if case.training else ''}. {TIMED}",
        "Before train 2026-04 cast probs to the rows' dtype: their gradient is written wrongly else.",
        limits=(at_most(case.number("top_k"), 512, "a number of experts a token"),),
    )


def _with_shared(case: Case) -> Attempt:
    return Attempt(
        "npu_moe_finalize_routing",
        "The shared expert's result as skip1 and the residual stream as skip2, so that both additions go into the "
        "same launch; drop_pad_mode=2 for orders row by row; scales in the rows' dtype.",
        f"On rows {case.shape('rows', 'width')} {case.dtype} of {case.told('top_k')} experts a token: the op with "
        f"both skips against npu_moe_token_unpermute and two additions, both against fp64. {TIMED} One launch of "
        "three stays.",
        "Its documentation wants skip1 without skip2 never, and names drop_pad_mode 0 only (slots column by column): "
        "if 2 is refused, transpose the order. It gains only with something to add.",
        gradient="npu_moe_token_unpermute_grad for rows and weights; the gradient of each skip is the result's own",
    )


def _as_one_more_slot(case: Case) -> Attempt:
    return Attempt(
        "npu_moe_token_unpermute",
        "The shared expert stacked behind the routed ones and chosen by every token: its sigmoid is one more column "
        "of probs, and weighting and adding it cost no launch. Its linear and its sigmoid stay.",
        "One layer: the stacked experts with one more slot against routed plus sigmoid(gate) * shared, results in "
        "fp64. Time the whole block, as one more group takes the place of two dense products.",
        "Only where the shared expert is as wide as a routed one, so that its weights can be stacked.",
    )


def _sortable(case: Case) -> Limit:
    tokens, top_k = case.number("tokens"), case.number("top_k")
    slots = None if tokens is None or top_k is None else tokens * top_k
    return below(slots, _SORTED_AS_FP32, "a number of ids")
