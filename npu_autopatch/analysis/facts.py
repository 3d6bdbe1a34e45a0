"""What was seen of a chain: its sizes, dtypes and the kind of its scores, as the judgements read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from npu_autopatch.analysis import attention_facts as attention
from npu_autopatch.analysis import chains
from npu_autopatch.analysis.chains import norms, projects
from npu_autopatch.analysis.recording import CACHE, CORE, Op
from npu_autopatch.analysis.seen import Facts, Seen, projected

_ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh", "softplus")
_SCORES = {"aten::_softmax": "softmax", "aten::sigmoid": "sigmoid", "aten::softplus": "softplus"}


def facts(seen: Seen) -> Facts:
    """All that is known of a chain; what could not be seen is not there."""
    of = _OF.get(seen.chain)
    found: Facts = {"dtype": _dtype(seen.ops), "tokens": seen.tokens, "batch": seen.batch}
    found |= of(seen) if of is not None else {}
    return {name: value for name, value in found.items() if value is not None}


def _dtype(ops: Iterable[Op]) -> str | None:
    """The dtype most is read in."""
    sizes: dict[torch.dtype, int] = {}
    for op in ops:
        for dtype in op.dtypes:
            if dtype.is_floating_point:
                sizes[dtype] = sizes.get(dtype, 0) + op.bytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.") if sizes else None


def _norm(seen: Seen) -> Facts:
    weighted = seen.setting("weight")
    width = weighted.shape[-1] if isinstance(weighted, torch.Tensor) and weighted.dim() else None
    wide = max(seen.ops, key=lambda op: op.bytes)
    return {
        "width": width or wide.result[-1],
        "variants": list(seen.variants) or None,
        "kind": _kind(seen),
    }


def _kind(seen: Seen) -> str | None:
    """Of what kind a norm is that is no RMS norm; of an addition alone, that of the norms beside it."""
    if "aten::native_group_norm" in seen.names:
        return "group norm"
    ops = [op for op in seen.ops if norms(op)] or [op for found in seen.beside.values() for op in found if norms(op)]
    names = [op.name for op in ops]
    if "aten::native_layer_norm" in names:
        return "layer norm"
    return "layer norm written out" if "aten::sub" in names and names.count("aten::mean") > 1 else None


def _embedding(seen: Seen) -> Facts:
    return {"projected": True} if any(map(projects, seen.ops)) else {}


def _add_norm(seen: Seen) -> Facts:
    return {
        **_norm(seen),
        "norm_fused": seen.norm_fused,
        "across": seen.across,
        "offset": any("one_plus" in word for word in seen.variants),
    }


def _output(seen: Seen) -> Facts:
    grouped = [op.shapes[0][0] for op in seen.ops if op.name == "aten::bmm" and projects(op)]
    widths = [projected(op)[-1] for op in seen.ops if projects(op)]
    return {"groups": grouped[0] if grouped else None, "width": widths[0] if widths else None}


def _mlp(seen: Seen) -> Facts:
    products = [op for op in seen.ops if projects(op)]
    limit = seen.setting("limit")
    intermediate = projected(products[-1])[-1] if products else None
    plain = len(products) == 2 and products[0].result[-1] == intermediate and not _multiplied(seen.ops)
    activation = _activation(seen.ops)
    return {
        "width": projected(products[0])[-1] if products else None,
        "intermediate": intermediate,
        # x * sigmoid(1.702 * x)
        "activation": "quick_gelu" if plain and activation == "sigmoid" else activation,
        "gated": not plain if products else None,
        "merged": len(products) < 3 or None,
        "limit": limit if isinstance(limit, (int, float)) and "aten::clamp" in seen.names else None,
    }


def _multiplied(ops: list[Op]) -> bool:
    """Whether what an activation of torch's own gives is multiplied with something else of its shape."""
    activated = {op.index for op in ops if op.name in ("aten::silu", "aten::gelu", "aten::relu")}
    return any(
        op.name == "aten::mul" and activated & set(op.sources) and len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]
        for op in ops
    )


