"""What was seen of a chain: its sizes, dtypes and the kind of its scores, as the judgements read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from npu_autopatch.analysis import chains
from npu_autopatch.analysis.chains import product, projects
from npu_autopatch.analysis.recording import CACHE, CORE, Op

_ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh", "softplus")
_SCORES = {"aten::_softmax": "softmax", "aten::sigmoid": "sigmoid", "aten::softplus": "softplus"}
Facts = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """One chain of one block, unpatched: its ops in the forward, the block's module, and the chains in and within it.

    `variants` are the words of our kernels for its sites. `batch` and `tokens` are what the mode was given.
    """

    chain: str
    ops: list[Op]
    module: nn.Module
    beside: Mapping[str, list[Op]]
    variants: tuple[str, ...]
    batch: int
    tokens: int
    across: bool = False
    norm_fused: bool = False
    extra: Facts = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The ops by name."""
        return {op.name for op in self.ops}

    def setting(self, *names: str) -> Any:
        """The first of these settings that the module has."""
        return next((value for name in names if (value := getattr(self.module, name, None)) is not None), None)


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


def _rows(op: Op) -> tuple[int, ...]:
    """The shape of what is projected: what is no parameter."""
    return next(shape for place, shape in enumerate(op.shapes) if place not in op.parameters)


def _norm(seen: Seen) -> Facts:
    weighted = seen.setting("weight")
    width = weighted.shape[-1] if isinstance(weighted, torch.Tensor) and weighted.dim() else None
    wide = max(seen.ops, key=lambda op: op.bytes)
    layer_norm = {"aten::native_layer_norm"} & seen.names
    return {
        "width": width or wide.result[-1],
        "variants": list(seen.variants) or None,
        "kind": "layer norm" if layer_norm else None,
    }


def _add_norm(seen: Seen) -> Facts:
    return {
        **_norm(seen),
        "norm_fused": seen.norm_fused,
        "across": seen.across,
        "offset": any("one_plus" in word for word in seen.variants),
    }


def _before_attention(seen: Seen) -> Facts:
    products = [op for op in seen.ops if projects(op)]
    indices = {op.index for op in products}
    latent = bool(seen.beside.get(CORE)) and _two_steps(products, seen)
    return {
        "projections": len(indices) or None,
        "widths": [op.result[-1] for op in products],
        "width": _rows(products[0])[-1] if products else None,
        **(_latent(seen) if latent else {}),
    }


def _two_steps(products: list[Op], seen: Seen) -> bool:
    """Whether keys and values are projected again from something narrower, as in latent attention."""
    core = _core(seen.beside[CORE], seen)
    return len(products) > 3 and core.get("qk_dim") != core.get("v_dim")


def _latent(seen: Seen) -> Facts:
    """Of latent attention: how wide the latent of keys and values is, and the rotary part beside it."""
    written = [op.result[-1] for op in seen.beside.get(CACHE, ()) if op.name == "aten::cat"]
    rank, rotary = (max(written), min(written)) if len(set(written)) == 2 else (None, None)
    return {"latent": True, "kv_rank": rank, "rope_dim": rotary}


def _output(seen: Seen) -> Facts:
    grouped = [op.shapes[0][0] for op in seen.ops if op.name == "aten::bmm" and projects(op)]
    widths = [_rows(op)[-1] for op in seen.ops if projects(op)]
    return {"groups": grouped[0] if grouped else None, "width": widths[0] if widths else None}


def _rope(seen: Seen) -> Facts:
    words = " ".join(seen.variants)
    head = max((op.result[-1] for op in seen.ops), default=None)
    # what is negated is half of what is rotated, or all of it where even and odd columns stand in for the halves
    negated = [op.result[-1] for op in seen.ops if op.name == "aten::neg"]
    rotated = 2 * min(negated) if negated and "partial" in words else head
    return {
        "head_dim": head,
        "rotated": rotated,
        "interleaved": "interleave" in words,
        "partial": "partial" in words,
    }


def _cache(seen: Seen) -> Facts:
    narrow = _latent(seen) if chains.QKV in seen.beside and _is_latent(seen) else {}
    read_by = "recurrence" if chains.LINEAR_ATTENTION in seen.beside else "attention"
    read_by = "indexer" if chains.INDEXER in seen.beside and CORE not in seen.beside else read_by
    return {"layout": "BNSD", "read_by": read_by, **narrow}


def _is_latent(seen: Seen) -> bool:
    products = [op for op in seen.beside.get(chains.QKV, ()) if projects(op)]
    return CORE in seen.beside and _two_steps(products, seen)


def _attention(seen: Seen) -> Facts:
    found = _core(seen.ops, seen)
    chosen = next((op for op in seen.beside.get(chains.INDEXER, ()) if op.name == "aten::topk"), None)
    if chosen is not None:
        found |= {"sparse": True, "index_topk": chosen.result[-1]}
    if chains.QKV in seen.beside and _is_latent(seen):
        found |= _latent(seen)
    window = seen.setting("sliding_window")
    return {**found, "window": window if isinstance(window, int) else None}


