"""Hyper-connections: several residual streams, mixed before and after each block."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import HALVES, TIMED, Attempt, Limit, multiple, one_of, tried
from npu_autopatch.analysis.result import Judgement

_950 = "It runs on Ascend 950 only."


def hyper_connections(case: Case) -> Judgement:
    """The entry, the mixing matrix and the exit of a hyper-connection."""
    why = "Dozens of small launches, twice a layer; three ops do the entry, the doubly stochastic matrix and the exit."
    return tried(case, why, _entry(case), _matrix(case), _exit(case))


def _entry(case: Case) -> Attempt:
    n = case.told("streams")
    return Attempt(
        "npu_mhc_pre",
        f"x [batch, tokens, {n}, width] in a half type; phi, alpha and bias in fp32 are the model's fn, scale and "
        f"base; its norm has no weight, so no gamma.{_flag(case)}",
        f"On x {case.shape('batch', 'sequence', 'streams', 'width')} bf16: h_in, h_post and h_res against the model's "
        f"collapsed, post and comb (before its softmax). {TIMED}",
        f"{_950} Whether h_post carries the factor 2 of the model's, and where eps is added, is to be compared.",
        limits=_limits(case),
        dtypes=HALVES,
    )


def _matrix(case: Case) -> Attempt:
    n = case.told("streams")
    return Attempt(
        "npu_mhc_sinkhorn",
        f"h_res of npu_mhc_pre, fp32 [batch, tokens, {n}, {n}], num_iters and eps as the config's.{_flag(case)}",
        f"On {case.shape('batch', 'sequence', 'streams', 'streams')} fp32: against the model's softmax and its rounds "
        f"of normalising columns and rows. {TIMED} Twenty rounds are more than a hundred launches now.",
        f"{_950} Whether it begins with the softmax, and with rows or columns, is to be compared; 1 to 100 rounds.",
        limits=(_streams(case),),
    )


def _exit(case: Case) -> Attempt:
    return Attempt(
        "npu_mhc_post",
        "x and the block's result in a half type, the matrix of npu_mhc_sinkhorn and h_post in fp32: it applies the "
        "transposed matrix, as the model does.",
        f"On x {case.shape('batch', 'sequence', 'streams', 'width')} bf16: against post * result + comb.T @ x, both "
        f"against fp64. {TIMED}",
        f"{_950} The model rounds the weights to the rows' dtype first, the op keeps them in fp32.",
        limits=_limits(case),
        dtypes=HALVES,
    )


def _limits(case: Case) -> tuple[Limit, ...]:
    return (_streams(case), multiple(case.number("width"), 16, "a width"))


def _streams(case: Case) -> Limit:
    return one_of(case.number("streams"), (4, 6, 8), "streams")


def _flag(case: Case) -> str:
    return " out_flag=1 for the gradient." if case.training else ""
