"""The output head and the loss."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    HALVES,
    TIMED,
    Attempt,
    at_least,
    at_most,
    by_torch_npu,
    contract,
    no_op,
    tried,
)
from npu_autopatch.analysis.result import Judgement


def output_head(case: Case) -> Judgement:
    """The product that gives the logits."""
    if case.flag("capped") and not case.training:
        return no_op(
            "The product is one kernel already; the cap of the logits is three more (a division, tanh, a product), and "
            "no op caps them."
        )
    further = (_without_logits(case),) if case.training and not case.flag("capped") else ()
    return by_torch_npu(case, "One product is one kernel already.", "aten::linear of torch_npu", *further)


def loss(case: Case) -> Judgement:
    """Cross entropy of the logits."""
    if not case.training:
        return no_op("There is no loss in inference; npu_cross_entropy_loss is the op for it in training.")
    return tried(
        case,
        "The log of the softmax and the choice of the targets fit into one launch.",
        _in_one(case),
        *(() if case.flag("capped") else (_without_logits(case),)),  # it leaves no place between head and loss
    )


def _in_one(case: Case) -> Attempt:
    upcast = (
        " The logits are cast to fp32 before, and must stay so: the loss has their dtype." if case.flag("fp32") else ""
    )
    return Attempt(
        "npu_cross_entropy_loss",
        "Rows whose label is -100 taken out before (its documentation says that a negative ignore_index ignores "
        f"nothing), int64 labels; the sum or the mean of the rest taken as the model does.{upcast}",
        f"On logits {case.shape('rows', 'vocabulary')}, a tenth of the labels -100: "
        "npu_cross_entropy_loss(logits[kept], labels[kept])[0] and its gradient against torch's cross_entropy in "
        f"fp64. {TIMED} Measure the memory too: the log of the probabilities, of the logits' size, is kept.",
        "With a gradient, the mean takes all other arguments at their defaults only; the mean has shape [1].",
        limits=(at_most(case.number("rows"), 200_000, "a number of rows"),),
    )


def _without_logits(case: Case) -> Attempt:
    rows = "tokens" if case.number("rows") is None else "rows"
    third = "npu_fused_linear_cross_entropy_loss_with_max_sum_backward"
    return Attempt(
        "npu_fused_linear_online_max_sum",
        "An autograd.Function around head and loss together: this op, npu_fused_cross_entropy_loss_with_max_sum, and "
        f"in the backward {third} (train 2026-10). The logits {case.shape(rows, 'vocabulary')} are never kept, so a "
        "model that returns them keeps its own path. Rows whose label is -100 taken out before.",
        f"On rows {case.shape(rows, 'width')} bf16 and a weight {case.shape('vocabulary', 'width')}, "
        "return_logits=False: loss, dx and dweight against the head and torch's cross_entropy in fp64; then peak "
        f"memory and time. {TIMED}",
        "No Meta kernel: it cannot be traced. Half types only.",
        limits=(
            at_most(case.number("width"), 65534, "a width"),
            at_least(case.number("vocabulary"), 128, "a vocabulary, in its backward,"),
        ),
        dtypes=HALVES,
        gradient=f"{third} gives dx and dweight from the maxima and sums",
        source=contract("npu_fused_linear_online_max_sum", third),
    )
