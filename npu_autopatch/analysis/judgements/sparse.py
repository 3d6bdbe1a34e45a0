"""What chooses or pools the keys before attention: the indexer and the compressor of DeepSeek."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import HALVES, TIMED, Attempt, Limit, at_most, filled, no_op, tried
from npu_autopatch.analysis.result import Judgement


def indexer(case: Case) -> Judgement:
    """The choice of the keys of each query by small heads."""
    attempts = [_lightning(case)]
    if case.training:
        attempts.append(_with_loss(case))
    why = "All scores are written out in fp32 first; npu_lightning_indexer gives the choice alone."
    return tried(case, why, *attempts)


def compressor(_: Case) -> Judgement:
    """Windows of tokens pooled into one key each."""
    return no_op(
        "A softmax over each window and the weighted sum; no op pools keys so. What comes nearest serves its parts: "
        "npu_rms_norm for the norm and npu_rotary_mul for the rotation of the pooled keys."
    )


def _lightning(case: Case) -> Attempt:
    top_k, heads = case.number("top_k"), case.number("heads")
    keys = case.counted("sequence", "keys")
    return Attempt(
        "npu_lightning_indexer",
        f"query [batch, queries, {case.told('heads')}, 128], key [batch, keys, 1, 128] and weights [batch, queries, "
        f"{case.told('heads')}] contiguous and of one dtype, rotated before, the scales multiplied into the weights; "
        f"sparse_count={case.told('top_k')}, sparse_mode=3 for causal attention. The choice as int32 with -1 behind "
        "the valid ones, as npu_sparse_flash_attention reads it.",
        f"Sequences of {keys} and of 16384: the sets of indices against topk of the fp32 scores of the model's own "
        f"code, counted as a share, since ties and bf16 scores differ. {TIMED}",
        "The model scores in fp32 and chooses without a gradient; the op takes half types. Where keys are pooled "
        "(DeepSeek V4), sparse_mode=3 is not their causality: paged keys with a length of their own for each group of "
        "queries are, or the decoding alone. One key head.",
        limits=(
            filled(case.number("head_dim"), 128, "head width"),
            at_most(heads, 64, "a number of heads"),
            Limit(
                "a choice of 1 to 2048 keys, or of 3072 to 8192 in steps of 1024",
                "" if top_k is None else str(top_k),
                None if top_k is None else _choice(top_k),
            ),
        ),
        dtypes=HALVES,
        gradient="",
    )


def _with_loss(case: Case) -> Attempt:
    return Attempt(
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "Only to train the indexer: an autograd.Function whose backward it is, with the softmax's maxima and sums of "
        "the attention. It gives the loss and the gradients of the indexer's query, key and weights.",
        f"{case.counted('heads', 'index heads')}, 64 attention heads of 512 + 64, 128 tokens, {case.told('top_k')} "
        "chosen: loss and gradients against the divergence computed in fp64 by torch.",
        "transformers gives the indexer no loss: a training recipe must. 32, 64 or 128 attention heads, a latent of "
        "512, at most 8192 queries.",
        dtypes=HALVES,
        gradient="",
    )


def _choice(top_k: int) -> bool:
    return 1 <= top_k <= 2048 or top_k in range(3072, 8193, 1024)
