"""Rows go to their experts and come back, each weighted, with exact gradients; counting them waits for nothing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_autopatch import emulator
from npu_autopatch.ops import grouped_matmul, token_permute
from npu_autopatch.ops.capability import Capability
from tests.counting import Fused
from tests.kernels.exact import error_in_ulps

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, CHOSEN, HIDDEN, EXPERTS = 7, 3, 6, 5
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(autouse=True)
def installed():
    emulator.install()
    torch._dynamo.reset()


def ids_of(kind="mixed", dtype=torch.int64, experts=EXPERTS):
    source = torch.Generator().manual_seed(0)
    drawn = {
        "mixed": torch.rand(TOKENS, experts, generator=source).argsort(-1)[:, :CHOSEN],
        "top-k 1": torch.randint(0, experts, (TOKENS, 1), generator=source),
        "one token": torch.tensor([[4, 0, 2]]),
        "all to one": torch.full((TOKENS, 2), 3),
        "elsewhere": torch.tensor([[EXPERTS, 0], [EXPERTS, EXPERTS], [2, EXPERTS]]),
    }
    return drawn[kind].to(dtype)


KINDS = ("mixed", "top-k 1", "one token", "all to one", "elsewhere")
each_kind = pytest.mark.parametrize("kind", KINDS)


def tokens(n, dtype=torch.float32, seed=1):
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@each_dtype
@each_kind
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_stand_by_expert_and_the_order_says_where(dtype, kind, ids_dtype):
    ids = ids_of(kind, ids_dtype)
    x = tokens(ids.size(0), dtype)
    with Fused() as fused:
        rows, order = token_permute.permute(x, ids)
    assert fused.calls == {"npu_moe_token_permute": 1}
    assert (rows.dtype, order.dtype, order.shape) == (dtype, torch.int32, (ids.numel(),))
    assert torch.equal(ids.flatten().sort(stable=True).values[order.long()], ids.flatten())
    for slot, place in enumerate(order.tolist()):
        assert torch.equal(rows[place], x[slot // ids.size(1)])
    assert all(a < b for a, b in itertools.pairwise(order[ids.flatten() == 3].tolist())), "the sort is stable"


@each_dtype
@each_kind
def test_the_gradient_of_the_tokens_is_the_sum_over_their_rows(dtype, kind):
    ids = ids_of(kind)
    x = tokens(ids.size(0), dtype)
    rows, order = token_permute.permute(x, ids)
    incoming = tokens(ids.numel(), dtype, seed=2).detach()
    with Fused() as fused:
        (dx,) = torch.autograd.grad(rows, x, incoming)
    assert fused.calls == {"npu_moe_token_permute_grad": 1}
    want = incoming.double()[order.long()].unflatten(0, ids.shape).sum(1)
    assert dx.dtype is dtype
    assert error_in_ulps(dx, want, dtype) <= 0.51


@pytest.mark.parametrize("dtypes", itertools.product(FLOATS, FLOATS), ids=str)
@each_kind
def test_rows_come_back_weighted_with_exact_gradients_in_the_dtypes_of_their_inputs(dtypes, kind):
    ids = ids_of(kind)
    order = ids.flatten().argsort(stable=True).argsort().int()
    y = tokens(ids.numel(), dtypes[0])
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)).to(dtypes[1]).requires_grad_()
    unpermute = grouped_matmul.op().unpermute
    with Fused() as fused:
        back = unpermute(y, order, weights)
        incoming = tokens(ids.size(0), dtypes[0], seed=4).detach()
        gradients = torch.autograd.grad(back, (y, weights), incoming)
    assert fused.calls == {"npu_moe_token_unpermute": 1, "npu_moe_token_unpermute_grad": 1}
    exact_y, exact_weights = (t.detach().double().requires_grad_() for t in (y, weights))
    exact = (exact_y[order.long()].unflatten(0, ids.shape) * exact_weights.unsqueeze(-1)).sum(1)
    rights = torch.autograd.grad(exact, (exact_y, exact_weights), incoming.double())
    for got, want, dtype in zip((back, *gradients), (exact, *rights), (dtypes[0], *dtypes), strict=True):
        assert (got.dtype, got.shape) == (dtype, want.shape)
        assert error_in_ulps(got.detach(), want.detach(), dtype) <= 0.51


@each_dtype
def test_without_weights_rows_are_put_in_place(dtype):
    ids = ids_of("top-k 1")
    x = tokens(TOKENS, dtype)
    rows, order = token_permute.permute(x, ids)
    back = grouped_matmul.op().unpermute(rows, order, None)
    assert torch.equal(back, x)
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_an_incoming_gradient_may_be_expanded():
    ids = ids_of()
    x, weights = tokens(TOKENS), torch.rand(ids.shape, requires_grad=True)
    rows, order = token_permute.permute(x, ids)
    grouped_matmul.op().unpermute(rows, order, weights).sum().backward()
    assert torch.allclose(x.grad, weights.detach().sum(1, keepdim=True).expand_as(x))
    assert torch.allclose(weights.grad, x.detach().sum(1, keepdim=True).expand_as(weights))


def test_where_the_gradient_of_weights_is_broken_they_are_cast(monkeypatch):
    """Its memory had the dtype of the rows: a Meta kernel of such a torch_npu says so."""

    def as_it_was(rows, grad, order, weights):
        return torch.empty_like(rows), torch.empty_like(weights, dtype=rows.dtype)

    assert token_permute.takes_mixed()
    grouped_matmul.op.cache_clear()
    monkeypatch.setattr(torch.ops.npu, "npu_moe_token_unpermute_grad", SimpleNamespace(default=as_it_was))
    try:
        assert not token_permute.takes_mixed()
        unpermute = grouped_matmul.op().unpermute
    finally:
        grouped_matmul.op.cache_clear()
        monkeypatch.undo()
    ids = ids_of()
    weights = torch.rand(ids.shape, requires_grad=True)
    y, order = token_permute.permute(tokens(TOKENS, torch.bfloat16), ids)
    seen = []
    monkeypatch.setattr(
        torch.ops.npu,
        "npu_moe_token_unpermute",
        SimpleNamespace(default=lambda y, order, weights: seen.append(weights.dtype) or y),
    )
    unpermute(y, order, weights)
    token_permute.unpermute(y, order, weights)
    token_permute.unpermute(y, order, weights, mixed=True)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_weights_that_were_cast_still_get_their_gradient_in_their_dtype():
    ids = ids_of()
    weights = torch.rand(ids.shape, requires_grad=True)
    y, order = token_permute.permute(tokens(TOKENS, torch.bfloat16), ids)
    token_permute.unpermute(y, order, weights).sum().backward()
    assert weights.grad.dtype is torch.float32
    assert weights.grad.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("experts", [1, 2, 3, 7, 128, 255])
def test_counts_are_exact_for_every_dtype_and_leave_off_what_is_past_the_experts(dtype, experts):
    repeats = torch.arange(experts + 1) % 4
    ids = torch.arange(experts + 1).repeat_interleave(repeats).to(dtype)
    counts = token_permute.counts(ids, experts)
    assert (counts.dtype, counts.shape) == (torch.int64, (experts,))
    assert torch.equal(counts, repeats[:experts])


@pytest.mark.parametrize("experts", [512, 1000, 1024])
def test_counts_are_exact_for_many_experts_and_many_ids(experts):
    ids = torch.randint(0, experts + 1, (1 << 20, 2), generator=torch.Generator().manual_seed(0))
    want = torch.bincount(ids.flatten(), minlength=experts + 1)[:experts]
    assert torch.equal(token_permute.counts(ids, experts), want)
    assert torch.equal(
        token_permute.counts(torch.full((3, 1), experts - 1), experts),
        (want * 0).index_fill(0, torch.tensor([experts - 1]), 3),
    )


def test_every_id_may_be_the_same_and_all_may_be_elsewhere():
    assert token_permute.counts(torch.zeros(4, 2, dtype=torch.long), 1).tolist() == [8]
    assert token_permute.counts(torch.ones(4, 2, dtype=torch.long), 1).tolist() == [0]
    assert token_permute.counts(torch.full((4, 2), 3), 3).tolist() == [0, 0, 0]


def test_counts_are_the_same_in_deterministic_mode_compiled_and_promised_for_fake_tensors():
    ids = ids_of()
    want = token_permute.counts(ids, EXPERTS)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(token_permute.counts(ids, EXPERTS), want)
    finally:
        torch.use_deterministic_algorithms(False)
    compiled = torch.compile(token_permute.counts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids, EXPERTS), want)
    with FakeTensorMode() as mode:
        fake = token_permute.counts(mode.from_tensor(ids), EXPERTS)
    for promised in (fake, token_permute.counts(ids.to("meta"), EXPERTS)):
        assert (promised.shape, promised.dtype) == (want.shape, want.dtype)


def layer(ops, x, ids, weights, up, down):
    rows, order = ops.permute(x, ids)
    counts = ops.counts(ids, EXPERTS)
    tail = torch.arange(rows.size(0)).unsqueeze(1) >= counts.sum()
    inner = ops.grouped_linear(rows, up, counts, tail=tail).sin()
    return ops.unpermute(ops.grouped_linear(inner, down, counts, tail=tail), order, weights)


def operands(kind, dtype):
    source = torch.Generator().manual_seed(5)
    ids = ids_of(kind)
    weights = torch.rand(ids.shape, generator=source) * (ids < EXPERTS)
    drawn = [torch.randn(shape, generator=source) for shape in ((EXPERTS, 8, HIDDEN), (EXPERTS, HIDDEN, 8))]
    return ids, [tokens(ids.size(0), dtype), *(t.to(dtype).requires_grad_() for t in (weights, *drawn))]


@each_dtype
@each_kind
def test_a_whole_layer_is_the_loop_over_experts_and_experts_elsewhere_add_nothing(dtype, kind):
    """Rows of experts that live elsewhere are NaN in memory: none of it may come through, in either direction."""
    ids, trained = operands(kind, dtype)
    y = layer(grouped_matmul.op(), trained[0], ids, *trained[1:])
    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    gradients = torch.autograd.grad(y, trained, incoming)
    x, weights, up, down = exact = [t.detach().double().requires_grad_() for t in trained]
    want = torch.zeros_like(x)
    for i, j in itertools.product(*map(range, ids.shape)):
        if (expert := int(ids[i, j])) < EXPERTS:
            want[i] = want[i] + down[expert] @ (up[expert] @ x[i]).sin() * weights[i, j]
    rights = torch.autograd.grad(want, exact, incoming.double())
    eps = torch.finfo(dtype).eps
    for got, right in zip((y, *gradients), (want, *rights), strict=True):
        assert got.dtype is dtype
        assert (got.detach().double() - right).norm() <= 8 * eps * right.norm()


@each_dtype
@each_kind
def test_the_reference_is_the_ops_with_their_gradients(dtype, kind):
    ids, trained = operands(kind, dtype)
    results = []
    for ops in (grouped_matmul.op(), grouped_matmul.REFERENCE):
        y = layer(ops, trained[0], ids, *trained[1:])
        results.append((y, *torch.autograd.grad(y.sin().sum(), trained)))
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype
        assert (a - b).double().norm() <= 8 * torch.finfo(dtype).eps * b.double().norm()
    x = trained[0]
    for a, b in zip(grouped_matmul.REFERENCE.permute(x, ids), token_permute.permute(x, ids), strict=True):
        assert (a.dtype, torch.equal(a, b)) == (b.dtype, True)


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "aot_eager"), (torch.bfloat16, "aot_eager"), (torch.bfloat16, "inductor")]
)
def test_a_whole_layer_compiles_whole_with_its_gradients(dtype, backend):
    ids, trained = operands("elsewhere", dtype)
    ops = grouped_matmul.op()

    def run(ids, x, *others):
        return layer(ops, x, ids, *others)

    y = run(ids, *trained)
    want = (y, *torch.autograd.grad(y.sin().sum(), trained))
    y = torch.compile(run, fullgraph=True, backend=backend)(ids, *trained)
    for a, b in zip((y, *torch.autograd.grad(y.sin().sum(), trained)), want, strict=True):
        assert (a - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()


X, IDS, P = torch.ones(4, 6), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)


class Sub(torch.Tensor):
    """A tensor of another type."""


@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS[:, :1]])
def test_what_is_legal(ids):
    assert token_permute.legal(X.bfloat16(), ids, None)
    assert token_permute.legal(X.bfloat16(), ids, P[:, : ids.size(1)])


@pytest.mark.parametrize(
    ("x", "ids", "weights"),
    [
        (X.double(), IDS, P),
        (X, IDS.short(), P),
        (X, IDS.float(), P),
        (X, IDS[0], None),
        (X, IDS[:0], P[:0]),
        (X, IDS, P[:, :1]),
        (X, IDS, P.double()),
        (X, IDS.to("meta"), P),
        (X, IDS, P.to("meta")),
        (X, IDS.as_subclass(Sub), P),
        (X, IDS, P.as_subclass(Sub)),
        (X, torch.zeros(4, 513, dtype=torch.int64), None),
        (X, torch.zeros(1, dtype=torch.int64).expand(1 << 22, 4), None),
    ],
)
def test_what_is_not_legal(x, ids, weights):
    assert not token_permute.legal(x, ids, weights)


def test_the_ops_are_there_with_their_gradients():
    assert token_permute.capability() == Capability("npu_moe_token_permute", "", True)


@pytest.mark.parametrize("op", ["npu_moe_token_permute", "npu_moe_token_unpermute"])
def test_ops_without_a_gradient_are_not_used(monkeypatch, op):
    """As in the train of July 2025."""
    monkeypatch.setattr(token_permute, "detect", lambda name, _: Capability(name, "", name != op))
    assert token_permute.capability().missing == f"{op} of this torch_npu has no gradient"
    monkeypatch.setattr(token_permute, "detect", lambda name, _: Capability(name, "no such op" * (name == op), True))
    assert token_permute.capability().missing == "no such op"
