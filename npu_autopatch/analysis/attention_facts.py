"""What was seen of the chains that mix tokens: attention, its projections and positions, an indexer, a recurrence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from npu_autopatch.analysis import chains
from npu_autopatch.analysis.chains import product, projects
from npu_autopatch.analysis.recording import CACHE, CORE, Op
from npu_autopatch.analysis.seen import Facts, Seen, projected


def before_attention(seen: Seen) -> Facts:
    products = [op for op in seen.ops if projects(op)]
    indices = {op.index for op in products}
    latent = bool(seen.beside.get(CORE)) and _two_steps(products, seen)
    return {
        "projections": len(indices) or None,
        "widths": [op.result[-1] for op in products],
        "width": projected(products[0])[-1] if products else None,
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


def rope(seen: Seen) -> Facts:
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
        "normed": any(chains.norms(op) and op.result[-1] == head for op in seen.beside.get(chains.NORM, ())),
    }


def cache(seen: Seen) -> Facts:
    narrow = _latent(seen) if chains.QKV in seen.beside and _is_latent(seen) else {}
    read_by = "recurrence" if chains.LINEAR_ATTENTION in seen.beside else "attention"
    read_by = "indexer" if chains.INDEXER in seen.beside and CORE not in seen.beside else read_by
    return {"layout": "BNSD", "read_by": read_by, **narrow}


def _is_latent(seen: Seen) -> bool:
    products = [op for op in seen.beside.get(chains.QKV, ()) if projects(op)]
    return CORE in seen.beside and _two_steps(products, seen)


def attention(seen: Seen) -> Facts:
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


def indexer(seen: Seen) -> Facts:
    scores = next((op for op in seen.ops if product(op) and not op.parameters and len(op.shapes) > 1), None)
    chosen = next((op for op in seen.ops if op.name == "aten::topk"), None)
    weights = [op.result[-1] for op in seen.ops if projects(op)]
    width = scores.shapes[0][-1] if scores is not None else None
    heads = max((w // width for w in weights if width and w % width == 0), default=None)
    return {"heads": heads, "head_dim": width, "top_k": chosen.result[-1] if chosen is not None else None}


def linear_attention(seen: Seen) -> Facts:
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


def convolution(seen: Seen) -> Facts:
    found = [op.shapes[1] for op in seen.ops if op.name == "aten::convolution"]
    found += [op.shapes[op.parameters[0]] for op in seen.ops if op.parameters]
    return {"width": found[0][-1], "channels": found[0][0]} if found else {}
