"""What a pass draws and chooses, and the same again in another pass of the model: routing is no question of rounding.

Which of two experts with nearly the same score is taken is decided by the last bit before the router. A comparison of
passes that differ by rounding has to choose alike in all of them, or it compares different experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOP = (torch.topk, Tensor.topk)
_BEST = (torch.argmax, Tensor.argmax)
_MOST = (torch.max, Tensor.max)


class Choices(TorchFunctionMode):
    """Keeps the indices of every topk, argmax and max in the block; given those of an earlier block, gives them out.

    The values are those of the tensor at hand, at these indices. Random numbers are drawn in fp32 from a generator of
    its own, and so are the same in each dtype. `differing` counts the rows whose own choice would have been another.
    """

    def __init__(self, earlier: Choices | None = None) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.earlier: Iterator[Tensor] | None = None if earlier is None else iter(earlier.kept)
        self.generator = torch.Generator().manual_seed(9)
        self.differing = 0
        self.drawn = False

    @property
    def spent(self) -> bool:
        """Whether all choices of the earlier block have been given out."""
        return self.earlier is None or next(self.earlier, None) is None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.uniform_:
            low, high = tuple(args[1:]) + (0.0, 1.0)[len(args) - 1 :]
            low, high = kwargs.get("from", low), kwargs.get("to", high)
            return args[0].copy_(self._drawn(args[0]) * (high - low) + low)
        if function is Tensor.exponential_:
            return args[0].copy_(-(1 - self._drawn(args[0])).log())
        if function is torch.rand_like:
            return self._drawn(args[0]).to(args[0].dtype)
        result = function(*args, **kwargs)
        if function in _TOP:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            return self._chosen(args[0], dim, True, result, torch.return_types.topk)
        if function in _MOST and isinstance(result, torch.return_types.max):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            return self._chosen(args[0], dim, keep, result, torch.return_types.max)
        if function in _BEST and (dim := kwargs.get("dim", args[1] if len(args) > 1 else None)) is not None:
            return self._kept(result, dim if kwargs.get("keepdim", False) else None)
        return result

    def _drawn(self, like: Tensor) -> Tensor:
        self.drawn = True
        return torch.rand(like.shape, generator=self.generator)

    def _kept(self, index: Tensor, dim: int | None) -> Tensor:
        if self.earlier is None:
            self.kept.append(index.clone())
            return index
        given = next(self.earlier)
        mine, theirs = (t if dim is None else t.sort(dim).values for t in (index, given))
        different = mine != theirs
        self.differing += int((different if dim is None else different.any(dim)).sum())
        self.kept.append(given)
        return given

    def _chosen(self, scores: Tensor, dim: int, keep: bool, own: Any, kind: Any) -> Any:
        index = self._kept(own[1], dim if kind is torch.return_types.topk else None)
        if self.earlier is None:
            return own
        values = scores.gather(dim, index) if keep else scores.gather(dim, index.unsqueeze(dim)).squeeze(dim)
        return kind((values, index))
