"""The experts of the interface's contract as grouped products: the fused function, and how its gate is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npu_autopatch.kernels.swiglu.activations import selector
from npu_autopatch.ops import swiglu, token_permute
from npu_autopatch.ops.grouped_matmul import Ops, legal
from npu_autopatch.ops.legality import PLAIN, autocasting, transformed

Select = Callable[[Any], swiglu.Op | None]


@dataclass(frozen=True)
class Contract:
    """What a class declares to the interface, as its instances have it.

    `first` and `down_proj` are the attributes with the stacked weights, [E, 2I, H] ([E, I, H] where it is not `gated`)
    and [E, H, I], the last two axes exchanged if `transposed`. Between the products stands `default_gate`, the
    interface's own, which activates the first half and multiplies, or a gate of the class's own. `flagged`: an
    attribute says whether ids may name experts that live elsewhere; `counted`: `num_experts` does, which is the number
    of stacked weights where none may. `dense`: routing weights may be given for all experts of a token.
    """

    first: str
    transposed: bool
    biased: bool
    gated: bool
    concatenated: bool
    normed: bool
    own_gate: bool
    flagged: bool
    counted: bool
    dense: bool = False
    default_gate: Any = None

    @classmethod
    def of(cls, instance: nn.Module, default_gate: Any) -> Contract:
        """The contract of an instance: what it does not have is what the older interface takes for granted."""

        def has(name: str, default: bool) -> bool:
            return bool(getattr(instance, name, default))

        gated = has("has_gate", True)
        return cls(
            first="gate_up_proj" if gated else "up_proj",
            transposed=has("is_transposed", False),
            biased=has("has_bias", False),
            gated=gated,
            concatenated=has("is_concatenated", True),
            normed=has("has_post_expert_norm", False),
            own_gate=getattr(type(instance), "_apply_gate", None) is not default_gate,
            flagged=hasattr(instance, "_is_expert_parallel"),
            counted=hasattr(instance, "num_experts"),
            default_gate=default_gate,
        )

    def __str__(self) -> str:
        names = ("transposed", "biased", "normed")
        words = [name for name in names if getattr(self, name)]
        words += ["interleaved"] * (not self.concatenated)
        words += ["own gate"] * (self.gated and self.own_gate) + ["no gate"] * (not self.gated)
        return "stacked" + "".join(f"+{word}" for word in words)


def unselected(act: Any) -> swiglu.Op | None:
    """A selector that leaves every gate to the class."""
    return None


def selector_of(cls: type) -> Select:
    """Which op serves the activation an instance of `cls` holds; None for none."""
    if swiglu.capability().missing:
        return unselected
    return selector(sys.modules[cls.__module__], swiglu.op())


def fused(contract: Contract, select: Select, ops: Ops, devices: tuple[str, ...]) -> Callable[..., Tensor]:
    """The experts of `contract` as two grouped products.

    The function takes what an entry of the interface takes, the entry's own function for calls that are not fused,
    and whether that multiplies by bmm. x [n, H], ids and weights [n, k] -> [n, H] in the dtype of x.
    """
    permute, unpermute, counts, grouped_linear, _, traces = ops
    first_name, first_bias = contract.first, f"{contract.first}_bias"
    transposed, biased, gated, normed = contract.transposed, contract.biased, contract.gated, contract.normed
    flagged, counted, default_gate = contract.flagged, contract.counted, contract.default_gate
    fusible = gated and not contract.own_gate and contract.concatenated
    dense = contract.dense

    def experts(
        self: Any,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        original: Callable[..., Tensor],
        batched: bool = False,
    ) -> Tensor:
        first, second = getattr(self, first_name), self.down_proj
        if (
            type(hidden_states) not in PLAIN
            or hidden_states.device.type not in devices
            or transformed()
            or (not traces and torch.is_grad_enabled() and torch.compiler.is_compiling())
        ):
            return original(self, hidden_states, top_k_index, top_k_weights)
        x = hidden_states.to(first.dtype)  # under autocast it may be of another
        if (
            not legal(x, first)
            or not legal(x, second)
            or not token_permute.legal(x, top_k_index, None if dense else top_k_weights)
            # bmm takes one dtype, and under autocast multiplies in another one
            or (batched and x is not hidden_states)
            or (batched and autocasting(x))
        ):
            return original(self, hidden_states, top_k_index, top_k_weights)
        count = first.size(0)
        elsewhere = self._is_expert_parallel if flagged else counted and self.num_experts != count
        weights = top_k_weights
        if dense and weights.shape != top_k_index.shape:
            if elsewhere or weights.shape != (hidden_states.size(0), count):
                return original(self, hidden_states, top_k_index, top_k_weights)
            weights = weights.gather(1, top_k_index)
        rows, order = permute(x, top_k_index)
        sizes = counts(top_k_index, count)
        tail = None
        if elsewhere:
            tail = torch.arange(rows.size(0), device=rows.device).unsqueeze(1) >= sizes.sum()
        rows = grouped_linear(rows, first, sizes, getattr(self, first_bias) if biased else None, transposed, tail)
        if not gated:
            rows = self.act_fn(rows)
        elif (
            fusible
            and type(self)._apply_gate is default_gate
            and (op := select(self.act_fn)) is not None
            and swiglu.legal_halves(x, rows)
        ):
            rows = op(rows, True)
        else:
            rows = self._apply_gate(rows)
        rows = grouped_linear(rows, second, sizes, self.down_proj_bias if biased else None, transposed, tail)
        if normed:
            rows = self.post_expert_norm(rows)
        if hidden_states.dtype is torch.float32:  # the original, too, adds up in the wider of both
            rows = rows.to(torch.float32)
        return unpermute(rows, order, weights).to(hidden_states.dtype)

    return experts
