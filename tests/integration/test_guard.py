"""Calls the op cannot or must not take go to the original code; the others do not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn.utils import parametrize
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.imagegpt import modeling_imagegpt
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen3_next import modeling_qwen3_next

import npu_autopatch

NORMS = {
    "llama": modeling_llama.LlamaRMSNorm,
    "gemma2": modeling_gemma2.Gemma2RMSNorm,
    "gated": modeling_qwen3_next.Qwen3NextRMSNormGated,
}
FUSED, FUSED_BOTH = {"npu_rms_norm": 1}, {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}


def norm_of(cls: type[torch.nn.Module], weight: torch.dtype = torch.float32) -> Any:
    norm = cls(8)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 8))
    return norm.to(weight)


def inputs_of(norm: Any, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    count = type(norm).forward.__code__.co_argcount - 1
    return [torch.randn(*(shape or (2, 3, 8)), generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("name", NORMS)
def test_without_an_npu_the_backend_npu_runs_the_original_on_cpu_tensors(name: str, fused_calls: Any) -> None:
    from npu_autopatch import emulator

    emulator.install()  # so that the op exists
    norm = norm_of(NORMS[name])
    inputs = inputs_of(norm)
    expected = norm(*inputs)
    with npu_autopatch.patched():
        assert norm.forward.__npu_autopatch__
        with fused_calls() as count:
            assert torch.equal(norm(*inputs), expected)
        assert torch.compile(norm, fullgraph=True, backend="aot_eager")(*inputs).shape == expected.shape
    assert count == {}


# what patches otherwise stands before the first test with this one, or in another file
@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with npu_autopatch.patched(backend="emulate"):
        assert all(hasattr(vars(cls)["forward"], "__npu_autopatch__") for cls in NORMS.values())
        yield


def original(norm: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """What the unpatched class computes."""
    forward = type(norm).forward
    while hasattr(forward, "__npu_autopatch__"):
        forward = forward.__wrapped__
    return forward(norm, *inputs)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_every_pair_of_dtypes_gives_the_originals_dtypes(
    name: str, dtype: torch.dtype, weight: torch.dtype, patched: None, fused_calls: Any
) -> None:
    norm = norm_of(NORMS[name], weight)
    inputs = inputs_of(norm, dtype=dtype)
    expected = original(norm, *inputs)
    with fused_calls() as count:
        found = norm(*[x.requires_grad_() for x in inputs])
        found.float().sum().backward()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert (norm.weight.grad.dtype, inputs[0].grad.dtype) == (weight, dtype)
    assert count == FUSED_BOTH
    step = torch.finfo(dtype if dtype.itemsize <= weight.itemsize else weight).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=2 * step, atol=1e-6)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "every other row": lambda x: x[:, ::2],
    "every other value": lambda x: torch.cat((x, x), -1)[..., ::2],
    "a slice of a wider one": lambda x: torch.cat((x, x), -1)[..., 3:11],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "with the last dimension first in memory": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "off its storage's start": lambda x: x.flatten()[8:].view(-1, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMS)
def test_strided_inputs_give_the_same_values_and_gradients(
    name: str, layout: str, patched: None, fused_calls: Any
) -> None:
    norm = norm_of(NORMS[name])

    def run(forward: Any) -> list[torch.Tensor]:
        leaves = [x.requires_grad_() for x in inputs_of(norm, 2, 5, 8)]
        outcome = forward(*[LAYOUTS[layout](x) for x in leaves])
        (outcome * torch.arange(outcome.numel()).view(outcome.shape)).sum().backward()
        found = [outcome, *(x.grad for x in leaves), norm.weight.grad.clone()]
        norm.weight.grad = None
        return found

    expected = run(lambda *inputs: original(norm, *inputs))
    with fused_calls() as count:
        found = run(norm)
    assert count == FUSED_BOTH
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needed", ["weight", "input", "nothing"])
def test_gradients_are_computed_for_what_needs_them(needed: str, patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["llama"]).requires_grad_(needed == "weight")
    (x,) = inputs_of(norm)
    x.requires_grad_(needed == "input")
    with fused_calls() as count:
        outcome = norm(x)
        assert outcome.requires_grad == (needed != "nothing")
        if outcome.requires_grad:
            outcome.sum().backward()
    assert count == (FUSED if needed == "nothing" else FUSED_BOTH)
    assert (norm.weight.grad is not None, x.grad is not None) == (needed == "weight", needed == "input")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_fused_too(mode: Any, patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["gemma2"])
    with mode(), fused_calls() as count:
        (x,) = inputs_of(norm)
        outcome = norm(x)
    assert not outcome.requires_grad
    assert count == FUSED
    torch.testing.assert_close(outcome, original(norm, x.clone()).detach())


@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 8), (2, 1, 8), (2, 1, 1, 8), (3, 2, 5, 8)])
def test_shapes_of_models_are_fused(shape: tuple[int, ...], patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm, *shape)
    with fused_calls() as count:
        torch.testing.assert_close(norm(x), original(norm, x))
    assert count == FUSED


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 0, 8), (1, 1, 1, 1, 1, 1, 1, 2, 8)])
def test_shapes_the_op_does_not_take_run_the_original(shape: tuple[int, ...], patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm, *shape)
    with fused_calls() as count:
        assert torch.equal(norm(x), original(norm, x))
    assert count == {}


def test_a_weight_that_broadcasts_runs_the_original(patched: None, fused_calls: Any) -> None:
    norm = modeling_llama.LlamaRMSNorm(1)
    with fused_calls() as count:
        assert norm(torch.randn(2, 8)).shape == (2, 8)
    assert count == {}


class Helped(modeling_gemma2.Gemma2RMSNorm):
    """Overrides the helper its base's forward calls."""

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


