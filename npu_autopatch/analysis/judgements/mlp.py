"""Dense MLPs."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import (
    HALVES,
    TIMED,
    Attempt,
    below,
    by_torch_npu,
    documentation,
    fused,
    no_op,
    tried,
)
from npu_autopatch.analysis.result import Judgement

# between the products of npu_ffn in every dtype it takes
_BETWEEN = ("gelu", "fastgelu", "relu", "silu")
_CLIPPED = ("clip", "clamp", "limit", "swiglu_oai", "swigluoai")


def mlp(case: Case) -> Judgement:
    """Products with an activation between them, mostly gated."""
    activation = case.word("activation").lower()
    if case.fused:
        merged = (_merged(case),) if case.facts.get("merged") is not True else ()
        return fused(case, "the kernel swiglu", *merged)
    if case.flag("gated") is False:
        return _plain(case, activation)
    if clipped(case):
        return tried(
            case, "A gated activation with both sides clipped is one launch of npu_clipped_swiglu.", clip(case)
        )
    if "gelu" in activation and "quick" not in activation:
        return tried(case, "A GELU gate is one launch of npu_geglu.", *_gelu(case))
    if not activation or activation in ("silu", "swish", "swiglu"):
        return tried(case, "A SiLU gate is one launch of npu_swiglu.", _swiglu(case))
    return no_op(
        f"No op fuses {activation} with a gate. npu_swiglu and npu_geglu come nearest, for gates of SiLU and GELU."
    )


def _plain(case: Case, activation: str) -> Judgement:
    """Two products and an activation between them."""
    quick = "quick" in activation
    named = "fastgelu" if quick else "gelu" if "gelu" in activation else activation
    ffn = () if case.training or named not in _BETWEEN else (_ffn(case, named),)
    if quick:
        return tried(case, "QuickGELU is one launch of npu_fast_gelu.", _quick(case), *ffn)
    if activation == "gelu_tanh":
        why = "GELU written out takes a launch for each of its steps; npu_gelu is one."
        return tried(case, why, _tanh(case), *ffn)
    if ffn:
        return tried(case, "Two products and an activation are a launch each; npu_ffn runs all three in one.", *ffn)
    if named in _BETWEEN:
        why = "Two products and an activation are a kernel each already, and there is no gate to fuse with one."
        return by_torch_npu(case, why, f"aten::linear and aten::{named} of torch_npu")
    return no_op(
        f"No op runs {activation or 'its activation'} between two products. npu_ffn comes nearest, in inference: it "
        f"takes {', '.join(_BETWEEN)}."
    )


def clipped(case: Case) -> bool:
    """Whether gate and up are clipped before they are multiplied, as far as is told."""
    told = f"{case.word('activation')} {case.refused}".lower()
    return case.facts.get("limit") is not None or any(word in told for word in _CLIPPED)


def clip(case: Case) -> Attempt:
    """The op for clipped gates, of gpt-oss's kind and of DeepSeek V4's."""
    interleaved = bool(case.flag("interleaved"))
    limit = case.facts.get("limit")
    values = (
        f"alpha=1.702, limit={limit or 7.0}, bias=1.0, interleaved=True (gpt-oss: gate and up in turns)"
        if interleaved
        else f"alpha=1.0, limit={limit or 'that of the config'}, bias=0.0, interleaved=False: then it is silu of the "
        "clipped gate times the clipped up"
    )
    return Attempt(
        "npu_clipped_swiglu",
        f"gate and up in one contiguous tensor, {values}.",
        f"On {case.counted('tokens' if case.number('rows') is None else 'rows', 'rows')}, twice "
        f"{case.told('intermediate')} columns {case.dtype}, values of up to twice the limit among them: the op "
        f"against the model's own activation and fp64. {TIMED}",
        "Contiguous only, an even number of columns.",
        gradient="with s = sigmoid(alpha * gate): dgate = dy * (up + bias) * s * (1 + alpha * gate * (1 - s)) where "
        "gate was not clipped, dup = dy * gate * s where up was not, 0 elsewhere",
    )


def _merged(case: Case) -> Attempt:
    return Attempt(
        "npu_swiglu",
        "gate_proj and up_proj merged into one weight [2 * intermediate, width] at loading: one product that "
        "npu_swiglu reads directly. Checkpoints, adapters and sharding see one parameter instead of two.",
        f"On {case.counted('tokens', 'rows')}, intermediate {case.told('intermediate')} {case.dtype}: npu_swiglu of "
        f"one product against npu_swiglu of the concatenated two. {TIMED} One product and the concatenation go: "
        f"{_spared(case)}",
        "Only where gate and up are two linears now; the first half is the activated one.",
    )


def _swiglu(case: Case) -> Attempt:
    return Attempt(
        "npu_swiglu",
        "gate and up side by side, gate first, in one tensor: merged weights, or a concatenation of the two results.",
        f"On {case.counted('tokens', 'rows')}, intermediate {case.told('intermediate')} {case.dtype}: "
        f"npu_swiglu(cat([gate, up], -1)) against silu(gate) * up and fp64. {TIMED} In inference also count the "
        "bytes: the concatenation can cost more than the launch it spares.",
        "An even number of columns; no empty tensor in the backward; halves, not in turns.",
    )


def _gelu(case: Case) -> tuple[Attempt, ...]:
    tanh = "tanh" in case.word("activation") or "new" in case.word("activation")
    fused_gate = Attempt(
        "npu_geglu",
        f"gate and up side by side, gate first: activate_left=True, approximate={int(tanh)} "
        f"({'tanh' if tanh else 'exact'}).",
        f"On {case.counted('tokens', 'rows')}, intermediate {case.told('intermediate')} {case.dtype}: "
        f"npu_geglu(cat([gate, up], -1), approximate={int(tanh)}, activate_left=True)[0] against the model's own and "
        f"fp64. {TIMED}",
        "torch's own gelu on A2 and A3 takes the tanh form whatever is asked: compare with fp64, not with it.",
    )
    gate = Attempt(
        "npu_gelu_mul",
        f"gate and up side by side, gate first; approximate='{'tanh' if tanh else 'none'}'.",
        f"The same shapes, against npu_geglu. {TIMED}",
    )
    return (fused_gate,) if case.training else (fused_gate, gate)


def _ffn(case: Case, activation: str) -> Attempt:
    return Attempt(
        "npu_ffn",
        "Both weights as [in, out]; biases as fp32 where the rows are bf16. The weights are read, not the modules "
        "called: adapters and quantised layers need the original.",
        f"On {case.shape('tokens', 'width')} {case.dtype}, intermediate {case.told('intermediate')}: npu_ffn(x, "
        f"w1.t(), w2.t(), '{activation}', bias1=b1, bias2=b2, inner_precise=0) against the two linears and fp64. "
        f"{TIMED} It can win where the products are small, as in decoding.",
        "Inference only. That the weights are read transposed without a copy is to be seen; gelu on A2 and A3 is the "
        "tanh form: compare with fp64.",
        limits=(
            below(case.number("width"), 65536, "a width"),
            below(case.number("intermediate"), 65536, "an intermediate width"),
        ),
        dtypes=HALVES,
        source=documentation("npu_ffn"),
    )


def _tanh(case: Case) -> Attempt:
    return Attempt(
        "npu_gelu",
        "Nothing; approximate='tanh'.",
        f"On {case.shape('tokens', 'intermediate')} {case.dtype}: npu_gelu(x, approximate='tanh') against the model's "
        f"own and fp64. {TIMED}",
        "The model's own rounds after each step: the two are not equal.",
    )


def _quick(case: Case) -> Attempt:
    return Attempt(
        "npu_fast_gelu",
        "Nothing; on trains before 2026-01 use fast_gelu where a gradient is needed.",
        f"On {case.shape('tokens', 'intermediate')} {case.dtype}: npu_fast_gelu(x) against x * sigmoid(1.702 * x). "
        f"{TIMED}",
        "The 910A computes another polynomial.",
    )


def _spared(case: Case) -> str:
    tokens, width = case.number("tokens"), case.number("intermediate")
    if tokens is None or width is None:
        return "reading and writing both results."
    return f"about {4 * tokens * width * (4 if case.dtype == 'float32' else 2):,} bytes."
