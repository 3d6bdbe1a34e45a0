"""Norms, alone and with the addition before them."""

from __future__ import annotations

from npu_autopatch.analysis.judgements.case import Case
from npu_autopatch.analysis.judgements.contract import TIMED, Attempt, by_torch_npu, candidates, fused, tried
from npu_autopatch.analysis.result import FUSED, Judgement

_BACKWARD = "npu_rms_norm_backward(dy, x, gamma, rstd) gives dx, and dgamma in fp32 to be cast to the weight's dtype"


def norm(case: Case) -> Judgement:
    """One norm of rows."""
    if case.word("kind").endswith("written out"):
        why = "A layer norm written out takes a launch for each of its steps; npu_layer_norm_eval is one."
        return tried(case, why, _layer(case))
    if kind := case.word("kind"):
        return by_torch_npu(
            case, f"A {kind} is one kernel of torch's own.", f"aten::native_{kind.replace(' ', '_')} of torch_npu"
        )
    bare = (_gemma(case),) if _offset(case) else ()
    if case.fused:
        return fused(case, "the kernel rms_norm", *bare)
    return tried(case, "npu_rms_norm computes an RMS norm in one launch.", _plain(case), *bare)


def add_and_norm(case: Case) -> Judgement:
    """The residual addition and the norm that reads the sum."""
    if case.word("kind").startswith("layer"):
        why = "The addition and the layer norm are launches apart; npu_add_layer_norm does both in one."
        return tried(case, why, _with_layer_norm(case))
    rounded = (
        f" gamma is 1 + weight, which must have the dtype of x: rounded to {case.dtype} it changes about a quarter of "
        "the results by an ulp; compare with fp64 before anything else."
        if _offset(case)
        else ""
    )
    shape = case.shape("tokens", "width")
    both = Attempt(
        "npu_add_rms_norm",
        f"x1, x2 and the weight in one dtype, the rows as {shape}; the sum taken from its third result.{_moved(case)}",
        f"On {shape} {case.dtype}: y, _, s = npu_add_rms_norm(x, residual, weight, eps), compared with s = x + "
        f"residual and npu_rms_norm(s, weight, eps): s equal in every bit, y within an ulp. {TIMED} One launch of two "
        f"goes, and {_saved(case)} read and written less.",
        f"x1, x2 and gamma must have one dtype and not be empty.{rounded}",
        gradient=f"keep the sum, gamma and rstd; {_BACKWARD}; the gradient of the sum is added to dx, and both inputs "
        "get it",
    )
    in_place = Attempt(
        "npu_add_rms_norm_v2",
        "x1 and x2 that nobody reads afterwards: it writes the normed rows over x1 and the sum over x2.",
        f"On {shape} {case.dtype}: the same as for npu_add_rms_norm on clones of x and residual; compare the clones "
        f"afterwards. {TIMED}",
        f"x1, x2 and gamma must have one dtype.{rounded}",
    )
    further = [both] if case.training else [both, in_place]
    if case.flag("norm_fused") or case.fused:
        words = "The norm runs fused by the kernel rms_norm, the addition before it as a launch of its own."
        return Judgement(FUSED, words, "", candidates(case, further))
    why = "The addition and the norm are launches apart; npu_add_rms_norm does both in one."
    return tried(case, why, *further)


def add(case: Case) -> Judgement:
    """An addition that no norm reads."""
    return by_torch_npu(
        case,
        "One addition is one kernel, and no norm reads its result, so there is nothing to fuse it with.",
        "aten::add of torch_npu",
    )


def dropout(case: Case) -> Judgement:
    """Values set to zero at random, with no product before them to belong to."""
    return by_torch_npu(case, "A dropout is one kernel of torch_npu's own.", "aten::native_dropout of torch_npu")


def _moved(case: Case) -> str:
    if not case.flag("across"):
        return ""
    return " The norm is the next layer's: the decoder layer has to hand on the sum and the normed rows together."


def _with_layer_norm(case: Case) -> Attempt:
    shape = case.shape("tokens", "width")
    return Attempt(
        "npu_add_layer_norm",
        f"additional_output=True and the sum from the fourth result; ones and zeros where the norm has no weight or "
        f"bias.{_moved(case)}",
        f"On {shape} {case.dtype}: y, _, _, s = npu_add_layer_norm(x, residual, weight, bias, eps, True) against "
        f"s = x + residual and layer_norm of it, each against fp64: s equal in every bit, y within an ulp; in training "
        f"also the gradients of all four. {TIMED} One launch of two goes, and {_saved(case)} read and written less.",
        "x1, x2, gamma and beta have one dtype, or gamma and beta are fp32; for the backward one dtype is documented. "
        "It gives the gradients of gamma and beta in fp32: in which dtype they arrive is to be seen.",
    )


def _plain(case: Case) -> Attempt:
    shape = case.shape("tokens", "width")
    weight = "1 + weight in fp32 as gamma" if _offset(case) else "the weight as gamma, ones where there is none"
    return Attempt(
        "npu_rms_norm",
        f"Gives the result in the dtype of x, with {weight}; cast it where the model's own norm promotes.",
        f"On {shape} {case.dtype}: npu_rms_norm(x, gamma, eps)[0] and the model's norm, each against fp64 on the CPU: "
        f"its error must not be above the model's by more than an ulp. {TIMED}",
        "gamma has the dtype of x, or fp32 to a half x; it must not be empty. It is no layer norm: that one has a "
        "kernel of torch's own.",
    )


def _layer(case: Case) -> Attempt:
    return Attempt(
        "npu_layer_norm_eval",
        "The weight in the dtype of x; no bias where there is none.",
        f"On {case.shape('tokens', 'width')} {case.dtype}: npu_layer_norm_eval(x, [width], weight, None, eps) and "
        f"torch's layer_norm against the model's own, each against fp64. {TIMED}",
        "The model's own computes in fp32 and rounds once: that the op does so is to be seen.",
        gradient="torch's own layer_norm, one kernel too, has one",
    )


def _gemma(case: Case) -> Attempt:
    shape = case.shape("tokens", "width")
    return Attempt(
        "npu_gemma_rms_norm",
        "The bare weight as gamma, in the dtype of x: the cast and the addition of 1 at every call go.",
        f"On {shape} {case.dtype}: npu_gemma_rms_norm(x, weight, eps)[0] against npu_rms_norm(x, 1 + weight.float(), "
        f"eps)[0] and fp64, weights of 0.01 in size among them. {TIMED} Two launches of three should go.",
        "It takes x and gamma of one dtype; that it adds the 1 in fp32 is to be seen.",
        gradient=f"keep x, weight and rstd; with gamma = 1 + weight in fp32, {_BACKWARD}",
    )


def _offset(case: Case) -> bool:
    variants = case.facts.get("variants") or ()
    words = [variants] if isinstance(variants, str) else [str(word) for word in variants]
    return bool(case.flag("offset")) or any("one_plus" in word or "offset" in word for word in words)


def _saved(case: Case) -> str:
    tokens, width = case.number("tokens"), case.number("width")
    if tokens is None or width is None:
        return "one writing and one reading of the sum"
    return f"about {2 * tokens * width * (4 if case.dtype == 'float32' else 2):,} bytes"
