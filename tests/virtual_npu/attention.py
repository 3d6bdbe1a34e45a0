"""`npu_fusion_attention_v3` and its backward on the CPU: what torch_npu's scaled_dot_product_attention launches.

torch_npu itself decides when it may: with a float mask, for one, it takes the math decomposition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .device import serve

_SERVED = {"layout": ("BNSD",), "sparse mode": (0, 2), "keep_prob": (1.0,)}
_LEFT_UP_CAUSAL = 2


def serve_attention(library: torch.library.Library) -> None:
    """Register both kernels."""
    serve("npu_fusion_attention_v3", _forward, library)
    serve("npu_fusion_attention_grad_v3", _backward, library)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 0,
    next_tockens: int = 0,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    _refuse(input_layout, sparse_mode, keep_prob, pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen)
    scores = _scores(query, key, scale, atten_mask, sparse_mode)
    largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    out = _probabilities(scores, largest, total) @ _per_head(value, query)
    empty = torch.empty(0, dtype=query.dtype)
    kept = (largest.expand(*largest.shape[:-1], 8), total.expand(*total.shape[:-1], 8))  # eight equal lanes
    return out.to(query.dtype), *kept, empty, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    scores = _scores(query, key, scale_value, atten_mask, sparse_mode)
    probabilities = _probabilities(scores, softmax_max[..., :1], softmax_sum[..., :1])
    grad = dy.float()
    d_probabilities = grad @ _per_head(value, query).mT
    d_scores = probabilities * (d_probabilities - (grad * attention_in.float()).sum(-1, keepdim=True)) * scale_value
    dq = d_scores @ _per_head(key, query)
    dk = _per_group(d_scores.mT @ query.float(), key)
    dv = _per_group(probabilities.mT @ grad, value)
    empty = torch.empty(0, dtype=query.dtype)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), empty, empty


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, sparse_mode: int) -> Tensor:
    scores = query.float() @ _per_head(key, query).mT * scale
    if sparse_mode == _LEFT_UP_CAUSAL:  # its mask is a fixed triangle of 2048 x 2048
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores if mask is None else scores.masked_fill(mask.bool(), float("-inf"))  # True hides


def _probabilities(scores: Tensor, largest: Tensor, total: Tensor) -> Tensor:
    return ((scores - largest).exp() / total).nan_to_num(0.0)  # a row that is all hidden gives 0


def _per_head(shared: Tensor, query: Tensor) -> Tensor:
    return shared.float().repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def _per_group(grad: Tensor, shared: Tensor) -> Tensor:
    return grad.unflatten(1, (shared.shape[1], -1)).sum(2)


def _refuse(layout: str, sparse_mode: int, keep_prob: float, *tensors: Any) -> None:
    got = dict(zip(_SERVED, (layout, sparse_mode, keep_prob), strict=True))
    wrong = [f"{name} {value}" for name, value in got.items() if value not in _SERVED[name]]
    if wrong or any(tensor is not None for tensor in tensors):
        given = ", ".join(wrong) or "pse, padding_mask, prefix or sequence lengths"
        raise NotImplementedError(f"npu_fusion_attention_v3 of the virtual NPU does not serve {given}")
