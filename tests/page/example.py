"""An analysis to look at: a mixture of 128 experts in 48 layers, with figures of the right order."""

from __future__ import annotations

from typing import Any

from npu_autopatch.analysis.result import (
    BY_TORCH_NPU,
    CANDIDATE,
    DECODE,
    FUSED,
    NO_OP,
    NOT_POSSIBLE,
    PREFILL,
    TRAINING,
    Analysis,
    Candidate,
    Chain,
    Cost,
    Judgement,
    Mode,
    Part,
)

HIDDEN, QUERIES, KEYS, VOCABULARY, EXPERT = 2048, 4096, 512, 151936, 768
CONTRACT = "aclnn documentation, CANN 8.5"
NORM_OPS = {"aten::to": 2, "aten::pow": 1, "aten::mean": 1, "aten::add": 1, "aten::rsqrt": 1, "aten::mul": 2}
ROUTER = Candidate(
    "npu_moe_gating_top_k_softmax",
    "The logits in float32: the model computes the softmax there, the op answers in the type of its input.",
    "k up to 1024, two or three dimensions, no gradient; not on Ascend 950.",
    "One router of 128 experts with k = 8 on 4096 random rows: indices equal, weights within one unit of float32.",
    CONTRACT + ", aclnnMoeGatingTopKSoftmax",
)
ADD_NORM = Candidate(
    "npu_add_rms_norm",
    "The residual and the branch's result in one call; it returns their sum beside the norm.",
    "x1, x2 and the weight of the same type, none of them empty.",
    "One layer in bf16, 1 x 2048, sum and norm compared with the two separate ops in float64.",
    CONTRACT + ", aclnnAddRmsNorm",
)
LOSS = Candidate(
    "npu_cross_entropy_loss",
    "Logits as [tokens, 151936] and targets as int64 [tokens].",
    "At most 200000 classes. The gradient needs weight, ignore_index and label_smoothing at their defaults under mean.",
    "Loss and gradient of 4096 random rows against float64, with and without targets of -100.",
    CONTRACT + ", aclnnCrossEntropyLoss",
)


def example() -> Analysis:
    """A fresh one."""
    return Analysis(
        model="Qwen/Qwen3-30B-A3B",
        counted="One forward on the meta device at the sizes of config.json; in training also the backward.",
        versions={"npu_autopatch": "0.5.0", "torch": "2.13.0", "torch_npu": "2.13.0", "transformers": "5.24.0"},
        modes=(
            _mode(PREFILL, "1 sequence of 4096 tokens, with an empty cache", 4096),
            _mode(DECODE, "1 token after 4096, with a cache", 1),
            _mode(TRAINING, "1 sequence of 4096 tokens, forward, loss and backward", 4096),
        ),
        notes=(
            "Launches are ops that reach the device; views are not counted.",
            "Bytes are those of the tensors read and written, as if nothing stayed in a cache on the chip.",
        ),
    )


def _mode(name: str, given: str, tokens: int) -> Mode:
    layer = Part("layers 0-47", "Qwen3MoeDecoderLayer", 48, tuple(_layer(name, tokens)))
    return Mode(name, given, (layer, Part("outside the layers", "", 1, tuple(_outside(name, tokens)))))


def _chain(
    mode: str, block: str, name: str, ops: dict[str, int], moved: int, state: str, reason: str, **more: Any
) -> Chain:
    """In training everything runs about three times; what is fused moves the bytes `fused` instead of `moved`."""
    factor = 3 if mode == TRAINING else 1
    before = {op: count * factor for op, count in ops.items()}
    after = {op: count * factor for op, count in more.pop("after", ops).items()}
    kept = more.pop("fused", moved)
    return Chain(
        name,
        block,
        Cost(sum(before.values()), moved * factor),
        Cost(sum(after.values()), kept * factor),
        Judgement(state, reason, more.pop("source", ""), more.pop("candidates", ())),
        before,
        after,
        **more,
    )


