"""Original code run in fp64, and errors against it: the reference shares nothing with the kernels' own formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_autopatch.verification.double import InDouble

__all__ = ["CallsOf", "InDouble", "behind", "error_in_ulps"]


class CallsOf(TorchDispatchMode):
    """Counts the calls of one ``npu::`` op."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.count = f"npu.{op}.default", 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function) == self.op
        return function(*args, **(kwargs or {}))


def error_in_ulps(got: Tensor, exact: Tensor, dtype: torch.dtype, by_row: bool = False) -> float:
    """The largest error of `got`, in units in the last place of `dtype`.

    Of values, at each value; of gradients, which are sums that cancel, at the largest of their row (`by_row`).
    """
    size = exact.abs().amax(-1, keepdim=True) if by_row else exact.abs()
    info = torch.finfo(dtype)
    unit = info.eps * torch.exp2(torch.floor(torch.log2(size.clamp_min(info.tiny))))
    return ((got.double() - exact).abs() / unit).nan_to_num(float("inf")).max().item()


def behind(first: list[tuple], compare: Callable[[int], list[tuple]]) -> list[tuple]:
    """Of the parts of one comparison, those in which the fused path is less exact by more than one ulp.

    A part is a name, two descriptions and both errors, the fused one first; the very first is the count of calls. The
    largest of some hundred rounding errors is itself random, the original's too: where one draw of inputs has the
    fused path behind, the mean over many draws, which `compare` makes from a seed, decides.
    """
    places = [place for place, part in enumerate(first) if place and part[3] > part[4] + 1]
    draws = [compare(seed) for seed in range(100, 124)] if places else []
    means = [(first[p][0], *(sum(draw[p][which] for draw in draws) / len(draws) for which in (3, 4))) for p in places]
    return [mean for mean in means if not mean[1] <= mean[2] + 1]
