"""The core of attention: scores, softmax, and the sum over values."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    FLOATS,
    HALVES,
    TIMED,
    Attempt,
    Limit,
    at_most,
    by_torch_npu,
    divides,
    documentation,
    exactly,
    filled,
    multiple,
    tried,
)
from npu_autopatch.analysis.result import Judgement

_CONDITIONS = "conditions of torch_npu's scaled_dot_product_attention (torch_npu 2.13, train 2026-10)"


def core(case: Case) -> Judgement:
    """Attention between the projections."""
    further = _further(case)
    if case.word("implementation") != "sdpa":
        eager = (
            "The scores are written out whole, with a softmax between two products; a fused attention never holds them."
        )
        return tried(case, eager, _training_kernel(case), *further)
    conditions = _conditions(case)
    broken = [f"{limit.takes}, and here it is {limit.has}" for limit in conditions if limit.kept is False]
    if broken:
        why = f"torch_npu fuses scaled_dot_product_attention only with {'; '.join(broken)}."
        if case.word("mask") == "float":
            why += " On an NPU transformers makes a bool mask of it, which masks every key with a bias."
        return tried(case, why, _training_kernel(case), *further)
    open_ones = [limit.takes for limit in conditions if limit.kept is None]
    still = f", provided {' and '.join(open_ones)}" if open_ones else ""
    narrow = (
        f" The conditions say nothing of values as wide as {case.number('v_dim')} with keys of "
        f"{case.number('qk_dim')}: see in a profile that one kernel runs."
        if _narrow(case)
        else ""
    )
    dense = " It computes all scores, those of the keys not chosen too." if case.flag("sparse") else ""
    copies = (
        f" transformers copies the {case.number('kv_heads')} key heads to {case.number('heads')} before, as there is "
        "a mask."
        if _repeated(case)
        else ""
    )
    why = f"torch_npu runs scaled_dot_product_attention as one kernel{still}.{narrow}{dense}{copies}"
    if case.number("window") or _repeated(case):
        further = (*further, _training_kernel(case))
    return by_torch_npu(case, why, _CONDITIONS, *further)


def _conditions(case: Case) -> tuple[Limit, ...]:
    mask, dtype = case.word("mask"), case.word("dtype") and case.dtype
    return (
        Limit("fp16, bf16 or fp32", dtype, dtype in FLOATS if dtype else None),
        Limit("a bool mask or none", f"a {mask} one", mask in ("none", "bool") if mask else None),
        at_most(case.number("qk_dim"), 512, "a head width"),
        at_most(case.number("heads"), 2048, "a number of heads"),
        _shared(case),
    )


def _shared(case: Case) -> Limit:
    return divides(case.number("kv_heads"), case.number("heads"), "query heads in multiples of the key heads")


def _further(case: Case) -> tuple[Attempt, ...]:
    attempts = []
    if case.flag("sparse"):
        attempts.append(_chosen_keys(case))
    if case.decoding:
        attempts.append(_inference_kernel(case))
    elif case.flag("latent"):
        attempts.append(_rotary_part_apart(case))
    return tuple(attempts)


def _training_kernel(case: Case) -> Attempt:
    shape = case.shape("batch", "heads", "queries", "qk_dim")
    sink = (
        " The sinks as sink, fp32 [heads]: from train 2026-01 on, with a CANN that has version 3 of the kernel; from "
        "then on they have a gradient."
        if case.flag("sinks")
        else ""
    )
    window = None if case.decoding else case.number("window")
    band = (
        f" Where each key is one token's, the window of {window} as sparse_mode=4 with pre_tockens={window - 1}, "
        "next_tockens=0 and the mask of 2048 x 2048, so that what lies outside is not computed."
        if window
        else ""
    )
    return Attempt(
        "npu_fusion_attention",
        "q, k and v as they lie (input_layout='BNSD'), key heads not repeated; "
        f"{_mask(case)}{sink}{band}{_parts(case)} In transformers an attention function of that name, chosen by "
        "attn_implementation.",
        f"q {shape}, k {case.shape('batch', 'kv_heads', 'keys', 'qk_dim')} and v {case.dtype}, random with a few rows "
        f"wholly masked: npu_fusion_attention(q, k, v, {case.told('heads')}, 'BNSD', ...)[0] against the model's own "
        f"attention, both against fp64{', and dq, dk, dv likewise' if case.training else ''}. {TIMED} The scores "
        f"alone are {case.shape('batch', 'heads', 'queries', 'keys')} less in memory.",
        "That values may be of another width than keys is to be tried." if _narrow(case) else "",
        limits=(at_most(_widest(case), 768, "a head width"), _shared(case)),
    )


def _inference_kernel(case: Case) -> Attempt:
    sink = " The sinks as learnable_sink." if case.flag("sinks") else ""
    latent = (
        " MLA's cache is read as it is: the latent as key and value, query_rope and key_rope apart, with kv_b_proj "
        "absorbed into the query and the output; spares expanding the keys of all past tokens."
        if case.flag("latent")
        else ""
    )
    width = None if case.flag("latent") else _widest(case)
    return Attempt(
        "npu_fused_infer_attention_score_v2",
        f"input_layout='BNSD', num_query_heads={case.told('heads')}, num_key_value_heads={case.told('kv_heads')}, a "
        f"cache of fixed size with its lengths as actual_seq_kvlen.{sink}{latent}{_parts(case)}",
        f"q {case.shape('batch', 'heads', 1, 'qk_dim')} against {case.counted('keys')} and against 4096 {case.dtype}: "
        f"the op against what runs now and fp64. {TIMED} Then the same with a cache of twice the length, half filled.",
        "Leave the mask out for one query: a bool mask [1, 1, 1, S] has been seen to be ignored past 512 keys. Before "
        "train 2025-10 it is npu_fused_infer_attention_score, without sinks.",
        limits=(at_most(width, 512, "a head width"), multiple(width, 16, "a head width", fills=True), _shared(case)),
        dtypes=HALVES,
    )


def _rotary_part_apart(case: Case) -> Attempt:
    width = case.told("qk_dim")
    return Attempt(
        "npu_fusion_attention_v2",
        "q and k without their rotary part, and that as query_rope and key_rope: no concatenation, no copy of the one "
        "rotary key to every head. Rows of all sequences end to end (input_layout='TND') with their running lengths "
        "on the host, and a mask.",
        f"{case.counted('heads')} of {width}, the rotary part of them apart, {case.counted('queries')} in bf16: the "
        f"op against the concatenated q and k in npu_fusion_attention, results and gradients. {TIMED}",
        "The rotary part is taken in layout TND only, with bf16, a mask and no dropout, a multiple of 8 wide and no "
        "wider than the rest. Whether one rotary key may serve all heads is to be tried.",
        limits=(at_most(_widest(case), 768, "a head width"),),
        dtypes=("bfloat16",),
        source=documentation("npu_fusion_attention_v2"),
    )


def _chosen_keys(case: Case) -> Attempt:
    top_k, keys = case.told("index_topk"), case.counted("keys")
    latent = case.flag("latent")
    absorbed = (
        "kv_b_proj absorbed into the query and the output, so that key and value are the one latent of 512 and the "
        "rotary part of 64 lies apart"
        if latent
        else "the heads of 512 as query, key and value, with rotary parts of zeros, as those of the model lie within"
    )
    window = case.number("window")
    nearest = (
        f" The {window} keys of the window among the chosen ones, and sparse_mode=0, as keys of several tokens stand "
        "behind those of one."
        if window
        else " sparse_mode=3."
    )
    gradient = " return_softmax_lse=True for the gradient." if case.training else ""
    sinks = (
        " Sinks (from train 2026-10) are not taken on Atlas A2 and A3: Ascend 950 only." if case.flag("sinks") else ""
    )
    limits = (
        (filled(case.number("kv_rank"), 512, "latent width"), filled(case.number("rope_dim"), 64, "rotary width"))
        if latent
        else (filled(_widest(case), 512, "head width"), exactly(case.number("kv_heads"), 1, "a number of key heads of"))
    )
    return Attempt(
        "npu_sparse_flash_attention",
        f"attention_mode=2: {absorbed}. Layout BSND; the indexer's choice as int32 [batch, queries, 1, {top_k}], -1 "
        f"behind the valid ones; no mask of {keys} is made.{nearest}{gradient}{_power_of_two(case.number('heads'))}",
        f"One sequence of {keys} and one of 16384, {case.counted('heads')}, {top_k} keys chosen at random below each "
        f"query: the op against masked attention over all keys in fp64{', with gradients' if case.training else ''}. "
        f"{TIMED} Find the length from which it wins.",
        f"It can win only where there are more keys than the {top_k} chosen (here {keys}).{sinks}",
        limits=limits,
        dtypes=HALVES,
    )


def _mask(case: Case) -> str:
    if case.word("mask") == "none":
        return "no mask, or for causal attention sparse_mode=3 with the triangle of 2048 x 2048."
    if case.word("mask") == "float":
        return (
            "the mask as atten_mask = mask < 0 (True is masked) if it holds only 0 and minus infinity, as pse divided "
            "by scale if it holds real biases."
        )
    return "the mask negated as atten_mask (True is masked, the opposite of torch's)."


def _parts(case: Case) -> str:
    heads = case.number("heads")
    return f" In {-(-heads // 256)} calls, of at most 256 heads each." if heads and heads > 256 else ""


def _power_of_two(heads: int | None) -> str:
    if heads is None or (heads <= 128 and heads & (heads - 1) == 0):
        return ""
    return f" Query heads in a power of two of at most 128: the {heads} filled up with zeros, or in parts."


def _widest(case: Case) -> int | None:
    widths = [width for width in (case.number("qk_dim"), case.number("v_dim")) if width is not None]
    return max(widths, default=None)


def _repeated(case: Case) -> bool:
    heads, kv_heads = case.number("heads"), case.number("kv_heads")
    return case.word("mask") == "bool" and heads is not None and kv_heads is not None and kv_heads < heads


def _narrow(case: Case) -> bool:
    keys, values = case.number("qk_dim"), case.number("v_dim")
    return keys is not None and values is not None and keys != values
