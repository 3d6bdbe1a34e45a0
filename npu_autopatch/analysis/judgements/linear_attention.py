"""Linear attention: the delta rule with its state, and the short convolution before it."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    HALVES,
    TIMED,
    Attempt,
    at_most,
    documentation,
    filled,
    multiple,
    no_op,
    tried,
)
from npu_autopatch.analysis.result import Judgement

_950 = "It runs on Ascend 950 only."


def linear_attention(case: Case) -> Judgement:
    """A state carried along the sequence."""
    if case.flag("gated_delta") is False:
        return no_op(
            "No op carries a state of this kind. npu_chunk_gated_delta_rule comes nearest, for the gated delta rule "
            "with one decay a head."
        )
    if case.decoding:
        return tried(case, "One step of the gated delta rule fits into one launch.", _step(case))
    return tried(case, "The gated delta rule over the whole sequence fits into one launch.", _chunks(case))


def convolution(case: Case) -> Judgement:
    """A causal convolution of each channel by itself."""
    attempts = (_masked(case),) if case.training else (_cached(case), _masked(case))
    if case.decoding:
        attempts = (_cached(case),)
    why = "The convolution is a kernel of torch's own; padding, cache and activation are launches around it."
    return tried(case, why, *attempts)


def _chunks(case: Case) -> Attempt:
    heads, keys, values = case.number("heads"), case.number("key_dim"), case.number("value_dim")
    return Attempt(
        "npu_chunk_gated_delta_rule",
        "q, k [tokens, key heads, width] and v, beta bf16 end to end with actual_seq_lengths as int32, q and k "
        "normalised before (eps as the model's), g fp32; the state as bf16 [sequences, heads, value width, key "
        "width], transposed to transformers' fp32 one.",
        f"{case.counted('tokens')}, {case.counted('heads')} of {case.told('key_dim')} and {case.told('value_dim')}: "
        f"result and last state against the model's own chunks in fp32 and fp64. {TIMED} Then 4096 tokens, and g of a "
        "real checkpoint.",
        "g must lie in [-1, 0]: print its minimum on real weights first, as decays below -1 are common. The bf16 "
        "state is handed on to decoding: measure its drift. The wheel's documentation asks for widths of exactly 128.",
        limits=(
            filled(keys, 128, "key width"),
            filled(values, 128, "value width"),
            at_most(heads, 64, "a number of heads"),
        ),
        dtypes=("bfloat16",),
        gradient="none is wired; in the backward run the model's own chunked code again from q, k, v, g and beta and "
        "differentiate that: the forward is won, the backward costs what it costs now and one forward more",
    )


def _step(case: Case) -> Attempt:
    heads = case.number("heads")
    return Attempt(
        "npu_recurrent_gated_delta_rule",
        "q, k, v, beta bf16 [tokens, heads, width], q and k normalised before, g fp32; the state as bf16 [slots, "
        "heads, value width, key width], transposed to transformers' fp32 one and updated in place, ssm_state_indices "
        "naming the slot of each token.",
        f"Batch {case.told('batch')}, one token, {case.counted('heads')} of {case.told('key_dim')} and "
        f"{case.told('value_dim')}: result and state against the model's own step in fp32, and the drift over 1000 "
        f"steps. {TIMED}",
        "At most 8 tokens a sequence. The state is bf16 where the model keeps fp32.",
        limits=(
            at_most(case.number("key_dim"), 256, "a key width"),
            at_most(case.number("value_dim"), 256, "a value width"),
            at_most(heads, 256, "a number of heads"),
        ),
        dtypes=("bfloat16",),
        source=documentation("npu_recurrent_gated_delta_rule"),
    )


def _cached(case: Case) -> Attempt:
    return Attempt(
        "npu_fused_causal_conv1d",
        "Rows as [batch, tokens, channels], not [batch, channels, tokens]; the weight as [3, channels]; the past "
        "columns as conv_states [slots, 2, channels], updated in place. The activation after it as a launch of its "
        "own.",
        f"On {case.shape('batch', 'sequence', 'channels')} {case.dtype}: result and states against conv1d with its "
        f"padding. {TIMED}",
        f"{_950} bias and activation are documented as not supported yet.",
        limits=(
            filled(case.number("width"), 3, "width"),
            multiple(case.number("channels"), 128, "channels", fills=True),
        ),
        dtypes=HALVES,
    )


def _masked(case: Case) -> Attempt:
    return Attempt(
        "npu_masked_causal_conv1d",
        "Rows as contiguous [tokens, batch, channels], the weight as [3, channels] of the same dtype; a mask of "
        "padding instead of the product before it.",
        f"On {case.shape('sequence', 'batch', 'channels')} {case.dtype}: the result"
        f"{' and both gradients' if case.training else ''} against conv1d with its padding. {TIMED}",
        f"{_950} It has no bias and no activation.",
        limits=(
            filled(case.number("width"), 3, "width"),
            multiple(case.number("channels"), 64, "channels", fills=True),
        ),
        dtypes=HALVES,
    )
