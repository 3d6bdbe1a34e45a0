"""The emulated token ops sort, drop and refuse as the device does, and differentiate as torch_npu does."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_autopatch import emulator
from npu_autopatch.emulator.registration import ContractError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[2, 0], [9, 2], [0, 9], [1, 2]])
SLOTS = [1, 4, 6, 0, 3, 7, 2, 5]  # of ids, row by row, stably sorted
ORDER = torch.tensor([3, 0, 6, 4, 1, 7, 2, 5], dtype=torch.int32)
P = torch.rand(4, 2, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def installed():
    emulator.install()


def permute(*args, **kwargs):
    return torch.ops.npu.npu_moe_token_permute(*args, **kwargs)


def unpermute(*args, **kwargs):
    return torch.ops.npu.npu_moe_token_unpermute(*args, **kwargs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ids", [IDS, IDS.int()])
def test_rows_are_sorted_and_the_indices_are_the_inverse_permutation(dtype, ids):
    rows, order = permute(X.to(dtype), ids)
    assert torch.equal(rows, X.to(dtype)[torch.tensor(SLOTS) // 2])
    assert (order.dtype, order.tolist()) == (torch.int32, ORDER.tolist())


def test_indices_of_one_dimension_are_one_a_token():
    rows, order = permute(X, IDS[:, 0])
    assert (order.tolist(), torch.equal(rows[order.long()], X)) == ([2, 3, 0, 1], True)


@pytest.mark.parametrize(("given", "kept"), [(None, 8), (0, 8), (5, 5), (99, 8), (-2, 6)])
def test_rows_may_be_left_off_at_the_end(given, kept):
    x = X.clone().requires_grad_()
    rows, order = permute(x, IDS, given)
    assert torch.equal(rows, X[torch.tensor(SLOTS[:kept]) // 2])
    assert order.tolist() == ORDER.tolist()
    rows.sum().backward()
    assert torch.equal(x.grad[:, 0], torch.bincount(torch.tensor(SLOTS[:kept]) // 2, minlength=4).float())
    back = unpermute(rows.detach(), order, torch.ones(4, 2))
    assert torch.allclose(back, X * torch.bincount(torch.tensor(SLOTS[:kept]) // 2, minlength=4).unsqueeze(1))


def test_a_row_of_nan_is_not_hidden_by_a_weight_of_zero():
    rows = permute(X, IDS)[0].clone()
    rows[-1] = float("nan")
    assert unpermute(rows, ORDER, P * (IDS < 9))[2].isnan().all()


@pytest.mark.parametrize("dtypes", [(a, b) for a in FLOATS for b in FLOATS], ids=str)
def test_the_gradients_have_the_dtypes_of_what_they_are_of(dtypes):
    rows = permute(X.to(dtypes[0]), IDS)[0].requires_grad_()
    probs = P.to(dtypes[1], copy=True).requires_grad_()
    y = unpermute(rows, ORDER, probs)
    y.sum().backward()
    assert (y.dtype, rows.grad.dtype, probs.grad.dtype) == (dtypes[0], *dtypes)


def test_a_gradient_row_that_nothing_refers_to_is_unwritten():
    order = ORDER.clone()
    order[order == 7] = 6
    dy = torch.ops.npu.npu_moe_token_unpermute_grad(torch.ones(8, 6), X, order, P)[0]
    assert dy.isnan().all(1).tolist() == [False] * 7 + [True]


def test_only_what_the_backward_needs_is_kept():
    """As since the train of October 2026: the tokens' sizes and, without probs, the rows' sizes."""
    saved = []
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        rows, order = permute(x, IDS)
        unpermute(rows, order)
    assert torch.float32 not in saved


REFUSED = {
    "npu_moe_token_permute: got tokens .1, 4, 6.; it takes rank 2": lambda: permute(X[None], IDS),
    "permute: got tokens .0, 6.": lambda: permute(X[:0], IDS[:0]),
    "permute: got tokens torch.float64; it takes float32, bfloat16 or": lambda: permute(X.double(), IDS),
    "permute: got padded_mode True": lambda: permute(X, IDS, None, True),
    "permute: got indices torch.int16; it takes int32 or int64": lambda: permute(X, IDS.short()),
    "permute: got indices .3, 2. for tokens .4, 6.": lambda: permute(X, IDS[:3]),
    "permute: got indices .1, 4, 2.": lambda: permute(X[:1], IDS[None]),
    "permute: got 513 indices a token; it takes 1 to 512": lambda: permute(X, torch.ones(4, 513, dtype=torch.int64)),
    "permute: got indices from -1 to 1": lambda: permute(X, IDS.clamp(max=2) - 1),
    "permute: got indices from 16777215 to": lambda: permute(X, IDS * 0 + 16_777_215),
    "unpermute: got sorted_indices torch.int64; it takes int32": lambda: unpermute(X, ORDER.long()[:4]),
    "unpermute: got sorted_indices .8,.; it takes .4.": lambda: unpermute(X, ORDER, P[:2]),
    "unpermute: got probs .8,.": lambda: unpermute(X, ORDER, P.flatten()),
    "unpermute: got probs torch.float64": lambda: unpermute(X, ORDER, P.double()),
    "unpermute: got permuted_tokens torch.int32": lambda: unpermute(X.int(), ORDER[:4]),
    "unpermute: got permuted_tokens .4, 6. with 2 sorted_indices": lambda: unpermute(X, ORDER[:2]),
    "unpermute: got padded_mode or restore_shape": lambda: unpermute(X, ORDER[:4], None, True),
    "unpermute: got padded_mode or restore": lambda: unpermute(X, ORDER[:4], None, False, [4, 6]),
    "unpermute_grad: got grad_unpermuted_tokens .3, 6.": lambda: torch.ops.npu.npu_moe_token_unpermute_grad(
        torch.ones(8, 6), X[:3], ORDER, P
    ),
    "permute_grad: got grad_permuted_tokens .8, 5.": lambda: torch.ops.npu.npu_moe_token_permute_grad(
        X, torch.ones(8, 5), IDS, ORDER
    ),
    "permute_grad: got sorted_indices .7,.; it takes .8.": lambda: torch.ops.npu.npu_moe_token_permute_grad(
        X, torch.ones(8, 6), IDS, ORDER[:7]
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_ops_do_not_take(words):
    with pytest.raises(ContractError, match=words):
        REFUSED[words]()


@pytest.mark.parametrize("probs", [None, P], ids=["bare", "probs"])
def test_fake_and_meta_tensors_have_the_real_shapes(probs):
    def run(x, ids, probs):
        x = x.detach().requires_grad_()
        rows, order = permute(x, ids, None if probs is not None else -1)
        y = unpermute(rows, order, probs)
        return rows, order, y, *torch.autograd.grad(y.sum(), x)

    real = run(X, IDS, probs)
    mode = FakeTensorMode()
    for place, context in ((lambda t: t.to("meta"), torch.enable_grad()), (mode.from_tensor, mode)):
        operands = [place(X), place(IDS), None if probs is None else place(probs)]
        with context:
            promised = run(*operands)
        assert [(t.shape, t.dtype) for t in promised] == [(t.shape, t.dtype) for t in real]


def test_the_ops_pass_torchs_own_check():
    x, probs = X.clone().requires_grad_(), P.clone().requires_grad_()
    torch.library.opcheck(torch.ops.npu.npu_moe_token_permute.default, (x, IDS))
    rows = permute(X, IDS)[0].requires_grad_()
    torch.library.opcheck(torch.ops.npu.npu_moe_token_unpermute.default, (rows, ORDER, probs))


def test_a_second_derivative_is_missed_with_a_warning():
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="no gradient for npu::npu_moe_token_permute_grad"):
        torch.autograd.grad(permute(x, IDS)[0].square().sum(), x, create_graph=True)
