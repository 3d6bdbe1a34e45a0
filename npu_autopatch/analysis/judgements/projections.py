"""Lookups and products: the embedding, the projections around attention, and the gate on its output."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    TIMED,
    Attempt,
    at_most,
    below,
    by_torch_npu,
    contract,
    documentation,
    exactly,
    no_op,
    tried,
)
from npu_autopatch.analysis.result import Judgement


def embedding(case: Case) -> Judgement:
    """The rows of the tokens, and their projection to the width of the layers where that is another."""
    if case.flag("projected"):
        return by_torch_npu(case, "One product is one kernel already.", "aten::linear of torch_npu")
    return by_torch_npu(case, "One lookup is one kernel already, forward and backward.", "aten::embedding of torch_npu")


def before_attention(case: Case) -> Judgement:
    """The projections that attention reads."""
    further = () if case.training or not case.flag("latent") else (_prolog(case),)
    if case.number("projections") == 1:
        if further:
            return tried(case, "One product here, and MLA's norms, rotation and cache around it.", *further)
        return by_torch_npu(case, "One product is one kernel already.", "aten::linear of torch_npu")
    count = case.number("projections") or "Several"
    why = f"{count} products, a kernel each; those of the same rows fit into one launch of npu_grouped_matmul."
    return tried(case, why, *further, _together(case))


def output_projection(case: Case) -> Judgement:
    """The projection of attention's result."""
    if groups := case.number("groups"):
        return tried(
            case, f"A product for each of {groups} groups of heads, between two transpositions.", _batched(case)
        )
    return by_torch_npu(case, "One product is one kernel already.", "aten::linear of torch_npu")


def output_gate(case: Case) -> Judgement:
    """Attention's result times the sigmoid of a gate."""
    return no_op(
        "A sigmoid and a product, two launches; no op multiplies by a sigmoid. npu_swiglu comes nearest, and "
        "multiplies by silu(gate), which is gate times as much.",
        contract("npu_swiglu"),
    )


def _together(case: Case) -> Attempt:
    widths = case.facts.get("widths") or ()
    named = ", ".join(map(str, widths)) or "each projection's own"
    latent = " Of MLA's projections only those that read the same rows go together." if case.flag("latent") else ""
    return Attempt(
        "npu_grouped_matmul",
        "The same rows once for each projection as a list, and weight.t() of each (views, no copies): group_type=-1, "
        f"split_item=0, no group_list. A bias as fp32 where the rows are bf16.{latent} The weights are read, not the "
        "modules called: adapters and quantised layers need the original.",
        f"On rows of {case.shape('tokens', 'width')} {case.dtype} and weights of {named} columns: "
        "npu_grouped_matmul([x, x, ...], [w.t() for w in weights], group_type=-1, split_item=0) against one linear "
        f"for each; equal within an ulp. {TIMED} It can win where the products are small, as in decoding.",
        "That weight.t() is read without a copy is to be seen in the profile.",
        limits=(
            at_most(case.number("projections"), 128, "a number of groups"),
            below(max((w for w in widths if isinstance(w, int)), default=None), 65536, "a width"),
        ),
        gradient="dx is the sum over the projections of dy @ weight, in one more npu_grouped_matmul with the weights "
        "as they are and one addition; each dweight is dy.t() @ x",
    )


def _prolog(case: Case) -> Attempt:
    return Attempt(
        "npu_mla_prolog_v3",
        "The weights in the device's own format (npu_format_cast to FRACTAL_NZ) and transposed; the part of kv_b_proj "
        "that makes keys absorbed as weight_uk [heads, 128, 512]; a paged cache for the latent and one for the rotary "
        "part. Attention then reads the latent itself.",
        f"One layer's weights, {case.counted('tokens', 'rows')} of bf16, a cache of 16 blocks of 128: query, "
        "query_rope and both caches against the model's own projections, norms and rotation, the query after "
        "absorbing. Time it against all of these together.",
        "Documented sizes: model width 7168, 7680 or 6144, query rank 1536, heads a power of two up to 128, head width "
        "128, at most 16 rows a sequence unless all rows are given as one (T). Inference only.",
        limits=(
            exactly(case.number("kv_rank"), 512, "latent width"),
            exactly(case.number("rope_dim"), 64, "rotary width"),
        ),
        dtypes=("bfloat16",),
        source=documentation("npu_mla_prolog_v3"),
    )


def _batched(case: Case) -> Attempt:
    return Attempt(
        "npu_transpose_batchmatmul",
        "The rows as [tokens, groups, width] and the weight as [groups, width, rank]: perm_x1=[1, 0, 2] and "
        "perm_y=[1, 0, 2] take the place of the two transpositions.",
        f"On {case.shape('tokens', 'groups', 'width')} {case.dtype}: npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, "
        f"2], perm_y=[1, 0, 2]) against bmm of the transposed rows, transposed back and made contiguous. {TIMED}",
        "Rank 3 only; meant for inference.",
        gradient="dx is the same op with the weight transposed; dweight is bmm of x and dy, both by group",
    )
