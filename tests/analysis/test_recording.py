"""The count of a pass: what is a launch, whose it is, and how many bytes it moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from npu_autopatch.analysis.recording import Op, Recorder

BF16 = 2


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 16)
        self.first = nn.Linear(16, 24, bias=False)
        self.second = nn.Linear(24, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        halves = functional.silu(self.first(self.embedding(ids))).chunk(2, -1)
        result: torch.Tensor = self.second(torch.cat(halves, -1))
        return result


def recorded(model: nn.Module, *inputs: torch.Tensor, backward: bool = False) -> list[Op]:
    with Recorder(model, []) as recorder, torch.set_grad_enabled(backward):
        output = model(*inputs)
        if backward:
            output.sum().backward()
    return recorder.found.ops


def tiny(device: str = "meta") -> tuple[Tiny, torch.Tensor]:
    return Tiny().to(device, torch.bfloat16), torch.zeros(3, 5, dtype=torch.long, device=device)


def test_views_and_allocations_are_no_launches() -> None:
    names = [op.name for op in recorded(*tiny())]
    assert names == ["aten::embedding", "aten::mm", "aten::silu", "aten::cat", "aten::mm"]


def test_an_op_belongs_to_the_innermost_module() -> None:
    assert [op.module for op in recorded(*tiny())] == ["embedding", "first", "", "", "second"]


def test_bytes_are_those_read_and_written() -> None:
    found, product, silu, *_ = recorded(*tiny())
    assert found.bytes == 15 * 8 + 2 * 15 * 16 * BF16  # the ids, and of the table only the rows that are looked up
    assert product.bytes == (15 * 16 + 16 * 24 + 15 * 24) * BF16
    assert silu.bytes == 2 * 15 * 24 * BF16


def test_what_is_read_again_for_each_row_is_read_once() -> None:
    class Added(nn.Module):
        def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            return x + row.expand_as(x)

    (added,) = recorded(Added(), torch.empty(7, 4, device="meta"), torch.empty(1, 4, device="meta"))
    assert added.bytes == (7 * 4 + 4 + 7 * 4) * 4


def test_a_gradient_belongs_to_the_op_it_is_of() -> None:
    ops = recorded(*tiny(), backward=True)
    forward = {op.name: op.index for op in ops if op.forward is None}
    products = [op.index for op in ops if op.name == "aten::mm" and op.forward is None]
    owners = [(op.name, op.forward) for op in ops if op.forward is not None]
    assert [owner for name, owner in owners if name == "aten::mm"] == [products[1]] * 2 + [products[0]] * 2
    assert ("aten::silu_backward", forward["aten::silu"]) in owners
    assert ("aten::embedding_dense_backward", forward["aten::embedding"]) in owners


def test_counting_does_not_change_what_is_counted() -> None:
    """A gradient that the count kept alive would be copied before it is given to its parameter."""
    ops = recorded(*tiny(), backward=True)
    assert not [op.name for op in ops if op.name in ("aten::clone", "aten::copy_")]


def test_the_count_needs_no_values_and_is_the_same_with_them() -> None:
    counts = []
    for device in ("meta", "cpu"):
        ops = recorded(*tiny(device), backward=True)
        counts.append([(op.name, op.bytes, op.module, op.forward) for op in ops])
    assert counts[0] == counts[1]


def test_attention_is_one_launch_forward_and_one_back() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, k[..., :4], is_causal=True, enable_gqa=True)

    q = torch.empty(2, 8, 6, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k = torch.empty(2, 2, 6, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ops = recorded(Attention(), q, k, backward=True)
    assert [op.name for op in ops if "attention" in op.name and op.forward is None] == [
        "aten::_scaled_dot_product_fused_attention_overrideable"
    ]
    assert sum("attention" in op.name for op in ops) == 2
    assert k.grad is not None and k.grad.shape == k.shape


def test_a_grouped_product_is_one_for_each_group_that_has_rows() -> None:
    """As torch runs it where the device has no kernel for it; of the weights, only theirs are read."""

    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return functional.grouped_mm(x, weight, offs=ends)

    weight = torch.empty(16, 32, 24, device="meta", dtype=torch.bfloat16)
    ends = torch.empty(16, device="meta", dtype=torch.int32)
    for rows, groups in ((40, 16), (3, 3)):
        x = torch.empty(rows, 32, device="meta", dtype=torch.bfloat16)
        (product,) = recorded(Grouped(), x, weight, ends)
        assert product.launches == groups
        assert product.bytes == (rows * 32 + groups * 32 * 24 + rows * 24) * BF16 + 16 * 4


def test_questions_about_all_tokens_are_answered_and_counted() -> None:
    class Asks(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            return mask.float() if mask.all() else mask

    model = Asks()
    with Recorder(model, []) as recorder:
        model(torch.ones(4, dtype=torch.bool, device="meta"))
    assert recorder.found.asked == 1
    assert "aten::_to_copy" in [op.name for op in recorder.found.ops]


def test_everything_is_as_it_was_afterwards() -> None:
    from transformers import cache_utils

    before: dict[Any, Any] = {cls: dict(vars(cls)) for cls in (nn.Module, cache_utils.Cache, cache_utils.DynamicCache)}
    recorded(*tiny())
    assert all(dict(vars(cls)) == names for cls, names in before.items())