def _norm(mode: str, block: str, name: str, rows: int, width: int) -> Chain:
    return _chain(
        mode, block, name, NORM_OPS, rows * width * 30, FUSED, "The norm rounds to bf16 before its weight, as proved.",
        after={"npu::npu_rms_norm": 1}, fused=rows * width * 4 + width * 2, source=CONTRACT + ", aclnnRmsNorm",
        sites=("qwen3_moe.Qwen3MoeRMSNorm",), facts={"shape": [1, rows, width], "dtype": "bfloat16", "eps": 1e-06},
    )  # fmt: skip


def _sum(mode: str, tokens: int) -> Chain:
    moved = tokens * HIDDEN * 6
    if mode == TRAINING:
        reason = 'No gradient: "npu_add_rms_norm is not differentiable", and the sum is needed in the backward.'
        return _chain(
            mode, "", "residual add", {"aten::add": 2}, 2 * moved, NOT_POSSIBLE, reason,
            source=CONTRACT + ", aclnnAddRmsNorm",
        )  # fmt: skip
    return _chain(
        mode, "", "residual add and norm", {"aten::add": 2}, 2 * moved, CANDIDATE,
        "The sum and the norm after it stand in two modules of one layer; one op does both.", candidates=(ADD_NORM,),
        source=CONTRACT + ", aclnnAddRmsNorm",
    )  # fmt: skip


def _layer(mode: str, tokens: int) -> list[Chain]:
    routed, active = tokens * 8, min(128, tokens * 8)
    experts = active * 3 * HIDDEN * EXPERT * 2 + routed * (HIDDEN * 2 + EXPERT * 3) * 2
    matmul = "A product of matrices is one kernel already: aclnnMatmul."
    chains = [
        _norm(mode, "input_layernorm", "norm", tokens, HIDDEN),
        _chain(
            mode, "self_attn", "QKV", {"aten::mm": 3}, (HIDDEN * 5120 + tokens * (3 * HIDDEN + 5120)) * 2,
            BY_TORCH_NPU, matmul, facts={"heads": 32, "key heads": 4, "head size": 128},
        ),
        _norm(mode, "self_attn.q_norm", "norm", tokens * 32, 128),
        _norm(mode, "self_attn.k_norm", "norm", tokens * 4, 128),
        _chain(
            mode, "self_attn", "rope", {"aten::mul": 4, "aten::neg": 2, "aten::cat": 2, "aten::add": 2},
            tokens * 4608 * 22, FUSED, "Half rotation over the whole head, as proved.",
            after={"npu::npu_rotary_mul": 2}, fused=tokens * 4608 * 4,
            source=CONTRACT + ", aclnnRotaryPositionEmbedding", sites=("qwen3_moe.apply_rotary_pos_emb",),
            facts={"rotary_mode": "half", "head size": 128},
        ),
    ]  # fmt: skip
    if mode != TRAINING:
        chains.append(
            _chain(
                mode, "self_attn", "cache write", {"aten::cat": 2}, (4096 + tokens) * KEYS * 8, NO_OP,
                "The cache grows by a concatenation of all that is in it; no op of torch_npu appends to a tensor.",
                facts={"cache": "DynamicCache"},
            )
        )  # fmt: skip
    chains += [
        _chain(
            mode, "self_attn", "attention core", {"npu::npu_fusion_attention_v3": 1}, tokens * (QUERIES + KEYS) * 4,
            BY_TORCH_NPU, "scaled_dot_product_attention is npu_fusion_attention there: 4 dimensions, bf16, head 128.",
            source="torch_npu 2.13.0, dispatch of aten::scaled_dot_product_attention",
        ),
        _chain(
            mode, "self_attn", "output projection", {"aten::mm": 1}, (HIDDEN * QUERIES + tokens * 6144) * 2,
            BY_TORCH_NPU, matmul,
        ),
        _sum(mode, tokens),
        _norm(mode, "post_attention_layernorm", "norm", tokens, HIDDEN),
        _router(mode, tokens),
        _chain(
            mode, "mlp.experts", "dispatch", {"aten::sort": 1, "aten::index": 2, "aten::histc": 1, "aten::cumsum": 1},
            routed * HIDDEN * 6, FUSED, "The rows are brought into the order of their experts by one op.",
            after={"npu::npu_moe_token_permute": 1, "aten::histc": 1}, fused=routed * HIDDEN * 3,
            sites=("qwen3_moe.Qwen3MoeExperts",), source=CONTRACT + ", aclnnMoeTokenPermute",
        ),
        _chain(
            mode, "mlp.experts", "experts",
            {"aten::mm": 2 * active, "aten::silu": 1, "aten::mul": 1, "aten::slice": 256},
            experts + routed * EXPERT * 8, FUSED, "Gated experts of one size: two grouped products and a fused gate.",
            after={"npu::npu_grouped_matmul": 2, "npu::npu_swiglu": 1}, fused=experts,
            sites=("qwen3_moe.Qwen3MoeExperts",), source=CONTRACT + ", aclnnGroupedMatmulV4",
            facts={"experts": 128, "per token": 8, "activation": "silu", "weights": "stacked"},
        ),
        _chain(
            mode, "mlp.experts", "combine", {"aten::mul": 1, "aten::index": 1, "aten::view": 1, "aten::sum": 1},
            routed * HIDDEN * 9, FUSED, "The weighted sum over each token's experts is part of the way back.",
            after={"npu::npu_moe_token_unpermute": 1}, fused=routed * HIDDEN * 2 + tokens * HIDDEN * 2,
            sites=("qwen3_moe.Qwen3MoeExperts",), source=CONTRACT + ", aclnnMoeTokenUnpermute",
        ),
    ]  # fmt: skip
    return chains


