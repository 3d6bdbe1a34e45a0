"""The proof of an experts function: original and replacement on the same tokens, in each dtype, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels import probing

Function = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
TOKENS, TOP_K = 6, 2
_DTYPES = (torch.float32, torch.bfloat16)
_MOST = 16  # ulps of the largest value: what two products, one after the other, may lose


class Unproved(Exception):
    """Ends a proof; the message is the reason of the refusal."""


@dataclass(frozen=True)
class Case:
    """An instance, and sizes of its inputs."""

    instance: nn.Module
    hidden: int
    experts: int

    def ids(self) -> Tensor:
        """[TOKENS, TOP_K]: two experts for each token, the first and the last of all for one; the second is unhit."""
        used = [expert for expert in range(self.experts) if expert != 1]
        rows = [(used[(2 * token) % len(used)], used[(2 * token + 1) % len(used)]) for token in range(TOKENS - 1)]
        return torch.tensor([*rows, (used[-1], used[0])])

    def weights(self, dense: bool) -> Tensor:
        """Routing weights of each token for its experts, or for all experts where it is `dense`."""
        return torch.rand(TOKENS, self.experts if dense else TOP_K, generator=torch.Generator().manual_seed(3)) + 0.1


def takes_dense(original: Function, case: Case) -> bool:
    """Whether the original takes weights for all experts of each token."""
    try:
        original(case.instance, probing.samples(TOKENS, case.hidden), case.ids(), case.weights(dense=True))
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def prove(original: Function, fused: Function, case: Case, dense: bool = False) -> None:
    """The instance's parameters are converted in place. Raises `Unproved`."""
    for dtype in _DTYPES:
        case.instance.to(dtype)
        theirs, mine = (_run(function, case, dense, dtype, dtype) for function in (original, fused))
        case.instance.double()
        exact = _run(original, case, dense, dtype, torch.float64)
        for what in exact:
            _compare(what, mine.get(what), theirs.get(what), exact[what], str(dtype).removeprefix("torch."))


def _run(function: Function, case: Case, dense: bool, rounded: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output, and each gradient by the name of what it is of. Inputs are `rounded` before they become `dtype`."""

    def leaf(x: Tensor) -> Tensor:
        return x.to(rounded).to(dtype, copy=True).requires_grad_()

    scales = torch.tensor([1.0, 60.0]).repeat(TOKENS // 2).unsqueeze(1)
    x, weights = leaf(probing.samples(TOKENS, case.hidden) * scales), leaf(case.weights(dense))
    try:
        output = function(case.instance, x, case.ids(), weights)
    except Exception as error:
        words = str(error).partition("\n")[0]
        raise Unproved(f"it fails on a probe: {type(error).__name__}: {words}") from error
    named = dict(case.instance.named_parameters())
    incoming = leaf(probing.samples(*output.shape, seed=7)).detach()
    gradients = torch.autograd.grad(output, [x, weights, *named.values()], incoming, allow_unused=True)
    of = ("input", "routing weights", *named)
    given = {f"gradient of {name}": y for name, y in zip(of, gradients, strict=True) if y is not None}
    return {"output": output.detach(), **given}


def _compare(what: str, mine: Tensor | None, theirs: Tensor | None, exact: Tensor, dtype: str) -> None:
    if mine is None or theirs is None or mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        raise Unproved(f"in {dtype} its {what} is of another kind")
    if what == "output":
        unit = probing.ulp(exact.abs().amax(-1, keepdim=True), theirs.dtype)
        right = probing.no_worse(mine, theirs, exact, unit, most=_MOST)
    else:  # of sums that cancel the largest error is random: the original's too, by the inputs' condition
        unit = probing.ulp(exact.abs().max(), theirs.dtype)
        own, others = (float(((y - exact).abs() / unit).max()) for y in (mine, theirs))
        right = own <= max(others, 1.0) + _MOST and (others <= _MOST or theirs.dtype is torch.float32)
    if not right:
        raise Unproved(f"in {dtype} its {what} is not that of grouped products")


def turned_away(*arguments: Any) -> Tensor:
    """What a replacement calls in place of the original while it is proved."""
    raise RuntimeError("the guard of the replacement turns its own probe away")