class Unhelped(modeling_gemma2.Gemma2RMSNorm):
    def unrelated(self) -> None:
        pass


def test_a_subclass_that_overrides_what_its_base_computes_with_is_not_fused(patched: None, fused_calls: Any) -> None:
    norm = norm_of(Helped)
    (x,) = inputs_of(norm)
    with fused_calls() as count:
        found = norm(x)
    assert count == {}
    torch.testing.assert_close(found, x * 0.5 * (1 + norm.weight))


def test_a_subclass_that_does_not_is_fused(patched: None, fused_calls: Any) -> None:
    norm = norm_of(Unhelped)
    (x,) = inputs_of(norm)
    with fused_calls() as count:
        norm(x)
    assert count == FUSED


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_parametrized_weight_is_the_one_computed_with(patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm)
    plain = original(norm, x)
    parametrize.register_parametrization(norm, "weight", Doubled())
    with fused_calls() as count:
        found = norm(x)
        found.sum().backward()
    torch.testing.assert_close(found, plain * 2)
    assert norm.parametrizations.weight.original.grad is not None
    assert count == FUSED_BOTH


def test_weights_given_to_functional_call_are_those_computed_with(patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["gemma2"])
    (x,) = inputs_of(norm)
    other = copy.deepcopy(norm)
    with torch.no_grad():
        other.weight.mul_(-3)
    with fused_calls() as count:
        found = functional_call(norm, {"weight": other.weight.detach()}, (x,))
    torch.testing.assert_close(found, original(other, x))
    assert count == FUSED


def test_vmap_gives_right_results(patched: None) -> None:
    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm, 4, 3, 8)
    weights = torch.stack([norm.weight.detach() * factor for factor in (1, 2, 3, 4)])

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional_call(norm, {"weight": weight}, (x,)).pow(3).sum()

    def plain(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)).pow(3).sum()

    torch.testing.assert_close(vmap(norm)(x), original(norm, x))
    torch.testing.assert_close(vmap(loss)(weights, x), vmap(plain)(weights, x), rtol=1e-4, atol=1e-4)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this one process."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("input_too", [True, False])
