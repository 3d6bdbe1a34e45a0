"""Each call of a patched rotary function: fused where it is legal, the original everywhere else, the same outcome."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen2_vl import modeling_qwen2_vl

import npu_autopatch

MODULES = {
    "half": (modeling_llama, "apply_rotary_pos_emb"),
    "half partial": (modeling_gpt_neox, "apply_rotary_pos_emb"),
    "interleaved": (modeling_cohere, "apply_rotary_pos_emb"),
    "interleaved first half": (modeling_glm4, "apply_rotary_pos_emb"),
    "interleaved in, half out": (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave"),
    "vision": (modeling_qwen2_vl, "apply_rotary_pos_emb_vision"),
}
ORIGINALS = {name: getattr(module, function) for name, (module, function) in MODULES.items()}
FORMS = [name for name in MODULES if name != "vision"]
TWO, BOTH = {"npu_rotary_mul": 2}, {"npu_rotary_mul": 2, "npu_rotary_mul_backward": 2}


def current(name: str) -> Any:
    module, function = MODULES[name]
    return getattr(module, function)


def inputs(
    rows: int = 2, length: int = 5, width: int = 16, dtype: torch.dtype = torch.float32, table: Any = None
) -> list[torch.Tensor]:
    """q and k of unlike numbers of heads, cos and sin whose halves differ."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(rows, heads, length, 16, generator=generator).to(dtype) for heads in (3, 4))
    angles = torch.randn(2, rows, length, width, generator=generator)
    return [q, k, angles[0].cos().to(table or dtype), angles[1].sin().to(table or dtype)]


def same(found: Any, expected: Any, exact: bool = False) -> None:
    assert type(found) is type(expected)
    for got, right in zip(found, expected, strict=True):
        assert (got.dtype, got.shape) == (right.dtype, right.shape)
        if exact:
            assert torch.equal(got, right)
        else:
            eps = torch.finfo(right.dtype).eps
            torch.testing.assert_close(got.double(), right.double(), rtol=0, atol=3 * eps * right.abs().max().item())


def test_cpu_tensors_run_the_original_under_the_backend_npu(fused_calls: Any) -> None:
    from npu_autopatch import emulator

    emulator.install()
    args = inputs()
    with npu_autopatch.patched(kernels="rope"), fused_calls() as count:
        assert current("half") is not ORIGINALS["half"]
        same(current("half")(*args), ORIGINALS["half"](*args), exact=True)
    assert count == {}


# what patches otherwise stands before the first test with this one
@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with npu_autopatch.patched(backend="emulate", kernels="rope"):
        yield


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_every_pair_of_dtypes_gives_the_originals(
    name: str, dtype: torch.dtype, table: torch.dtype, patched: None, fused_calls: Any
) -> None:
    args = inputs(dtype=dtype, table=table)
    with fused_calls() as count:
        found = current(name)(*args)
    same(found, ORIGINALS[name](*args))
    assert count == TWO


# What is not legal, or not what was proved: the original, bit for bit.
OTHERS: dict[str, Any] = {
    "double": lambda q, k, c, s: (q.double(), k.double(), c, s),
    "k of another dtype": lambda q, k, c, s: (q, k.bfloat16(), c, s),
    "cos and sin of unlike dtypes": lambda q, k, c, s: (q, k, c.bfloat16(), s),
    "cos needs a gradient": lambda q, k, c, s: (q, k, c.requires_grad_(), s),
    "sin needs a gradient": lambda q, k, c, s: (q, k, c, s.requires_grad_()),
    "empty": lambda q, k, c, s: (q[:, :, :0], k[:, :, :0], c[:, :0], s[:, :0]),
    "a subclass": lambda q, k, c, s: (q.as_subclass(Labelled), k, c, s),
    "a thousand heads": lambda q, k, c, s: (q[:, :1].repeat(1, 1000, 1, 1), k, c, s),
    "too wide": lambda q, k, c, s: tuple(t.repeat(*[1] * (t.dim() - 1), 56) for t in (q, k, c, s)),
}


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", FORMS)
def test_what_the_op_does_not_take_runs_the_original(name: str, other: str, patched: None, fused_calls: Any) -> None:
    args = OTHERS[other](*inputs())
    with fused_calls() as count:
        found = current(name)(*args)
    same(found, ORIGINALS[name](*args), exact=True)
    assert count == {}