def _core(ops: list[Op], seen: Seen) -> Facts:
    """The sizes of attention, from the one function or from its two products."""
    one = next((op for op in ops if op.within(CORE) and "attention" in op.name and len(op.shapes) > 2), None)
    if one is not None:
        (_, heads, queries, width), (_, kv_heads, keys, _), value = one.shapes[:3]
        mask = "none" if len(one.shapes) < 4 else "bool" if one.dtypes[3] is torch.bool else "float"
        sizes = {"heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "qk_dim": width}
        return {"implementation": "sdpa", **sizes, "v_dim": value[-1], "mask": mask, "sinks": False}
    pairs = [op for op in ops if product(op) and not op.parameters and len(op.shapes) > 1]
    if len(pairs) < 2:
        return {}
    scores, mixed = pairs[0].shapes, pairs[-1].shapes
    heads = scores[0][0] // max(seen.batch, 1)
    shared = seen.setting("num_key_value_groups")
    between = [op for op in ops if pairs[0].index < op.index < pairs[-1].index]
    return {
        "implementation": "eager",
        "heads": heads,
        "kv_heads": heads // shared if isinstance(shared, int) and shared else None,
        "queries": scores[0][-2],
        "keys": scores[1][-1],
        "qk_dim": scores[0][-1],
        "v_dim": mixed[1][-1],
        "mask": "float" if any(op.name in ("aten::add", "aten::masked_fill") for op in between) else "none",
        "sinks": any(op.name == "aten::cat" for op in between),
    }


def _indexer(seen: Seen) -> Facts:
    scores = next((op for op in seen.ops if product(op) and not op.parameters and len(op.shapes) > 1), None)
    chosen = next((op for op in seen.ops if op.name == "aten::topk"), None)
    weights = [op.result[-1] for op in seen.ops if projects(op)]
    width = scores.shapes[0][-1] if scores is not None else None
    heads = max((w // width for w in weights if width and w % width == 0), default=None)
    return {"heads": heads, "head_dim": width, "top_k": chosen.result[-1] if chosen is not None else None}


def _linear_attention(seen: Seen) -> Facts:
    gated = any({"g", "beta"} <= set(_parameters(value)) for value in _functions(seen.module))
    states = [op.result for op in seen.ops if product(op) and not op.parameters]
    return {
        "heads": seen.setting("num_v_heads", "num_heads"),
        "key_dim": seen.setting("head_k_dim"),
        "value_dim": seen.setting("head_v_dim"),
        "chunked": len(states) > 8,
        "gated_delta": gated,
    }


def _functions(module: nn.Module) -> list[Callable[..., Any]]:
    """What a module may call: attributes of it, and functions of its file that its forward names."""
    forward = inspect.unwrap(type(module).forward)
    named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    return [value for value in (*vars(module).values(), *named) if callable(value) and not isinstance(value, nn.Module)]


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _convolution(seen: Seen) -> Facts:
    found = [op.shapes[1] for op in seen.ops if op.name == "aten::convolution"]
    found += [op.shapes[op.parameters[0]] for op in seen.ops if op.parameters]
    return {"width": found[0][-1], "channels": found[0][0]} if found else {}


def _mlp(seen: Seen) -> Facts:
    products = [op for op in seen.ops if projects(op)]
    limit = seen.setting("limit")
    return {
        "intermediate": _rows(products[-1])[-1] if products else None,
        "activation": _activation(seen.names),
        "merged": len(products) < 3 or None,
        "limit": limit if isinstance(limit, (int, float)) and "aten::clamp" in seen.names else None,
    }


def _activation(names: Iterable[str]) -> str | None:
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
        "width": _rows(products[0])[-1],
        "intermediate": _rows(products[-1])[-1],
    }


def _experts(seen: Seen) -> Facts:
    words = " ".join(seen.variants)
    limit = getattr(seen.module, "limit", None) or getattr(getattr(seen.module, "experts", None), "limit", None)
    return {
        **_routed(seen),
        "activation": _activation(op.name for op in seen.beside.get(chains.EXPERTS, ())),
        "interleaved": "interleaved" in words,
        "limit": limit if isinstance(limit, (int, float)) else None,
    }


def _streams(seen: Seen) -> Facts:
    shape = next((op.result for op in reversed(seen.ops) if len(op.result) == 4), None)
    return seen.extra or ({"streams": shape[2], "width": shape[3]} if shape else {})


def _head(seen: Seen) -> Facts:
    op = next(op for op in seen.ops if projects(op))
    return {"vocabulary": op.result[-1], "width": _rows(op)[-1]}


def _loss(seen: Seen) -> Facts:
    op = next((op for op in seen.ops if op.name == "aten::_log_softmax"), None)
    if op is None:
        return {}
    return {"vocabulary": op.result[-1], "rows": op.result[0], "fp32": op.dtypes[0] is torch.float32}


_OF: dict[str, Callable[[Seen], Facts]] = {
    chains.NORM: _norm,
    chains.ADD_NORM: _add_norm,
    chains.QKV: _before_attention,
    chains.OUTPUT: _output,
    chains.ROPE: _rope,
    CACHE: _cache,
    CORE: _attention,
    chains.INDEXER: _indexer,
    chains.LINEAR_ATTENTION: _linear_attention,
    chains.CONVOLUTION: _convolution,
    chains.MLP: _mlp,
    chains.ROUTER: _router,
    chains.DISPATCH: _experts,
    chains.EXPERTS: _experts,
    chains.COMBINE: _experts,
    chains.HYPER: _streams,
    chains.HEAD: _head,
    chains.LOSS: _loss,
}