def test_distributed_weights_run_the_original(input_too: bool, mesh: Any, patched: None, fused_calls: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm)
    expected = original(norm, x).detach()
    norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    with fused_calls() as count, implicit_replication():
        found = norm(distribute_tensor(x, mesh, [Replicate()]) if input_too else x)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor().detach(), expected)
    assert count == {}


def test_tensor_subclasses_run_the_original(patched: None, fused_calls: Any) -> None:
    class Mine(torch.Tensor):
        pass

    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm)
    with fused_calls() as count:
        found = norm(x.as_subclass(Mine))
    assert type(found) is Mine
    assert count == {}


def test_an_eps_changed_after_the_patch_is_the_one_computed_with(patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS["llama"])
    (x,) = inputs_of(norm)
    norm.variance_epsilon = 0.5
    with fused_calls() as count:
        torch.testing.assert_close(norm(x), original(norm, x))
    assert count == FUSED


def test_an_input_of_another_dtype_than_floats_fails_as_the_original_does(patched: None) -> None:
    norm = norm_of(NORMS["llama"])
    ids = torch.arange(16).view(2, 8)
    assert norm(ids).dtype == original(norm, ids).dtype
    with pytest.raises(RuntimeError) as expected:
        original(norm, torch.randn(2, 7))
    with pytest.raises(RuntimeError) as found:
        norm(torch.randn(2, 7))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("rank", [2, 5, 8])
@pytest.mark.parametrize("name", NORMS)
def test_all_ranks_that_the_op_differentiates_are_fused(name: str, rank: int, patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS[name])
    inputs = inputs_of(norm, *(2,) * (rank - 1), 8)
    with fused_calls() as count:
        found = norm(*inputs)
    assert count == FUSED
    torch.testing.assert_close(found, original(norm, *inputs))


@pytest.mark.parametrize("name", NORMS)
def test_torch_func_differentiates_a_patched_norm(name: str, patched: None, fused_calls: Any) -> None:
    norm = norm_of(NORMS[name])
    inputs = inputs_of(norm)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return functional_call(norm, {"weight": weight}, tuple(inputs)).pow(2).sum()

    weight = norm.weight.detach()
    with fused_calls() as count:
        found = torch.func.grad(loss)(weight)
    assert not count
    original(norm, *inputs).pow(2).sum().backward()
    torch.testing.assert_close(found, norm.weight.grad)


def test_torch_func_differentiates_a_norm_without_a_weight(patched: None, fused_calls: Any) -> None:
    norm, x = modeling_llama4.Llama4TextL2Norm(), torch.linspace(-1, 2, 16).reshape(2, 8)
    with fused_calls() as count:
        found = torch.func.grad(lambda x: norm(x).pow(3).sum())(x)
        assert not count
        leaf = x.clone().requires_grad_()
        norm(leaf).pow(3).sum().backward()
    assert count == FUSED_BOTH
    torch.testing.assert_close(found, leaf.grad)


def test_a_step_replaced_on_one_instance_is_followed(patched: None, fused_calls: Any) -> None:
    norm, other = norm_of(NORMS["gemma2"]), norm_of(NORMS["gemma2"])
    norm._norm = lambda x: x * 0.5
    x = torch.ones(2, 8)
    with fused_calls() as count:
        torch.testing.assert_close(norm(x), 0.5 * (1 + norm.weight.detach()).expand(2, 8))
        assert not count
        other(x)
    assert count == FUSED


def test_a_norm_on_the_meta_device_gives_a_shape(patched: None, fused_calls: Any) -> None:
    """Whose original rounds as autocast would have it; torch cannot be asked about autocast on that device."""
    norm = modeling_imagegpt.ImageGPTLayerNorm(8).to("meta")
    with fused_calls() as count:
        assert norm(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)
    assert count == FUSED
