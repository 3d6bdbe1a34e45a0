"""A grouped linear layer gives exact rows and gradients, rounded once, and computes and keeps only what is needed."""

from __future__ import annotations

import itertools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from npu_autopatch import emulator
from npu_autopatch.ops import grouped_matmul as ops
from npu_autopatch.ops.capability import Capability
from tests.counting import Fused
from tests.kernels.exact import error_in_ulps

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
K, N = 6, 10
COUNTS = (3, 0, 5, 1, 0)
EXPERTS = {
    "unequal": COUNTS,
    "one expert": (4,),
    "one token": (0, 0, 1),
    "all to one": (0, 9, 0, 0),
    "512 experts": (*(0, 1, 2, 0) * 127, 3, 0, 0, 1),
}
FORMS = [(listed, transposed) for listed in (False, True) for transposed in (False, True)]
each_form = pytest.mark.parametrize(
    ("listed", "transposed"), FORMS, ids=[f"{'list' if a else 'stack'} {'KN' if b else 'NK'}" for a, b in FORMS]
)


@pytest.fixture(autouse=True)
def installed():
    emulator.install()
    torch._dynamo.reset()


class Layer:
    """Operands in `dtype`, everything trained; the layer itself, and its exact rows."""

    def __init__(self, sizes=COUNTS, dtype=torch.float32, listed=False, transposed=False, biased=False, past=0):
        source = torch.Generator().manual_seed(0)
        shape = (len(sizes), K, N) if transposed else (len(sizes), N, K)

        def drawn(*shape):
            return torch.randn(shape, generator=source).to(dtype).requires_grad_()

        self.counts, self.transposed, self.listed = torch.tensor(sizes), transposed, listed
        self.x, self.weight = drawn(sum(sizes) + past, K), drawn(*shape)
        self.bias = drawn(len(sizes), N) if biased else None
        self.dy = torch.randn(sum(sizes) + past, N, generator=source).to(dtype)
        self.tail = torch.arange(sum(sizes) + past).unsqueeze(1) >= sum(sizes) if past else None

    @property
    def trained(self):
        return [self.x, self.weight, *([] if self.bias is None else [self.bias])]

    def __call__(self, x=None):
        x = self.x if x is None else x
        if self.listed:
            biases = None if self.bias is None else self.bias.unbind(0)
            return ops.grouped_linear_list(x, self.weight.unbind(0), self.counts, biases, self.transposed)
        return ops.grouped_linear(x, self.weight, self.counts, self.bias, self.transposed, self.tail)

    def exact(self):
        """The rows, and the gradients of what is trained, in fp64."""
        x, weight, *bias = (t.detach().double().requires_grad_() for t in self.trained)
        rows, start = [], 0
        for expert, size in enumerate(self.counts.tolist()):
            w = weight[expert] if self.transposed else weight[expert].t()
            rows.append(x[start : start + size] @ w + (bias[0][expert] if bias else 0))
            start += size
        rows.append(x[start:] * 0 @ torch.zeros(K, N, dtype=torch.float64))
        y = torch.cat(rows)
        return y, torch.autograd.grad(y, (x, weight, *bias), self.dy.double())


def assert_exact(layer, y, gradients):
    right, rights = layer.exact()
    for got, want in zip((y, *gradients), (right, *rights), strict=True):
        assert (got.dtype, got.shape) == (layer.x.dtype, want.shape)
        assert error_in_ulps(got.detach(), want.detach(), got.dtype) <= 0.51


def gradients_of(layer, y, dy=None):
    return torch.autograd.grad(y, layer.trained, layer.dy if dy is None else dy)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@each_form
def test_rows_and_gradients_are_the_exact_ones_rounded_once(dtype, biased, listed, transposed):
    layer = Layer(dtype=dtype, biased=biased, listed=listed, transposed=transposed)
    with Fused() as fused:
        y = layer()
        gradients = gradients_of(layer, y)
    assert fused.calls == {"npu_grouped_matmul": 4 if biased else 3}
    assert_exact(layer, y, gradients)


