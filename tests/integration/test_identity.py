"""A patched class is the class it was: for isinstance, state_dict, repr, signature, pickle, deepcopy and Trainer."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

import npu_autopatch

CLASSES = (
    modeling_llama.LlamaRMSNorm,
    modeling_gemma2.Gemma2RMSNorm,
    modeling_qwen3_next.Qwen3NextRMSNorm,
    modeling_qwen3_next.Qwen3NextRMSNormGated,
)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_patched_forward_says_of_itself_what_the_original_says(cls: type[torch.nn.Module]) -> None:
    original = vars(cls)["forward"]
    with npu_autopatch.patched(backend="emulate"):
        fused = vars(cls)["forward"]
        assert fused is not original
        assert type(fused) is type(original)
        for name in (
            "__name__",
            "__qualname__",
            "__module__",
            "__doc__",
            "__annotations__",
            "__defaults__",
            "__kwdefaults__",
        ):
            assert getattr(fused, name) == getattr(original, name), name
        assert inspect.signature(fused) == inspect.signature(original)
        assert (
            inspect.signature(fused, follow_wrapped=False).parameters.keys()
            == inspect.signature(original).parameters.keys()
        )
        assert inspect.getfullargspec(fused).args == inspect.getfullargspec(original).args
        assert fused.__code__.co_argcount == original.__code__.co_argcount
        assert fused.__wrapped__ is original


@pytest.mark.parametrize("cls", CLASSES)
def test_it_is_called_by_position_and_by_the_originals_keywords(cls: type[torch.nn.Module], fused_calls: Any) -> None:
    names = list(inspect.signature(cls.forward).parameters)[1:]
    inputs = [torch.randn(2, 8) for _ in names]
    norm = cls(8)
    expected = norm(*inputs)
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        torch.testing.assert_close(norm(*inputs), expected)
        torch.testing.assert_close(norm(**dict(zip(names, inputs, strict=True))), expected)
        for wrong in (lambda: norm(), lambda: norm(*inputs, 1, 2), lambda: norm(*inputs, nonsense=1)):
            with pytest.raises(TypeError):
                wrong()
    assert count == {"npu_rms_norm": 2}


def test_a_model_is_the_same_object_of_the_same_classes(tiny_model: Any, tokens: Any) -> None:
    model = tiny_model("Qwen3")
    kinds = [type(module) for module in model.modules()]
    state = {
        name: (tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    text, columns = repr(model), inspect.signature(model.forward)
    attributes = [sorted(vars(module)) for module in model.modules()]
    with npu_autopatch.patched(backend="emulate"):
        assert type(model.model.norm).forward.__npu_autopatch__
        model(tokens)
        assert [type(module) for module in model.modules()] == kinds
        assert all(isinstance(module, kind) for module, kind in zip(model.modules(), kinds, strict=True))
        assert isinstance(model.model.norm, transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm)
        assert {
            n: (t.data_ptr(), t.dtype, t.requires_grad) for n, t in model.state_dict(keep_vars=True).items()
        } == state
        assert (repr(model), inspect.signature(model.forward)) == (text, columns)
        assert [sorted(vars(module)) for module in model.modules()] == attributes
        assert repr(tiny_model("Qwen3")) == text


def test_modules_and_bound_methods_are_pickled_and_copied_across_the_patch(fused_calls: Any) -> None:
    norm, x = modeling_llama.LlamaRMSNorm(8), torch.randn(2, 8)
    before = pickle.dumps(norm)
    with npu_autopatch.patched(backend="emulate"):
        inside = pickle.dumps(norm)
        assert inside == before
        method = pickle.dumps(norm.forward)
        copies = [
            copy.deepcopy(norm),
            copy.copy(norm),
            pickle.loads(before),
            copy.deepcopy(norm.forward),
            pickle.loads(method),
        ]
        with fused_calls() as count:
            for each in copies:
                torch.testing.assert_close(each(x), norm(x))
        assert count == {"npu_rms_norm": 2 * len(copies)}
    assert pickle.loads(inside).forward.__func__ is pickle.loads(method).__func__ is modeling_llama.LlamaRMSNorm.forward
    with fused_calls() as count:
        pickle.loads(inside)(x)
    assert count == {}


def test_a_whole_model_saved_inside_a_block_loads_outside(tiny_model: Any, tokens: Any) -> None:
    model, buffer = tiny_model("Gemma2"), io.BytesIO()
    expected = model(tokens).logits
    with npu_autopatch.patched(backend="emulate"):
        assert type(model.model.norm).forward.__npu_autopatch__
        torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(tokens).logits, expected)


def test_the_trainer_keeps_the_columns_it_kept(tiny_model: Any, tmp_path: Any) -> None:
    def columns() -> list[str]:
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        trainer = transformers.Trainer(tiny_model("Qwen3"), arguments)
        trainer._set_signature_columns_if_needed()
        return list(trainer._signature_columns)

    expected = columns()
    assert "input_ids" in expected
    with npu_autopatch.patched(backend="emulate"):
        assert transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward.__npu_autopatch__
        assert columns() == expected


def test_the_source_of_a_patched_forward_is_still_found() -> None:
    source = inspect.getsource(modeling_llama.LlamaRMSNorm.forward)
    with npu_autopatch.patched(backend="emulate"):
        assert modeling_llama.LlamaRMSNorm.forward.__npu_autopatch__
        assert inspect.getsource(modeling_llama.LlamaRMSNorm.forward) == source
        assert inspect.getsource(modeling_llama.LlamaRMSNorm).count("def forward") == 1


@pytest.mark.parametrize("built", ["before", "inside"])
@pytest.mark.parametrize("saved", ["inside", "after"])
def test_a_whole_model_is_saved_wherever_it_was_built(built: str, saved: str, tiny_model: Any, tokens: Any) -> None:
    """Some versions of transformers give each attention the rotary function, which is pickled by its name."""
    buffer = io.BytesIO()
    expected = tiny_model("Llama")(tokens).logits
    model = tiny_model("Llama") if built == "before" else None
    with npu_autopatch.patched(backend="emulate"):
        model = model or tiny_model("Llama")
        if saved == "inside":
            torch.save(model, buffer)
    if saved == "after":
        torch.save(model, buffer)
    assert modeling_llama.apply_rotary_pos_emb.__module__ == modeling_llama.__name__
    assert not hasattr(modeling_llama.apply_rotary_pos_emb, "__npu_autopatch__")
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(tokens).logits, expected)