def _router(mode: str, tokens: int) -> Chain:
    ops = {"aten::mm": 1, "aten::softmax": 1, "aten::topk": 1, "aten::sum": 1, "aten::div": 1, "aten::to": 2}
    moved = HIDDEN * 256 + tokens * (HIDDEN * 2 + 128 * 16)
    if mode == TRAINING:
        reason = 'No gradient: "npu_moe_gating_top_k_softmax" has none registered, and the router is trained.'
        return _chain(mode, "mlp.gate", "router", ops, moved, NOT_POSSIBLE, reason, source=ROUTER.source)
    reason = (
        "Softmax and the choice of 8 of 128 are one op of torch_npu; the weights are divided by their sum after it."
    )
    return _chain(mode, "mlp.gate", "router", ops, moved, CANDIDATE, reason, source=ROUTER.source, candidates=(ROUTER,))


def _outside(mode: str, tokens: int) -> list[Chain]:
    last = tokens if mode == TRAINING else 1
    chains = [
        _chain(
            mode, "model.embed_tokens", "embedding", {"aten::embedding": 1}, tokens * HIDDEN * 4, BY_TORCH_NPU,
            "One kernel already: aclnnEmbedding.",
        ),
        _chain(
            mode, "model.rotary_emb", "rope tables", {"aten::bmm": 1, "aten::cat": 1, "aten::cos": 1, "aten::sin": 1},
            tokens * 128 * 24, NO_OP, "Cosine and sine of the positions, once for all layers; no op computes them.",
        ),
        _norm(mode, "model.norm", "norm", tokens, HIDDEN),
        _chain(
            mode, "lm_head", "output projection", {"aten::mm": 1}, (HIDDEN * VOCABULARY + last * VOCABULARY) * 2,
            BY_TORCH_NPU, "A product of matrices is one kernel already: aclnnMatmul.",
        ),
    ]  # fmt: skip
    if mode == TRAINING:
        chains.append(
            _chain(
                mode, "", "loss", {"aten::to": 1, "aten::log_softmax": 1, "aten::nll_loss_forward": 1},
                last * VOCABULARY * 14, CANDIDATE, "Softmax and loss are two passes over the logits; one op does both.",
                source=LOSS.source, candidates=(LOSS,), facts={"classes": VOCABULARY, "reduction": "mean"},
            )
        )  # fmt: skip
    return chains