def test_gradients_of_cos_and_sin_are_the_originals(patched: None) -> None:
    def gradients(function: Any) -> Any:
        args = [x.requires_grad_() for x in inputs()]
        q, k = function(*args)
        return torch.autograd.grad((q.sum() * 2, k.square().sum()), args)

    for got, right in zip(gradients(current("half")), gradients(ORIGINALS["half"]), strict=True):
        assert torch.equal(got, right)


def test_errors_are_the_originals(patched: None) -> None:
    q, k, cos, sin = inputs()
    for args, kwargs in [
        ((q, k, cos[..., :8], sin[..., :8]), {}),
        ((q, k, cos), {}),
        ((q, k, cos, sin), {"position": 1}),
        ((q[..., :15], k, cos, sin), {}),
    ]:
        with pytest.raises(Exception) as theirs:
            ORIGINALS["half"](*args, **kwargs)
        with pytest.raises(type(theirs.value)):
            current("half")(*args, **kwargs)


@pytest.mark.parametrize("name", FORMS)
def test_heads_after_the_tokens_and_keywords(name: str, patched: None, fused_calls: Any) -> None:
    q, k, cos, sin = inputs()
    q, k = q.transpose(1, 2), k.transpose(1, 2).contiguous()
    call = {"sin": sin, "k": k, "unsqueeze_dim": 2, "q": q, "cos": cos}
    with fused_calls() as count:
        found = current(name)(**call)
    same(found, ORIGINALS[name](**call))
    assert count == TWO
    parameters = list(inspect.signature(ORIGINALS[name]).parameters)
    if "position_ids" in parameters:  # transformers 4: it stands before unsqueeze_dim, and has no effect
        same(current(name)(q, k, cos, sin, torch.zeros(2, 5), 2), found)


_VIEWS = "views of [B, S, N, D]"


@pytest.mark.parametrize("strides", [_VIEWS, "contiguous", "of a fused projection", "expanded"])
@pytest.mark.parametrize("name", FORMS)
def test_strides(name: str, strides: str, patched: None, fused_calls: Any) -> None:
    """The values, and for attention's views the strides, so that what follows sees the memory it saw."""
    q, k, cos, sin = inputs(dtype=torch.bfloat16)
    if strides == _VIEWS:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    elif strides == "of a fused projection":
        both = torch.cat((q, k), 1).transpose(1, 2).contiguous()
        q, k = both[:, :, :3].transpose(1, 2), both[:, :, 3:].transpose(1, 2)
    elif strides == "expanded":
        q, cos, sin = q[:, :1].expand(-1, 3, -1, -1), cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1)
    with fused_calls() as count:
        found = current(name)(q, k, cos, sin)
    expected = ORIGINALS[name](q, k, cos, sin)
    same(found, expected)
    assert count == TWO
    if (name, strides) in (("half", "contiguous"), ("half", _VIEWS), ("interleaved", _VIEWS)):
        assert [x.stride() for x in found] == [x.stride() for x in expected]


@pytest.mark.parametrize("name", FORMS)
def test_a_decoded_token_a_long_prefix_and_one_row_of_angles(name: str, patched: None, fused_calls: Any) -> None:
    for rows, length in ((1, 1), (2, 1), (1, 5), (2, 5)):
        q, k, cos, sin = inputs(rows, length)
        with fused_calls() as count:
            found = current(name)(q, k, cos, sin)
            of_one_row = current(name)(q, k, cos[:1], sin[:1])
        same(found, ORIGINALS[name](q, k, cos, sin))
        same(of_one_row, ORIGINALS[name](q, k, cos[:1], sin[:1]))
        assert count == {"npu_rotary_mul": 4}


@pytest.mark.parametrize("needed", ["q", "k", "both", "none"])
def test_gradients_where_they_are_needed(needed: str, patched: None, fused_calls: Any) -> None:
    def run(function: Any) -> list[Any]:
        q, k, cos, sin = inputs()
        q.requires_grad_(needed in ("q", "both"))
        k.requires_grad_(needed in ("k", "both"))
        outcome = function(q, k, cos, sin)
        wanted = [x for x in outcome if x.requires_grad]
        if wanted:
            torch.autograd.backward([x.square().sum() for x in wanted])
        return [q.grad, k.grad, [x.requires_grad for x in outcome]]

    expected = run(ORIGINALS["half"])
    with fused_calls() as count:
        found = run(current("half"))
    backward = {"q": 1, "k": 1, "both": 2, "none": 0}[needed]
    assert count == {"npu_rotary_mul": 2} | ({"npu_rotary_mul_backward": backward} if backward else {})
    assert found[2] == expected[2]
    for got, right in zip(found[:2], expected[:2], strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            torch.testing.assert_close(got, right)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, patched: None, fused_calls: Any) -> None:
    with mode(), fused_calls() as count:
        args = inputs()
        same(current("half")(*args), ORIGINALS["half"](*args))
    assert count == TWO