@pytest.mark.parametrize("sizes", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_any_number_of_experts_and_of_rows(sizes, transposed):
    layer = Layer(sizes, torch.bfloat16, biased=True, transposed=transposed)
    y = layer()
    assert_exact(layer, y, gradients_of(layer, y))


@pytest.mark.parametrize("sizes", [(4,), (2, 0), (1,) * 128], ids=str)
def test_a_list_of_one_expert_and_of_as_many_as_may_be(sizes):
    layer = Layer(sizes, listed=True, biased=True)
    y = layer()
    assert_exact(layer, y, gradients_of(layer, y))


@each_form
def test_the_gradient_of_an_expert_without_rows_is_zeros_and_no_missing_tensor(listed, transposed):
    layer = Layer(listed=listed, transposed=transposed)
    weights = [w.detach().requires_grad_() for w in layer.weight] if listed else [layer.weight]
    call = ops.grouped_linear_list if listed else ops.grouped_linear
    call(layer.x, weights if listed else weights[0], layer.counts, transposed=transposed).sum().backward()
    gradients = [w.grad for w in weights] if listed else list(weights[0].grad)
    for gradient, size in zip(gradients, COUNTS, strict=True):
        assert bool(gradient.any()) == bool(size)


@pytest.mark.parametrize("needed", itertools.product([False, True], repeat=3), ids=str)
@each_form
def test_a_product_is_launched_only_for_a_gradient_that_is_needed(needed, listed, transposed):
    layer = Layer(biased=True, listed=listed, transposed=transposed)
    for tensor, wanted in zip(layer.trained, needed, strict=True):
        tensor.requires_grad_(wanted)
    with Fused() as forward:
        y = layer()
    assert forward.calls == {"npu_grouped_matmul": 1}
    assert y.requires_grad == any(needed)
    if any(needed):
        with Fused() as backward:
            y.backward(layer.dy)
        assert backward.calls == {"npu_grouped_matmul": sum(needed)}
    for tensor, wanted, want in zip(layer.trained, needed, layer.exact()[1], strict=True):
        assert (tensor.grad is not None) == wanted
        assert not wanted or torch.allclose(tensor.grad, want.float(), atol=1e-5)


def test_of_a_list_only_the_trained_experts_get_a_gradient():
    layer = Layer()
    weights = [w.detach().requires_grad_(place != 1) for place, w in enumerate(layer.weight)]
    ops.grouped_linear_list(layer.x, weights, layer.counts).backward(layer.dy)
    assert [w.grad is not None for w in weights] == [True, False, True, True, True]
    assert torch.allclose(weights[2].grad, layer.exact()[1][1][2].float(), atol=1e-5)


@pytest.mark.parametrize(
    ("needed", "kept"), [("x", {"weight"}), ("weight", {"x"}), ("bias", set()), ("x weight bias", {"x", "weight"})]
)
def test_only_what_the_gradients_need_is_kept(needed, kept):
    layer = Layer(biased=True)
    named = dict(zip(("x", "weight", "bias"), layer.trained, strict=True))
    for name, tensor in named.items():
        tensor.requires_grad_(name in needed.split())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer()
    found = {name for name, tensor in named.items() if tensor.data_ptr() in saved}
    assert found == kept
    assert len(saved) == len(kept) + 1, "the counts and nothing else"


class Recorded(TorchDispatchMode):
    """The names of all ops run, and the memory that the weights of the products lie in."""

    def __init__(self):
        super().__init__()
        self.names, self.memory = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        if function is torch.ops.npu.npu_grouped_matmul.default and kwargs["group_type"] == 0:
            self.memory += [weight.untyped_storage().data_ptr() for weight in args[1]]
        return function(*args, **(kwargs or {}))


@each_form
def test_no_weight_is_copied(listed, transposed):
    layer = Layer(listed=listed, transposed=transposed)
    with Recorded() as recorded:
        y = layer()
        gradients_of(layer, y)
    assert set(recorded.memory) == {layer.weight.untyped_storage().data_ptr()}
    assert not [name for name in recorded.names if "copy" in name or "clone" in name]


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
@each_form
def test_an_incoming_gradient_may_have_any_strides(kind, listed, transposed):
    layer = Layer(biased=True, listed=listed, transposed=transposed)
    rows = layer.x.size(0)
    layer.dy = {
        "expanded": torch.tensor(0.7).expand(rows, N),
        "transposed": torch.randn(N, rows).t(),
        "sliced": torch.randn(rows, 2 * N)[:, ::2],
    }[kind]
    y = layer()
    assert_exact(layer, y, gradients_of(layer, y))


@pytest.mark.parametrize("stride", [1, 7])
def test_a_single_row_may_have_any_stride(stride):
    layer = Layer((0, 1))
    layer.x = layer.x.detach().as_strided((1, K), (stride, 1)).requires_grad_()
    layer.dy = layer.dy.as_strided((1, N), (stride, 1))
    y = layer()
    assert_exact(layer, y, gradients_of(layer, y))


def test_x_may_have_any_strides():
    layer = Layer(biased=True)
    layer.x = torch.randn(K, sum(COUNTS)).t().requires_grad_()
    y = layer()
    assert_exact(layer, y, gradients_of(layer, y))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_past_the_last_group_are_zero_and_touch_nothing(dtype, transposed):
    """Not the rows that the op leaves unwritten, nor what stands in `x` and in the incoming gradient there."""
    layer = Layer(dtype=dtype, transposed=transposed, biased=True, past=4)
    with torch.no_grad():
        layer.x[-4:], layer.dy[-4:] = float("nan"), float("nan")
    y = layer()
    gradients = gradients_of(layer, y)
    assert not y[-4:].any()
    assert not gradients[0][-4:].any()
    with torch.no_grad():
        layer.x[-4:], layer.dy[-4:] = 0, 0
    assert_exact(layer, y, gradients)


def test_without_a_tail_the_op_leaves_those_rows_unwritten():
    layer = Layer(past=2)
    layer.tail = None
    assert layer()[-2:].isnan().all()


def test_no_rows_give_no_rows_and_zeros():
    layer = Layer((0, 0), biased=True)
    y = layer()
    assert y.shape == (0, N)
    dx, dweight, dbias = gradients_of(layer, y)
    assert (dx.shape, dweight.any(), dbias.any()) == ((0, K), False, False)


@pytest.mark.parametrize("reentrant", [False, True])
@each_form
def test_a_checkpoint_may_be_run_twice(reentrant, listed, transposed):
    layer = Layer(biased=True, listed=listed, transposed=transposed)
    for _ in range(2):
        for tensor in layer.trained:
            tensor.grad = None
        y = checkpoint(layer, layer.x, use_reentrant=reentrant)
        y.backward(layer.dy)
        assert_exact(layer, y, [tensor.grad for tensor in layer.trained])


def test_one_graph_may_be_differentiated_twice():
    layer = Layer(biased=True)
    y = layer()
    first = torch.autograd.grad(y, layer.trained, layer.dy, retain_graph=True)
    for a, b in zip(first, gradients_of(layer, y), strict=True):
        assert torch.equal(a, b)


def test_a_first_derivative_comes_without_the_warning_of_an_op_that_has_none(recwarn):
    layer = Layer(biased=True)
    gradients_of(layer, layer())
    assert not recwarn.list


def test_a_second_derivative_is_refused_and_never_silently_wrong():
    layer = Layer()
    (dx,) = torch.autograd.grad(layer().square().sum(), layer.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_form
def test_nothing_is_kept_where_no_gradient_can_be_asked_for(mode, listed, transposed):
    layer = Layer(biased=True, listed=listed, transposed=transposed)
    saved = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t), Fused() as fused:
        y = layer()
    assert y.grad_fn is None
    assert not saved
    assert fused.calls == {"npu_grouped_matmul": 1}
    assert error_in_ulps(y.clone(), layer.exact()[0].detach(), y.dtype) <= 0.51


def test_deterministic_mode_changes_nothing():
    layer = Layer(biased=True, past=2)
    y = layer()
    want = (y, *gradients_of(layer, y))
    torch.use_deterministic_algorithms(True)
    try:
        y = layer()
        got = (y, *gradients_of(layer, y))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


class Products:
    """A backend that counts the op in the forward and in the backward graph."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, graph, inputs):
        def counting(into):
            def compiler(graph, inputs):
                found = sum(n.target is torch.ops.npu.npu_grouped_matmul.default for n in graph.graph.nodes)
                into.append(found)
                return make_boxed_func(graph.forward)

            return compiler

        backend = aot_autograd(fw_compiler=counting(self.forward), bw_compiler=counting(self.backward))
        return backend(graph, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@each_form
def test_the_layer_compiles_whole_with_its_gradients(dtype, frozen, listed, transposed):
    layer = Layer(dtype=dtype, biased=True, listed=listed, transposed=transposed, past=0 if listed else 2)
    weights = [w.detach().requires_grad_(not frozen) for w in layer.weight]
    biases = [b.detach().requires_grad_(not frozen) for b in layer.bias]

    def run(x, weights, biases):
        if listed:
            return ops.grouped_linear_list(x, weights, layer.counts, biases, transposed).sin()
        return ops.grouped_linear(x, weights[0], layer.counts, biases[0], transposed, layer.tail).sin()

    if not listed:
        weights = [layer.weight.detach().requires_grad_(not frozen)]
        biases = [layer.bias.detach().requires_grad_(not frozen)]
    trained = [layer.x, *([] if frozen else [*weights, *biases])]
    y = run(layer.x, weights, biases)
    want = (y, *torch.autograd.grad(y, trained, layer.dy))
    products = Products()
    y = torch.compile(run, fullgraph=True, backend=products)(layer.x, weights, biases)
    got = (y, *torch.autograd.grad(y, trained, layer.dy))
    assert (products.forward, products.backward) == ([1], [1 if frozen else 3])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_a_compiled_layer_takes_another_number_of_rows():
    first, second = Layer((3, 4)), Layer((9, 2))
    run = torch.compile(ops.grouped_linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for layer in (first, second):
        y = run(layer.x, layer.weight, layer.counts)
        assert_exact(layer, y, gradients_of(layer, y))


@each_form
def test_fake_tensors_have_the_real_shapes_and_dtypes(listed, transposed):
    layer = Layer(dtype=torch.bfloat16, biased=True, listed=listed, transposed=transposed)
    y = layer()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Layer(dtype=torch.bfloat16, biased=True, listed=listed, transposed=transposed)
        fake.x, fake.counts = (mode.from_tensor(t.detach()) for t in (layer.x, layer.counts))
        fake.x.requires_grad_()
        fake_y = fake()
        fakes = (fake_y, *gradients_of(fake, fake_y))
    for got, real in zip(fakes, (y, *gradients_of(layer, y)), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each_form
def test_the_reference_is_the_op_with_its_gradients(dtype, listed, transposed):
    layer = Layer(dtype=dtype, biased=True, listed=listed, transposed=transposed, past=0 if listed else 3)
    reference = ops.REFERENCE
    y = layer()
    got = (y, *gradients_of(layer, y))
    if listed:
        biases = layer.bias.unbind(0)
        y = reference.grouped_linear_list(layer.x, layer.weight.unbind(0), layer.counts, biases, transposed)
    else:
        y = reference.grouped_linear(layer.x, layer.weight, layer.counts, layer.bias, transposed, layer.tail)
    for a, b in zip(got, (y, *gradients_of(layer, y)), strict=True):
        assert a.dtype is b.dtype
        assert torch.allclose(a.double(), b.double(), rtol=2 * torch.finfo(dtype).eps, atol=4e-6)


X, W = torch.ones(4, K), torch.ones(3, N, K)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_legal(dtype):
    x, w = X.to(dtype), W.to(dtype)
    for weight in (w, w[0], torch.nn.Parameter(w)):
        assert ops.legal(x, weight)
    assert ops.legal(x.unflatten(0, (2, 2)), w), "rows that are not yet flattened"
    assert ops.legal(x, w, torch.ones(3, N, dtype=dtype))


class Sub(torch.Tensor):
    """A tensor of another type."""


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (X.double(), W.double()),
        (X, W.bfloat16()),
        (X, W.transpose(1, 2)),
        (X, W[0].t()),
        (X, W[0, 0]),
        (X, W[None]),
        (X.to("meta"), W),
        (X[:0], W),
        (X, W[:0]),
        (X, torch.ones(1025, 1, 1)),
        (X, torch.empty(1, 1, 65536)),
        (X, torch.empty(65536, 1)),
        (X.as_subclass(Sub), W),
        (X, W.as_subclass(Sub)),
    ],
)
def test_what_is_not_legal(x, weight):
    assert not ops.legal(x, weight)


def test_a_bias_is_of_the_dtype_of_the_rows():
    assert not ops.legal(X, W, torch.ones(3, N).bfloat16())
    assert not ops.legal(X, W, torch.ones(3, N).as_subclass(Sub))


def test_the_op_is_there_though_it_has_no_gradient():
    assert ops.capability() == Capability("npu_grouped_matmul", "", False)


def test_where_the_meta_kernel_refuses_the_gradient_of_weights_a_compiler_is_told(monkeypatch):
    def refuse(*_, group_type, **__):
        raise RuntimeError(f"group_type {group_type}")

    assert ops.traces()
    monkeypatch.setattr(torch.ops.npu.npu_grouped_matmul, "default", refuse)
    assert not ops.traces()
