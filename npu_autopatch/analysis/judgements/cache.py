"""The keys and values of past tokens."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import TIMED, Attempt, exactly, no_op, tried
from npu_autopatch.analysis.result import Judgement

_ALLOCATED = "a cache allocated once for the longest sequence, written by index_copy_ of the new rows only"


def cache_write(case: Case) -> Judgement:
    """New keys and values put behind the old ones."""
    if case.training:
        return no_op("Training keeps no keys and values of past steps: there is nothing to write.")
    if case.flag("latent"):
        why = "MLA's norm, rotation and writing into its cache fit into one launch, or both writings do."
        return tried(case, why, _latent(case), _paged(case))
    if case.word("read_by") == "recurrence":
        return no_op(
            "A state of fixed size is put in the place of the old one. npu_recurrent_gated_delta_rule comes nearest: "
            "it writes its state in place, which goes with the linear attention."
        )
    if case.word("read_by") == "indexer":
        why = (
            "Keys of an indexer that grow are concatenated. Written in place into a cache of fixed size, or into "
            "pages that npu_lightning_indexer reads, they need no copy."
        )
        return tried(case, why, _rows(case))
    why = (
        "A cache that grows is concatenated, which copies all of it at every token. An attention that reads a cache of "
        "fixed size, or its pages, up to the current length needs no copy."
    )
    return tried(case, why, _read_in_place(case), _paged(case))


def _latent(case: Case) -> Attempt:
    return Attempt(
        "npu_kv_rmsnorm_rope_cache_v2",
        f"{_ALLOCATED[0].upper()}{_ALLOCATED[1:]}, one for the latent and one for the rotary part, and the index of "
        "each row in it; kv as kv_a_proj gives it, before its norm. Attention then reads both caches.",
        f"On kv {case.shape('batch', 1, 'sequence', 576)} {case.dtype} and caches of 16 blocks of 128: both caches and "
        f"(is_output_kv=True) the results against norm, rotation and index_copy_. {TIMED}",
        "How it rotates neighbours or halves must be seen against the model's own rotation.",
        limits=(
            exactly(case.number("kv_rank"), 512, "latent width"),
            exactly(case.number("rope_dim"), 64, "rotary width"),
        ),
    )


def _read_in_place(case: Case) -> Attempt:
    layout = case.word("layout") or "BNSD"
    return Attempt(
        "npu_fused_infer_attention_score_v2",
        f"{_ALLOCATED[0].upper()}{_ALLOCATED[1:]} (transformers' static cache is one); the lengths as "
        f"actual_seq_kvlen, input_layout='{layout}' as the cache lies.",
        f"Batch {case.told('batch')}, one query, a cache of 4096 keys of which 1000 are filled: the op with "
        "actual_seq_kvlen=[1000] against torch's attention over the first 1000; then count the bytes of a step with "
        f"both caches. {TIMED}",
        "A head width of at most 512, a multiple of 16. Lengths are a list on the host. Leave the mask out for one "
        "query: a bool mask [1, 1, 1, S] has been seen to be ignored past 512 keys.",
    )


def _paged(case: Case) -> Attempt:
    latent = bool(case.flag("latent"))
    rows = "the latent as keys and the rotary part as values, of one head each" if latent else "new keys and values"
    return Attempt(
        "npu_scatter_pa_kv_cache",
        "Two caches of pages, [blocks, block size, heads, width], allocated once, with the pages of each sequence "
        f"(block_table) and the slot of each new token; {rows} as [tokens, heads, width], contiguous.",
        f"Batch {case.told('batch')}, caches of 16 blocks of 128, cache_mode='Norm': both caches against index_copy_ "
        f"at the same slots. {TIMED} Both go into one launch; then attention reads the pages.",
        "No slot twice. Without cache_mode the caches must lie in the layout PA_NZ.",
    )


def _rows(case: Case) -> Attempt:
    return Attempt(
        "npu_scatter_nd_update_",
        f"{_ALLOCATED[0].upper()}{_ALLOCATED[1:]}, as rows [tokens, width]; the place of each new row as int64 [rows, "
        "1]. What reads the keys then reads the cache up to its length.",
        f"Batch {case.told('batch')}, a cache of 4096 rows: npu_scatter_nd_update_(cache, places, keys) against "
        f"index_copy_; then count the bytes of a step against the concatenation's. {TIMED}",
        "No place twice, and none outside: it does not check. torch's index_copy_ does the same in one launch.",
    )
