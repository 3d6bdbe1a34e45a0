"""Positions: their tables, the masks, and the rotation of queries and keys."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    HALVES,
    TIMED,
    Attempt,
    Limit,
    at_most,
    documentation,
    exactly,
    filled,
    fused,
    multiple,
    no_op,
    one_of,
    tried,
)
from npu_autopatch.analysis.result import Judgement

_REVERSED = "a rotation's gradient is the rotation by -sin: call the op on dq and dk with sin negated"


def masks_and_positions(_: Case) -> Judgement:
    """The tables of cos and sin, and the mask, once a forward."""
    return no_op(
        "It runs once a forward, not once a layer, and no op makes tables of cos and sin or masks. npu_mrope comes "
        "nearest: it looks positions up in a table made once. npu_fusion_attention needs no mask of the sequence's "
        "size for causal attention (sparse_mode 2 or 3)."
    )


def rope(case: Case) -> Judgement:
    """The rotation of q and k."""
    further = [_lookup(case)]
    if case.flag("interleaved"):
        further.insert(0, _deepseek(case))
    else:
        further.insert(0, _in_place(case))
    if case.flag("normed") and not case.flag("interleaved") and not case.training:
        further.append(_into_cache(case))
    if case.fused:
        return fused(case, "the kernel rope, q and k in a launch each", *further)
    return tried(case, "npu_rotary_mul rotates q and k, each in one launch.", _each(case), *further)


def _each(case: Case) -> Attempt:
    rotated = case.number("rotated") or case.number("head_dim")
    mode = "interleave" if case.flag("interleaved") else "half"
    part = " The rotated part sliced out of the head and put back." if case.flag("partial") else ""
    one_table = " Interleaved, it takes one table for the whole batch, and batch times heads below 1000."
    return Attempt(
        "npu_rotary_mul",
        f"cos and sin of the whole rotated width ({case.told('rotated')}), in the dtype of q, detached.{part}",
        f"On q {case.shape('batch', 'heads', 'sequence', 'rotated')} {case.dtype}: npu_rotary_mul(q, cos, sin, "
        f"'{mode}') against the model's own function and fp64, with cos and sin whose halves differ. {TIMED}",
        f"Batch and heads below 1000; 896 wide and more on Ascend 950 only.{one_table if mode == 'interleave' else ''}",
        limits=(at_most(rotated, 1024, "a rotated width"), _even(rotated)),
    )


def _in_place(case: Case) -> Attempt:
    rotated = case.number("rotated") or case.number("head_dim")
    part = " The rotated part of each head as a tensor of its own." if case.flag("partial") else ""
    return Attempt(
        "npu_apply_rotary_pos_emb",
        "q and k as [batch, tokens, heads, width] before their transposition, cos and sin as [batch, tokens, 1, width] "
        f"of their dtype; layout='BSND' by keyword. It writes into q and k: nobody may need them unrotated.{part}",
        f"On q {case.shape('batch', 'sequence', 'heads', 'rotated')} and k {case.dtype}: the op on clones against two "
        f"npu_rotary_mul; compare the clones too, which must have changed. {TIMED} One launch of two goes.",
        limits=(one_of(rotated, (64, 128), "rotated columns"),),
        gradient=_REVERSED + ", on clones, as it writes in place",
    )


def _deepseek(case: Case) -> Attempt:
    return Attempt(
        "npu_interleave_rope",
        "The rotary part as a contiguous [batch, heads, tokens, 64] of its own, cos and sin as [batch, 1, tokens, 64].",
        f"On q {case.shape('batch', 'heads', 'sequence', 64)} {case.dtype}: npu_interleave_rope(q, cos, sin) against "
        f"the model's own rotation and fp64. {TIMED}",
        "Its result is sorted into halves (even columns, then odd ones): right where the model's own rotation leaves "
        "them so, or where only products of q and k are taken of it.",
        limits=(filled(case.number("rotated"), 64, "rotated width"),),
        dtypes=HALVES,
        gradient="rotate the gradient's halves by -sin with npu_rotary_mul, and put them back in turns",
    )


def _lookup(case: Case) -> Attempt:
    mode, rotated = (
        "interleave" if case.flag("interleaved") else "half",
        case.number("rotated") or case.number("head_dim"),
    )
    part = (
        " It rotates the first columns of each head by itself: no slices where the model rotates those."
        if case.flag("partial")
        else ""
    )
    turns = "Its result stays in turns. " if case.flag("interleaved") else ""
    return Attempt(
        "npu_mrope",
        "q and k as [tokens, heads * width]; a table [positions, rotated width] of cos and sin made once, instead of "
        f"cos and sin for every forward; positions as int64.{part}",
        f"On {case.counted('tokens')}, heads of {case.told('head_dim')}: npu_mrope(positions, q, k, table, "
        f"head_size={case.told('head_dim')}, rotary_mode='{mode}') against the model's tables and rotation. {TIMED} "
        "q, k and the lookup go into one launch.",
        f"{turns}How cos and sin stand in the table, and that positions of rank 1 rotate plainly, is to be tried "
        "first. Positions must lie within the table: it does not check.",
        limits=(multiple(rotated, 16 if case.dtype == "float32" else 32, "a rotated width"),),
        gradient=_REVERSED,
        source=documentation("npu_mrope"),
    )


def _into_cache(case: Case) -> Attempt:
    return Attempt(
        "npu_qkv_rms_norm_rope_cache",
        "One product of all three projections, its rows as [tokens, heads * 128]; paged caches in the layout PA_NZ, "
        "[blocks, heads * 8, block size, 16], and the slot of each token; q_out allocated. Attention then reads pages.",
        f"On {case.counted('tokens')} {case.dtype} and caches of 16 blocks of 128: q_out and both caches against the "
        f"model's own norms, rotation and index_copy_. {TIMED} It takes the place of the norms of q and k, of both "
        "rotations and of the writing.",
        "It is in no documentation of the wheel. Whether its norm rounds before the product with gamma is to be seen.",
        limits=(
            exactly(case.number("head_dim"), 128, "a head width of"),
            exactly(case.number("rotated"), 128, "a rotated width of"),
        ),
        dtypes=HALVES,
    )


def _even(width: int | None) -> Limit:
    return Limit(
        "an even rotated width", "" if width is None else str(width), None if width is None else width % 2 == 0
    )
