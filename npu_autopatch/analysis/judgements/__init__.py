"""What can be said of each chain of a model from the contracts of torch_npu's ops; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from npu_autopatch.analysis.judgements import (
    attention,
    cache,
    experts,
    hyper_connections,
    linear_attention,
    loss,
    mlp,
    norms,
    projections,
    rope,
    router,
    sparse,
)
from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import fused as fused_here
from npu_autopatch.analysis.judgements.contract import no_op
from npu_autopatch.analysis.result import FUSED, Judgement

JUDGES: dict[str, Callable[[Case], Judgement]] = {
    "embedding": projections.embedding,
    "masks and positions": rope.masks_and_positions,
    "norm": norms.norm,
    "residual add and norm": norms.add_and_norm,
    "residual add": norms.add,
    "QKV": projections.before_attention,
    "rope": rope.rope,
    "cache write": cache.cache_write,
    "attention core": attention.core,
    "indexer": sparse.indexer,
    "compressor": sparse.compressor,
    "linear attention": linear_attention.linear_attention,
    "causal convolution": linear_attention.convolution,
    "output gate": projections.output_gate,
    "output projection": projections.output_projection,
    "MLP": mlp.mlp,
    "router": router.router,
    "dispatch": experts.dispatch,
    "experts": experts.experts,
    "combine": experts.combine,
    "shared expert gate": experts.shared_gate,
    "hyper-connections": hyper_connections.hyper_connections,
    "dropout": norms.dropout,
    "output head": loss.output_head,
    "loss": loss.loss,
}


def judged(
    chain: str, mode: str, facts: Mapping[str, Any], fused: int = 0, original: int = 0, refused: str = ""
) -> Judgement:
    """The state of a chain in a mode, why, and the ops to try. Any name and any facts are taken.

    `fused` and `original` count the calls of our kernels' sites in it, `refused` says in words why some ran original.
    """
    case = Case(chain, mode, facts, fused, original, refused)
    judge = JUDGES.get(chain)
    if judge is None:
        return (
            fused_here(case, "one of our kernels")
            if fused
            else no_op("No op of torch_npu is known for what these launches compute.")
        )
    judgement = judge(case)
    if fused and judgement.state != FUSED:
        return Judgement(FUSED, fused_here(case, "one of our kernels").reason, "", judgement.candidates)
    return judgement
