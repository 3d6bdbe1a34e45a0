"""A list of gated MLPs as grouped products: whether it may be one at this call, and the products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from npu_autopatch.kernels import probing
from npu_autopatch.kernels.swiglu.activations import FUNCTIONS, Select
from npu_autopatch.kernels.swiglu.variant import Variant
from npu_autopatch.ops import grouped_matmul, swiglu, token_permute
from npu_autopatch.ops.grouped_matmul import MOST_LISTED, Ops
from npu_autopatch.ops.legality import FLOATS, PLAIN, autocasting, transformed

Parts = tuple[Any, ...]
Gather = Callable[[Iterable[nn.Module], Tensor], Parts | None]
Fused = Callable[[Parts, Tensor, Tensor, Tensor], Tensor]
_MOST_ROWS = 1 << 23  # of all tokens times all experts: what may be permuted for certain


def gathered(variant: Variant, cls: type[nn.Module], forward: Any, select: Select) -> Gather:
    """A function that gathers what the experts hold for rows like `x`; None if any is not what was proved.

    Each must be of the class `cls`, which computes by `forward`, watched by nobody, with plain linear layers of the
    shapes of the first. Returns the activation, the op for it, and weights and biases of each projection.
    """
    names = (*variant.projections, variant.after[0])
    activation, function = variant.activation, FUNCTIONS.get(variant.function)
    linear_class, linear_forward = nn.Linear, nn.Linear.forward

    # Some hundred layers at each call: in its dictionary, an attribute of a module is found in half the time.
    def gather(experts: Iterable[nn.Module], x: Tensor) -> Parts | None:
        current: Any = cls.forward
        if current is not forward and not _is_ours(current, forward):
            return None
        if linear_class.forward is not linear_forward or _watched_globally():
            return None
        dtype, device = x.dtype, x.device
        columns: list[tuple[str, list[Tensor], list[Tensor]]] = [(name, [], []) for name in names]
        shapes: list[torch.Size] = []
        act: Any = None
        op: swiglu.Op | None = None
        started = False
        for expert in experts:
            state = expert.__dict__
            if (
                type(expert) is not cls
                or "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
            ):
                return None
            modules = state["_modules"]
            for index, (name, weights, biases) in enumerate(columns):
                linear = modules.get(name)
                if type(linear) is not linear_class:
                    return None
                own = linear.__dict__
                if (
                    "forward" in own
                    or own["_forward_hooks"]
                    or own["_forward_pre_hooks"]
                    or own["_backward_hooks"]
                    or own["_backward_pre_hooks"]
                ):
                    return None
                held = own["_parameters"]
                weight, bias = held.get("weight"), held.get("bias")
                if not started:
                    if weight is None or not grouped_matmul.legal(x, weight, bias) or weight.dim() != 2:
                        return None
                    shapes.append(weight.shape)
                elif (
                    type(weight) not in PLAIN
                    or weight.dtype is not dtype
                    or weight.device != device
                    or weight.shape != shapes[index]
                    or not weight.is_contiguous()
                ):
                    return None
                weights.append(weight)
                if bias is not None:
                    if type(bias) not in PLAIN or bias.dtype is not dtype or bias.device != device:
                        return None
                    biases.append(bias)
            its = function
            if activation:
                its = modules[activation] if activation in modules else getattr(expert, activation)
            if not started:
                act, op, started = its, select(its), True
            elif its is not act and (select(its) is not op or (op is None and not _alike(its, act))):
                return None
        count = len(columns[0][1])
        if any(biases and len(biases) != count for _, _, biases in columns) or shapes[0][1] != x.size(-1):
            return None
        return act, op, *(weights for _, weights, _ in columns), *(biases or None for _, _, biases in columns)

    return gather


def _is_ours(current: Any, forward: Any) -> bool:
    """Whether it is what the kernel swiglu puts in the place of `forward`."""
    return hasattr(current, "__npu_autopatch__") and getattr(current, "__wrapped__", None) is forward


def _watched_globally() -> bool:
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


def _alike(one: Any, other: Any) -> bool:
    """Whether two activations without an op of their own compute the same, as far as what they hold tells."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, nn.Module):
        return False
    if any(act._parameters or act._buffers or act._modules for act in (one, other)) or "forward" in one.__dict__:
        return False
    if one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks:
        return False
    return probing.settings_of(one) == probing.settings_of(other)


def collector(
    attribute: str,
    settings: Callable[[Any, int, int], bool],
    gather: Gather,
    ops: Ops,
    devices: tuple[str, ...],
    slot: tuple[type, str, Any] | None = None,
) -> Callable[..., Parts | None]:
    """The guard: what the experts in `attribute` hold, if this call with the hidden states `x` may be fused.

    Where the class's attribute in `slot` has the original again, none may: transformers leaves what it found in the
    class in each instance whose outputs it has recorded.
    """
    traces = ops.traces

    def collect(self: Any, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> Parts | None:
        if (
            type(x) not in PLAIN
            or x.device.type not in devices
            or x.dtype not in FLOATS
            or x.numel() == 0
            or transformed()
            or autocasting(x)
            or not (traces or not torch.is_grad_enabled() or not torch.compiler.is_compiling())
            or (slot is not None and getattr(slot[0], slot[1]) is slot[2])
        ):
            return None
        experts = self._modules.get(attribute)
        if type(experts) is not nn.ModuleList:
            return None
        listed = experts._modules
        count, width = len(listed), x.size(-1)
        if not 0 < count <= MOST_LISTED or x.numel() // width * count > _MOST_ROWS or not settings(self, count, width):
            return None
        if ids is not None and not token_permute.legal(x, ids, weights):
            return None
        parts: Parts | None = gather(listed.values(), x)
        return parts

    return collect


def fused(variant: Variant, ops: Ops, wide: bool) -> Fused:
    """``sum_j weights[i, j] * expert[ids[i, j]](hidden[i])``, of what was gathered of the experts.

    In the dtype of the hidden states, or if `wide` in the one they have together with the weights.
    """
    permute, unpermute, counts, _, linear, _ = ops
    separate, gate_first = variant.separate, variant.gate == 0
    upcast = variant.upcast

    def experts(parts: Parts, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        act, op, *projections = parts
        listed, biases = projections[: len(projections) // 2], projections[len(projections) // 2 :]
        rows, order = permute(hidden.reshape(-1, hidden.size(-1)), ids)
        sizes = counts(ids, len(listed[0]))
        left = linear(rows, listed[0], sizes, biases[0])
        if separate:
            right = linear(rows, listed[1], sizes, biases[1])
            # Without a gradient the copy that puts the two side by side moves more bytes than the fused op saves.
            both = (
                torch.cat((left, right) if gate_first else (right, left), -1)
                if op is not None and _learns(left, right)
                else None
            )
            first = True
        else:
            both, first = (left if op is not None else None), gate_first
            left, right = left.chunk(2, -1)
        if both is not None and op is not None:
            rows = op(both, first)
        else:
            gate, up = (left, right) if gate_first else (right, left)
            rows = (act(gate.float()) * up.float()).to(gate.dtype) if upcast else act(gate) * up
        rows = linear(rows, listed[-1], sizes, biases[-1])
        together = unpermute(rows, order, weights).view(hidden.shape)
        return together.to(torch.promote_types(hidden.dtype, weights.dtype)) if wide else together

    return experts


def _learns(left: Tensor, right: Tensor) -> bool:
    return torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
