"""Each call of a patched MLP: fused where the op is legal and pays, and else what the original computes."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderMLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

import npu_autopatch

HIDDEN, INNER = 12, 20
ORIGINAL = {
    cls: cls.forward for cls in (LlamaMLP, GlmMLP, MoonshineDecoderMLP, ModernBertMLP, T5DenseGatedActDense, SeedOssMLP)
}


def config(activation: str = "silu", dropout: float = 0.0):
    return SimpleNamespace(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        hidden_act=activation,
        hidden_activation=activation,
        mlp_bias=True,
        mlp_dropout=dropout,
        residual_dropout=dropout,
        d_model=HIDDEN,
        d_ff=INNER,
        dropout_rate=dropout,
        dense_act_fn=activation,
    )


def built(cls=LlamaMLP, activation: str = "silu", dropout: float = 0.0):
    torch.manual_seed(1)
    arguments = (config(activation, dropout),)
    return cls(*arguments, activation) if cls is MoonshineDecoderMLP else cls(*arguments)


def some(*shape: int, dtype=torch.float32, gradient: bool = True):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*(shape or (2, 3, HIDDEN)), generator=generator).to(dtype).requires_grad_(gradient)


@pytest.fixture(autouse=True, scope="module")
def patched():
    with npu_autopatch.patched(kernels="swiglu", backend="emulate"):
        assert all(hasattr(vars(cls)["forward"], "__npu_autopatch__") for cls in ORIGINAL)
        yield


@pytest.fixture
def no_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def original(mlp, *inputs):
    """What the unpatched class computes."""
    return ORIGINAL[type(mlp)](mlp, *inputs)


def assert_close(got, expected, dtype=torch.float32):
    assert (type(got), got.dtype, got.shape) == (type(expected), expected.dtype, expected.shape)
    torch.testing.assert_close(got, expected, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def gradients(mlp, x, forward):
    output = forward(mlp, x)
    return output, torch.autograd.grad(output.square().sum(), [x, *mlp.parameters()])


FUSED = {"npu_swiglu": 1, "npu_swiglu_backward": 1}
OF_GELU = {"npu_geglu": 1, "npu_geglu_grad": 1}


@pytest.mark.parametrize("cls", ORIGINAL)
@pytest.mark.parametrize(
    ("activation", "ops"),
    [
        ("silu", FUSED),
        ("swish", FUSED),
        ("gelu", OF_GELU),
        ("gelu_pytorch_tanh", OF_GELU),
        ("gelu_python", {}),
        ("gelu_new", {}),
        ("gelu_fast", {}),
        ("quick_gelu", {}),
        ("gelu_10", {}),
        ("relu2", {}),
        ("relu", {}),
        ("sigmoid", {}),
        ("tanh", {}),
        ("mish", {}),
    ],
)
def test_the_activation_of_the_instance_decides_forward_and_backward(cls, activation, ops, fused_calls):
    mlp, x = built(cls, activation), some()
    expected = gradients(mlp, x, original)
    with fused_calls() as count:
        found = gradients(mlp, x, type(mlp).__call__)
    assert count == ops
    if not ops:
        assert torch.equal(found[0], expected[0])
    assert_close(found[0], expected[0])
    for got, right in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_an_activation_swapped_on_a_live_module_takes_effect_at_once(fused_calls):
    mlp, x = built(), some()
    for activation, ops in (("silu", "npu_swiglu"), ("gelu", "npu_geglu"), ("relu", None), ("silu", "npu_swiglu")):
        mlp.act_fn = ACT2FN[activation]
        with fused_calls() as count:
            found = mlp(x)
        assert count == ({ops: 1} if ops else {})
        assert_close(found, original(mlp, x))


class OwnSiLU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class SubclassedSiLU(nn.SiLU):
    def forward(self, x):
        return super().forward(x).clamp(max=1)


def hooked(add):
    act = nn.SiLU()
    getattr(act, add)(lambda *args: None)
    return act


def with_forward(act):
    act.forward = lambda x: F.silu(x) * 2  # as kernelize sets it
    return act


def changed(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: nn.SiLU(), "npu_swiglu"),
        (lambda: F.silu, "npu_swiglu"),
        (lambda: F.gelu, "npu_geglu"),
        (lambda: nn.GELU(), "npu_geglu"),
        (lambda: nn.GELU("tanh"), "npu_geglu"),
        (lambda: SubclassedSiLU(), None),
        (lambda: hooked("register_forward_hook"), None),
        (lambda: hooked("register_forward_pre_hook"), None),
        (lambda: hooked("register_full_backward_hook"), None),
        (lambda: with_forward(nn.SiLU()), None),
        (lambda: with_forward(nn.GELU()), None),
        (lambda: changed(ACT2FN["gelu"], act=torch.tanh), None),
        (lambda: changed(nn.GELU(), approximate="tanh"), "npu_geglu"),
        (lambda: nn.Sequential(nn.SiLU()), None),
        (lambda: torch.tanh, None),
    ],
)
@pytest.mark.parametrize("cls", [LlamaMLP, GlmMLP])
def test_an_activation_that_is_watched_or_another_is_called(cls, make, op, fused_calls):
    mlp, x = built(cls), some()
    name = "act_fn" if cls is LlamaMLP else "activation_fn"
    delattr(mlp, name)
    setattr(mlp, name, make())
    with fused_calls() as count:
        found = mlp(x)
    assert count == ({op: 1} if op else {})
    assert_close(found, original(mlp, x))


def test_a_hook_on_the_activation_can_change_what_it_returns():
    mlp, x = built(), some()
    mlp.act_fn = nn.SiLU()
    mlp.act_fn.register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(mlp(x), mlp.down_proj.bias.expand(2, 3, HIDDEN))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_two_projections_run_the_original_and_one_is_fused(mode, fused_calls):
    for cls, ops in ((LlamaMLP, {}), (GlmMLP, {"npu_swiglu": 1}), (MoonshineDecoderMLP, {})):
        mlp, x = built(cls), some(gradient=False)
        with mode(), fused_calls() as count:
            found = mlp(x)
        assert count == ops
        with mode():
            assert_close(found, original(mlp, x))
    mlp = built(MoonshineDecoderMLP, "gelu")  # npu_geglu takes the second half as the activated one: no copy
    with mode(), fused_calls() as count:
        assert_close(mlp(x), original(mlp, x))
    assert count == {"npu_geglu": 1}


@pytest.mark.parametrize("frozen", ["x", "projections", "all", "gate", "up", "down"])
def test_gradients_are_computed_for_what_needs_them(frozen, fused_calls):
    mlp, x = built(), some(gradient=frozen not in ("x", "all", "projections"))
    for name, parameter in mlp.named_parameters():
        if frozen == "all" or name.startswith(frozen) or (frozen == "projections" and "down" not in name):
            parameter.requires_grad_(False)
    needed = [t for t in (x, *mlp.parameters()) if t.requires_grad]
    expected = original(mlp, x)
    with fused_calls() as count:
        found = mlp(x)
    assert count == ({} if frozen in ("all", "projections") else {"npu_swiglu": 1})
    assert_close(found, expected)
    if needed:
        for got, right in zip(
            torch.autograd.grad(found.sum(), needed), torch.autograd.grad(expected.sum(), needed), strict=True
        ):
            assert_close(got, right)


def test_hooks_on_projections_fire_once_in_order_and_change_what_flows(fused_calls):
    for cls, names in ((LlamaMLP, ("gate_proj", "up_proj", "down_proj")), (GlmMLP, ("gate_up_proj", "down_proj"))):
        mlp, x, fired = built(cls), some(), []

        def before(module, args, fired=fired):
            fired.append(module)

        def after(module, args, output, fired=fired):
            fired.append(module)
            return output * 2

        for name in names:
            getattr(mlp, name).register_forward_pre_hook(before)
            getattr(mlp, name).register_forward_hook(after)
        expected = original(mlp, x)
        order = fired[:]
        fired.clear()
        with fused_calls() as count:
            found = mlp(x)
        assert fired == order and len(order) == 2 * len(names)
        assert count == {"npu_swiglu": 1}
        assert_close(found, expected)


def test_a_projection_replaced_after_the_patch_is_the_one_called(fused_calls):
    mlp, x = built(), some()
    mlp.gate_proj = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Tanh())
    with fused_calls() as count:
        assert_close(mlp(x), original(mlp, x))
    assert count == {"npu_swiglu": 1}


class Quantised(nn.Module):
    """A projection that has no weight to read, and returns a dtype of its own."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.linear, self.dtype = [linear], dtype

    def forward(self, x):
        return self.linear[0](x).to(self.dtype)


