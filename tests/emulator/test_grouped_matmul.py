"""The emulated `npu_grouped_matmul` takes the forms of its contract, refuses the others in words, writes no more."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_autopatch import emulator
from npu_autopatch.emulator.registration import ContractError
from tests.kernels.exact import error_in_ulps

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
M, K, N, E = 7, 6, 10, 3


@pytest.fixture(autouse=True)
def installed():
    emulator.install()


def gmm(x, weight, **kwargs):
    return torch.ops.npu.npu_grouped_matmul(x, weight, **kwargs)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, STACK = random(M, K), random(E, K, N, seed=1)
COUNTS = torch.tensor([2, 0, 4])
ROWS = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}
SUMS = {"group_list": COUNTS, "split_item": 3, "group_type": 2, "group_list_type": 1}


def by_hand(x, weights, bias=(0, 0, 0)):
    rows = x[:6].double().split(COUNTS.tolist())
    return torch.cat([a @ w.double() + b for a, w, b in zip(rows, weights, bias, strict=True)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed view"])
@pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])
def test_rows_times_the_weight_of_their_group_rounded_once(dtype, turned, listed):
    x, stack = X.to(dtype), STACK.to(dtype)
    given = stack.transpose(1, 2).contiguous().transpose(1, 2) if turned else stack
    taken = torch.float32 if dtype is torch.bfloat16 else dtype
    bias = random(E, N, seed=2).to(taken)
    (y,) = gmm([x], list(given) if listed else [given], bias=list(bias) if listed else [bias], **ROWS)
    assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, (M, N), True)
    assert error_in_ulps(y[:6], by_hand(x, stack, bias.double()), dtype) <= 0.51
    assert y[6:].isnan().all(), "the device leaves the rows past the last group unwritten"


@pytest.mark.parametrize("listed", [False, True])
def test_groups_are_given_by_their_ends_too(listed):
    ends = {**ROWS, "group_list": COUNTS.cumsum(0), "group_list_type": 0}
    weight = list(STACK) if listed else [STACK]
    assert torch.equal(gmm([X], weight, **ends)[0][:6], gmm([X], weight, **ROWS)[0][:6])
    del ends["group_list_type"]
    assert torch.equal(gmm([X], weight, **ends)[0][:6], gmm([X], weight, **ROWS)[0][:6])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_over_the_rows_of_a_group_are_zero_where_it_has_none(dtype):
    x, other = X.to(dtype), random(M, N, dtype=dtype, seed=3)
    (y,) = gmm([x.t()], [other], **SUMS)
    want = torch.stack(
        [a.T @ b for a, b in zip(x[:6].double().split([2, 0, 4]), other[:6].double().split([2, 0, 4]), strict=True)]
    )
    assert (y.dtype, y.shape) == (dtype, (E, K, N))
    assert not y[1].any()
    assert error_in_ulps(y, want, dtype) <= 0.51


def test_results_of_their_own():
    several = gmm([X], list(STACK), **{**ROWS, "split_item": 0})
    assert [tuple(y.shape) for y in several] == [(2, N), (0, N), (4, N)]
    assert torch.allclose(torch.cat(several).double(), by_hand(X, STACK), atol=1e-5)
    rows = [X[:2], X[2:3], X[3:]]
    for split_item, kwargs in ((0, {"group_type": -1}), (2, {"group_type": 0})):
        got = gmm(rows, list(STACK), split_item=split_item, **kwargs)
        assert torch.allclose(torch.cat(got), torch.cat([a @ w for a, w in zip(rows, STACK, strict=True)]), atol=1e-5)
    sums = gmm([X.t()], [random(2, N), random(5, N)], group_type=2, split_item=0)
    assert torch.allclose(sums[0], X[:2].t() @ random(2, N), atol=1e-5)
    assert torch.allclose(sums[1], X[2:].t() @ random(5, N), atol=1e-5)


FEW = torch.ones(1, dtype=torch.int64)
BIASES = [torch.ones(N)] * E
REFUSED = {
    "group_type None; it takes -1, 0 or 2": ([X], [STACK], {**ROWS, "group_type": None}),
    "group_type 1;": ([X], [STACK], {**ROWS, "group_type": 1}),
    "split_item 4; it takes 0 to 3": ([X], [STACK], {**ROWS, "split_item": 4}),
    "group_list_type 2; it takes 0": ([X], [STACK], {**ROWS, "group_list_type": 2}),
    "group_list torch.int32 of rank 1; it takes int64": ([X], [STACK], {**ROWS, "group_list": COUNTS.int()}),
    "group_list torch.int64 of rank 2": ([X], [STACK], {**ROWS, "group_list": COUNTS[None]}),
    "no group_list": ([X], [STACK], {**ROWS, "group_list": None}),
    "group_list of 2 for 3 weights": ([X], [STACK], {**ROWS, "group_list": COUNTS[:2]}),
    "groups of 8 rows in all for 7": ([X], [STACK], {**ROWS, "group_list": torch.tensor([3, 1, 4])}),
    r"group_list \[2, 0, 4\]; it takes ends": ([X], [STACK], {**ROWS, "group_list_type": 0}),
    r"group_list \[2, -1, 4\]": ([X], [STACK], {**ROWS, "group_list": torch.tensor([2, -1, 4])}),
    "x and weight of .*bfloat16.*float32": ([X.bfloat16()], [STACK], ROWS),
    "x and weight of .*float64": ([X.double()], [STACK.double()], ROWS),
    "with weight .* the same K": ([X], [STACK[:, :5]], ROWS),
    "with weight .*; it takes the same K": ([X], [w[:5] for w in STACK], ROWS),
    "a form of its table": ([X], [STACK], {**ROWS, "split_item": 0}),
    "1 x and 1 weight of rank": ([X], [STACK[0]], {**ROWS, "group_list": FEW}),
    "0 x and 1 weight": ([], [STACK], ROWS),
    "weights of unequal width": ([X], [*STACK[:2], STACK[2, :, :4]], ROWS),
    "an empty x or weight; it takes M, K and N": ([X[:0]], [STACK], ROWS),
    "an empty x or": ([X[:, :0]], [STACK[:, :0]], ROWS),
    "x of rank": ([X[None]], [STACK], ROWS),
    "x with strides .* a transposed view with group_type 2": ([random(K, M).t()], [STACK], ROWS),
    "x with strides .*; it takes a transposed view": ([random(K, M)], [random(M, N)], SUMS),
    "none with group_type 2": ([X.t()], [random(N, M).t()], SUMS),
    "all transposed or none": ([X], [STACK[0], STACK[1], random(N, K).t()], ROWS),
    "1 x and 1 weight of rank .3., split_item 3, group_type 2": ([X.t()], [STACK], SUMS),
    "split_item 0, group_type 2": ([X.t()], [random(M, N)], {**SUMS, "split_item": 0}),
    "a group_list; it takes one where": ([X.t()], [random(2, N), random(5, N)], {**SUMS, "split_item": 0}),
    "129 groups; it takes at most 128": (
        [X],
        [STACK[0]] * 129,
        {**ROWS, "group_list": torch.zeros(129, dtype=torch.int64)},
    ),
    "1025 groups": ([X], [STACK[:1].repeat(1025, 1, 1)], {**ROWS, "group_list": torch.zeros(1025, dtype=torch.int64)}),
    "1025 groups;": ([X.t()], [random(M, N)], {**SUMS, "group_list": torch.zeros(1025, dtype=torch.int64)}),
    "inner axis is 65536; it takes less": ([X], [torch.ones(E, K, 65536)], ROWS),
    "inner axis is 65536": ([torch.ones(M, 65536)], [torch.ones(E, 65536, 1)], ROWS),
    "bias torch.float32 with x torch.float16; it takes torch.float16": (
        [X.half()],
        [STACK.half()],
        {**ROWS, "bias": [torch.ones(E, N)]},
    ),
    "bias torch.bfloat16 with x torch.bfloat16; it takes torch.float32": (
        [X.bfloat16()],
        [STACK.bfloat16()],
        {**ROWS, "bias": [torch.ones(E, N).bfloat16()]},
    ),
    r"bias \(10,\) with weight": ([X], [STACK], {**ROWS, "bias": [torch.ones(N)]}),
    "3 bias for 1 weight": ([X], [STACK], {**ROWS, "bias": BIASES}),
    "1 bias for 1 weight, group_type 2": ([X.t()], [random(M, N)], {**SUMS, "bias": [torch.ones(N)]}),
    "an argument of quantised products": ([X], [STACK], {**ROWS, "scale": BIASES}),
    "an argument of quantised": ([X], [STACK], {**ROWS, "act_type": 1}),
    "an argument of": ([X], [STACK], {**ROWS, "output_dtype": 6}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_op_does_not_take(words):
    x, weight, kwargs = REFUSED[words]
    with pytest.raises(ContractError, match=rf"npu_grouped_matmul: got .*{words}"):
        gmm(x, weight, **kwargs)


def test_an_inner_axis_is_the_one_along_which_memory_runs():
    """So a transposed weight may be wider, and rows may be as many as they like where they are summed over."""
    wide = torch.zeros(1, 65536, 1).transpose(1, 2)
    assert gmm([torch.ones(2, 1)], [wide], **{**ROWS, "group_list": FEW})[0].shape == (2, 65536)
    every_other = torch.zeros(4, 65536, 1)[::2].transpose(1, 2)
    with pytest.raises(ContractError, match="inner axis is 65536"):  # it is copied, and then not transposed
        gmm([torch.ones(2, 1)], [every_other], **{**ROWS, "group_list": torch.tensor([1, 1])})
    many = torch.ones(65536, 2)
    (y,) = gmm([many.t()], [many], **{**SUMS, "group_list": FEW * 65536})
    assert torch.equal(y, torch.full((1, 2, 2), 65536.0))


def test_a_single_row_of_odd_strides_is_taken_for_a_transposed_view():
    odd = X[:1].as_strided((1, K), (1, 1))
    assert odd.is_contiguous()
    with pytest.raises(ContractError, match="x with strides"):
        gmm([odd], [STACK], **{**ROWS, "group_list": torch.tensor([1, 0, 0])})


def test_the_op_gives_no_gradient_and_says_so():
    x, weight = X.clone().requires_grad_(), STACK.clone().requires_grad_()
    for operands in ((x, STACK), (X, weight)):
        with pytest.warns(UserWarning, match="torch_npu has no gradient for npu::npu_grouped_matmul"):
            assert not gmm([operands[0]], [operands[1]], **ROWS)[0].requires_grad


@pytest.mark.parametrize(
    ("x", "weight", "kwargs"),
    [
        ([X], [STACK], ROWS),
        ([X], list(STACK), ROWS),
        ([X.t()], [random(M, N)], SUMS),
        ([X[:2], X[2:]], list(STACK[:2]), {"split_item": 2, "group_type": 0}),
        ([X[:2], X[2:]], list(STACK[:2]), {"split_item": 0, "group_type": -1}),
        ([X.t()], [random(2, N), random(5, N)], {"split_item": 0, "group_type": 2}),
    ],
)
def test_fake_and_meta_tensors_have_the_real_shapes(x, weight, kwargs):
    real = gmm(x, weight, **kwargs)
    mode = FakeTensorMode()
    for place, context in ((lambda t: t.to("meta"), torch.no_grad()), (mode.from_tensor, mode)):
        named = {key: place(v) if isinstance(v, torch.Tensor) else v for key, v in kwargs.items()}
        with context:
            promised = gmm([place(t) for t in x], [place(t) for t in weight], **named)
        assert [(t.shape, t.dtype, t.stride()) for t in promised] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_several_results_of_unknown_sizes_cannot_be_traced():
    kwargs = {**ROWS, "split_item": 0, "group_list": COUNTS.to("meta")}
    with pytest.raises(ContractError, match="a trace of several results"):
        gmm([X.to("meta")], list(STACK.to("meta")), **kwargs)
    with pytest.raises(ContractError, match="group_type None"):
        gmm([X.to("meta")], [STACK.to("meta")], **{**kwargs, "group_type": None})