def test_torch_func_runs_the_original(patched: None, fused_calls: Any) -> None:
    q, k, cos, sin = inputs()

    def loss(function: Any) -> Any:
        return lambda x: function(x, k, cos, sin)[0].square().sum()

    with fused_calls() as count:
        got = torch.func.grad(loss(current("half")))(q)
        mapped = torch.vmap(lambda x: current("half")(x[None], k[:1], cos[:1], sin[:1])[0])(q)
    torch.testing.assert_close(got, torch.func.grad(loss(ORIGINALS["half"]))(q))
    assert mapped.shape == (2, 1, 3, 5, 16)
    assert count == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_one_graph_with_the_op(name: str, dtype: torch.dtype, patched: None) -> None:
    torch._dynamo.reset()
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(sum(node.target is torch.ops.npu.npu_rotary_mul.default for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, _)

    function = current(name)
    compiled = torch.compile(lambda q, k, c, s: function(q, k, c, s, unsqueeze_dim=1), fullgraph=True, backend=backend)
    args = inputs(dtype=dtype)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in args[:2]]
    found = compiled(*strided, *args[2:])
    expected = function(*strided, *args[2:])
    same(found, expected)
    assert seen == [2]
    torch.autograd.backward([x.float().sum() for x in found])
    assert all(x.grad is not None for x in strided)
    torch._dynamo.reset()


def test_fake_tensors_have_the_shapes_of_the_originals(patched: None, fused_calls: Any) -> None:
    for name in FORMS:
        with FakeTensorMode() as mode, fused_calls() as count:
            args = [mode.from_tensor(x) for x in inputs(dtype=torch.bfloat16)]
            found, expected = current(name)(*args), ORIGINALS[name](*args)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
        assert count == TWO


def test_meta_tensors_run_the_original(patched: None) -> None:
    args = [x.to("meta") for x in inputs()]
    same_shapes = [(x.shape, x.dtype) for x in ORIGINALS["half"](*args)]
    assert [(x.shape, x.dtype) for x in current("half")(*args)] == same_shapes


def test_vision_takes_tokens_first_and_computes_in_fp32(patched: None, fused_calls: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(7, 3, 16, generator=generator).bfloat16() for _ in range(2))
    angles = torch.randn(2, 7, 16, generator=generator)
    args = (q, k, angles[0].cos(), angles[1].sin())
    with fused_calls() as count:
        found = current("vision")(*args)
    expected = ORIGINALS["vision"](*args)
    same(found, expected, exact=True)  # the same fp32 arithmetic, the same one rounding
    assert count == TWO


def test_complex_tables(patched: None, fused_calls: Any) -> None:
    original = inspect.unwrap(modeling_llama4.apply_rotary_emb)
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 5, heads, 16, generator=generator).bfloat16() for heads in (3, 4))
    table = torch.polar(torch.ones(2, 5, 8), torch.randn(2, 5, 8, generator=generator))
    with fused_calls() as count:
        found = modeling_llama4.apply_rotary_emb(q, k, table)
    same(found, original(q, k, table))
    assert count == TWO
    with fused_calls() as count:
        same(
            modeling_llama4.apply_rotary_emb(q, k, table.to(torch.complex128)),
            original(q, k, table.to(torch.complex128)),
            exact=True,
        )
    assert count == {}


@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_tables_above_one_as_yarn_and_longrope_make_them(scaling: float, patched: None, fused_calls: Any) -> None:
    q, k, cos, sin = inputs()
    with fused_calls() as count:
        found = current("half")(q, k, cos * scaling, sin * scaling)
    same(found, ORIGINALS["half"](q, k, cos * scaling, sin * scaling))
    assert count == TWO


def test_the_function_keeps_what_it_was(patched: None) -> None:
    function, original = current("half"), ORIGINALS["half"]
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__"):
        assert getattr(function, attribute) == getattr(original, attribute)
    assert inspect.signature(function) == inspect.signature(original)
    assert copy.deepcopy(function) is function
    assert pickle.loads(pickle.dumps(function)) is function


def test_autocast(patched: None, fused_calls: Any) -> None:
    for dtype, table in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        args = inputs(dtype=dtype, table=table)
        with torch.autocast("cpu", torch.bfloat16), fused_calls() as count:
            found, expected = current("half")(*args), ORIGINALS["half"](*args)
        same(found, expected)
        assert count == TWO