@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("up", [torch.float32, torch.bfloat16, torch.float16])
def test_projections_of_any_dtypes_give_the_originals_dtype(gate, up, fused_calls):
    mlp, x = built(), some()
    mlp.gate_proj, mlp.up_proj = Quantised(mlp.gate_proj, gate), Quantised(mlp.up_proj, up)
    mlp.down_proj = nn.Identity()
    expected = original(mlp, x)
    with fused_calls() as count:
        found = mlp(x)
    assert count == ({"npu_swiglu": 1} if gate is up else {})
    assert_close(found, expected, torch.float16 if torch.float16 in (gate, up) else torch.bfloat16)


def test_projections_of_shapes_that_broadcast_run_the_original_expression(fused_calls):
    mlp, x = built(), some()
    mlp.up_proj = nn.Linear(HIDDEN, 1)
    with fused_calls() as count:
        assert torch.equal(mlp(x), original(mlp, x))
    assert count == {}


@pytest.mark.parametrize("order", ["patched", "before"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_lora_on_every_projection_gives_the_same_outputs_and_gradients(order, dropout, fused_calls):
    peft = pytest.importorskip("peft")

    def adapted():
        settings = peft.LoraConfig(
            r=4, lora_dropout=dropout, init_lora_weights=False, target_modules=["gate_proj", "up_proj", "down_proj"]
        )
        torch.manual_seed(6)
        return peft.get_peft_model(nn.ModuleDict({"mlp": built()}), settings).base_model.model["mlp"].train()

    def outcome(mlp, forward):
        torch.manual_seed(8)  # the masks of lora_dropout are drawn in the order of the calls
        x = some(gradient=False)
        output = forward(mlp, x)
        trained = [p for p in mlp.parameters() if p.requires_grad]
        assert len(trained) == 6
        return [output, *torch.autograd.grad(output.square().sum(), trained)]

    mlp = adapted()
    expected = outcome(mlp, original)
    with fused_calls() as count:
        found = outcome(mlp if order == "before" else adapted(), LlamaMLP.__call__)
    assert count == FUSED
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", ORIGINAL)
def test_autocast_gives_the_dtypes_it_gave(cls, weights, fused_calls):
    mlp, x = built(cls).to(weights), some(dtype=weights)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(mlp, x, original)
        with fused_calls() as count:
            found = gradients(mlp, x, type(mlp).__call__)
    assert count == FUSED
    assert found[0].dtype is expected[0].dtype
    assert [g.dtype for g in found[1]] == [g.dtype for g in expected[1]]
    torch.testing.assert_close(found[0], expected[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("cls", [T5DenseGatedActDense, ModernBertMLP, SeedOssMLP])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_the_mask_it_drew(cls, training, fused_calls):
    mlp, x = built(cls, dropout=0.4).train(training), some()
    torch.manual_seed(3)
    expected = original(mlp, x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with fused_calls() as count:
        found = mlp(x)
    assert count == {"npu_swiglu": 1}
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(found, expected)
    assert not training or not torch.allclose(found, mlp.eval()(x), atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 3, HIDDEN), (2, 0, HIDDEN)])
@pytest.mark.parametrize("cls", ORIGINAL)
def test_empty_inputs_run_the_original_expression(cls, shape, fused_calls):
    mlp, x = built(cls), some(*shape)
    with fused_calls() as count:
        found = mlp(x)
    assert count == {}
    assert_close(found, original(mlp, x))
    found.sum().backward()


@pytest.mark.parametrize("cls", ORIGINAL)
@pytest.mark.parametrize("rank", range(1, 8))
def test_every_rank_is_fused(cls, rank, fused_calls):
    mlp, x = built(cls), some(*[2] * (rank - 1), HIDDEN)
    with fused_calls() as count:
        found = mlp(x)
    assert count == {"npu_swiglu": 1}
    assert_close(found, original(mlp, x))


@pytest.mark.parametrize("cls", ORIGINAL)
def test_strided_inputs_and_projections_give_the_same(cls, fused_calls):
    mlp = built(cls)
    first = next(module for module in mlp.modules() if isinstance(module, nn.Linear))
    first.register_forward_hook(lambda module, args, out: out.transpose(0, 1).contiguous().transpose(0, 1))
    x = some(3, 2, HIDDEN).transpose(0, 1)
    with fused_calls() as count:
        found = mlp(x)
        found.sum().backward()
    assert count == FUSED
    assert_close(found, original(mlp, x))


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("cls", ORIGINAL)
def test_fake_and_meta_tensors_have_the_real_shapes(cls, device):
    real = built(cls)(some())
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        mlp = cls(*((config(), "silu") if cls is MoonshineDecoderMLP else (config(),)))
        found = mlp(torch.empty(2, 3, HIDDEN, requires_grad=True))
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("cls", ORIGINAL)
@pytest.mark.parametrize(("activation", "op"), [("silu", "npu_swiglu"), ("gelu", "npu_geglu"), ("relu2", "")])
@pytest.mark.parametrize("inference", [False, True])
def test_compiling_gives_one_graph_with_the_op_in_it(cls, activation, op, inference, no_compiled_code):
    mlp, graphs = built(cls, activation), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(mlp, backend=backend, fullgraph=True)
    x = some(gradient=not inference)
    with torch.no_grad() if inference else nullcontext():
        found = compiled(x)
        assert_close(found, original(mlp, x))
    (graph,) = graphs
    ops = [node.target._schema.name for node in graph.graph.nodes if "npu." in str(node.target)]
    one_product = cls in (GlmMLP, ModernBertMLP) or (cls is MoonshineDecoderMLP and activation == "gelu")
    assert ops == ([f"npu::{op}"] if op and (one_product or not inference) else [])
    if not inference:
        right = torch.autograd.grad(original(mlp, x).sum(), [x, *mlp.parameters()])
        for got, expected in zip(torch.autograd.grad(found.sum(), [x, *mlp.parameters()]), right, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_compiled_code_follows_an_activation_swapped_later(no_compiled_code):
    mlp, x = built(), some()
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    compiled(x)
    mlp.act_fn = ACT2FN["relu"]
    assert_close(compiled(x), original(mlp, x))


class Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass_runs_the_original(fused_calls):
    mlp, x = built(), some().detach().as_subclass(Subclass)
    with fused_calls() as count:
        found = mlp(x)
    assert count == {}
    assert type(found) is type(original(mlp, x))


def test_a_projection_that_returns_a_subclass_runs_the_original_expression(fused_calls):
    for cls, name in ((LlamaMLP, "up_proj"), (GlmMLP, "gate_up_proj")):
        mlp, x = built(cls), some()
        getattr(mlp, name).register_forward_hook(lambda module, args, out: out.as_subclass(Subclass))
        with fused_calls() as count:
            found = mlp(x)
        assert count == {}
        assert_close(found, original(mlp, x))


def test_torch_func_runs_the_original(fused_calls):
    mlp, x = built(), some().detach()
    with fused_calls() as count:
        found = torch.func.grad(lambda x: mlp(x).sum())(x)
        mapped = torch.func.vmap(mlp)(x)
    assert count == {}
    torch.testing.assert_close(found, torch.func.grad(lambda x: original(mlp, x).sum())(x))
    torch.testing.assert_close(mapped, original(mlp, x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda mlp: pickle.loads(pickle.dumps(mlp))])
def test_copies_are_fused_too(duplicate, fused_calls):
    mlp, x = built(), some()
    twin = duplicate(mlp)
    with fused_calls() as count:
        assert_close(twin(x), original(mlp, x))
    assert count == {"npu_swiglu": 1}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cls", [LlamaMLP, GlmMLP, T5DenseGatedActDense])
def test_gradient_checkpointing_gives_the_same_gradients(cls, reentrant, fused_calls):
    mlp, x = built(cls, dropout=0.4), some()
    torch.manual_seed(3)
    _, expected = gradients(mlp, x, original)
    torch.manual_seed(3)
    with fused_calls() as count:  # torch.autograd.grad does not go through a reentrant checkpoint
        checkpoint(mlp, x, use_reentrant=reentrant).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in mlp.parameters())]
    assert count["npu_swiglu_backward"] == 1
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_an_instance_with_a_forward_of_its_own_keeps_it(fused_calls):
    mlp, x = built(), some()
    mlp.forward = lambda x: x * 2
    with fused_calls() as count:
        assert torch.equal(mlp(x), x * 2)
    assert count == {}


def test_a_class_of_remote_code_brings_its_own_activation(fused_calls, tmp_path, monkeypatch):
    """A SiLU nobody else has is known in the module that defines or imports it."""
    import importlib.util
    import sys

    code = """
import torch
from torch import nn
class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)
class Capped(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x).clamp(max=0.9)
class NewMLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.w1, self.w3, self.w2, self.act = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8), act
    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))
"""
    name = "transformers.models.brandnew.modeling_brandnew"
    (tmp_path / "modeling_brandnew.py").write_text(code)
    spec = importlib.util.spec_from_file_location(name, tmp_path / "modeling_brandnew.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    with npu_autopatch.patched(kernels="swiglu", backend="emulate"):
        for act, ops in ((module.Swish(), {"npu_swiglu": 1}), (module.Capped(), {}), (OwnSiLU(), {})):
            with fused_calls() as count:
                module.NewMLP(act)(torch.randn(2, 8))
            assert count == ops