def _activation(ops: Iterable[Op]) -> str | None:
    names = [op.name for op in ops]
    if "aten::tanh" in names and names.count("aten::mul") > 2:
        return "gelu_tanh"  # written out
    if "aten::relu" in names and {"aten::pow", "aten::square"} & set(names):
        return "squared relu"
    return next((name for name in _ACTIVATIONS if f"aten::{name}" in names), None)


def _router(seen: Seen) -> Facts:
    products = [op for op in seen.ops if projects(op)]
    chosen = [op for op in seen.ops if op.name == "aten::topk"]
    score = next((word for name, word in _SCORES.items() if name in seen.names), None)
    if score == "softplus" and "aten::sqrt" in seen.names:
        score = "sqrtsoftplus"
    experts = products[0].result[-1] if products else None
    groups = next((op.shapes[0][-2] for op in chosen if len(op.shapes[0]) > 2), None)
    softmax = [op.index for op in seen.ops if op.name == "aten::_softmax"]
    # the softmax of what was chosen is the softmax of all, made to sum to one
    chosen_first = bool(softmax and chosen and chosen[0].index < softmax[0])
    return {
        **_routed(seen),
        "experts": experts,
        "top_k": chosen[-1].result[-1] if chosen else _routed(seen).get("top_k"),
        "score": score,
        "groups": groups,
        "renormalised": chosen_first or bool({"aten::div", "aten::div_"} & seen.names),
    }


def _routed(seen: Seen) -> Facts:
    """Sizes of the experts, from their two products."""
    products = [op for op in seen.beside.get(chains.EXPERTS, ()) if projects(op)]
    stacked = [shape for op in products for shape in op.shapes if len(shape) == 3]
    if not products:
        return {}
    rows = products[0].result[0]
    return {
        "experts": stacked[0][0] if stacked else None,
        "rows": rows,
        "top_k": rows // seen.tokens if rows >= seen.tokens else None,
        "width": projected(products[0])[-1],
        "intermediate": projected(products[-1])[-1],
    }


def _experts(seen: Seen) -> Facts:
    words = " ".join(seen.variants)
    limit = getattr(seen.module, "limit", None) or getattr(getattr(seen.module, "experts", None), "limit", None)
    return {
        **_routed(seen),
        "activation": _activation(seen.beside.get(chains.EXPERTS, ())),
        "interleaved": "interleaved" in words,
        "limit": limit if isinstance(limit, (int, float)) else None,
    }


def _streams(seen: Seen) -> Facts:
    shape = next((op.result for op in reversed(seen.ops) if len(op.result) == 4), None)
    return {"streams": shape[2], "width": shape[3]} if shape else {}


def _head(seen: Seen) -> Facts:
    op = next(op for op in seen.ops if projects(op))
    return {"vocabulary": op.result[-1], "width": projected(op)[-1], **_capped(seen.ops)}


def _capped(ops: Iterable[Op]) -> Facts:
    """Whether logits are bent by a tanh."""
    return {"capped": True} if any(op.name == "aten::tanh" for op in ops) else {}


def _loss(seen: Seen) -> Facts:
    op = next((op for op in seen.ops if op.name == "aten::_log_softmax"), None)
    if op is None:
        return {}
    fp32 = op.dtypes[0] is torch.float32
    return {
        "vocabulary": op.result[-1],
        "rows": op.result[0],
        "fp32": fp32,
        **_capped(seen.beside.get(chains.HEAD, ())),
    }


_OF: dict[str, Callable[[Seen], Facts]] = {
    chains.EMBEDDING: _embedding,
    chains.NORM: _norm,
    chains.ADD_NORM: _add_norm,
    chains.QKV: attention.before_attention,
    chains.OUTPUT: _output,
    chains.ROPE: attention.rope,
    CACHE: attention.cache,
    CORE: attention.attention,
    chains.INDEXER: attention.indexer,
    chains.LINEAR_ATTENTION: attention.linear_attention,
    chains.CONVOLUTION: attention.convolution,
    chains.MLP: _mlp,
    chains.ROUTER: _router,
    chains.DISPATCH: _experts,
    chains.EXPERTS: _experts,
    chains.COMBINE: _experts,
    chains.HYPER: _streams,
    chains.HEAD: _head,
    chains.LOSS: _loss,
}
