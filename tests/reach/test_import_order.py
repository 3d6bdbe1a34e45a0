"""Whoever comes first: the patch, the import, the name somebody took, or the model."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import npu_autopatch

SCENARIO = """
    import {first}
    import npu_autopatch
    {before}
    import transformers
    {between}
    from transformers import Qwen3Config, Qwen3ForCausalLM, AutoModelForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm as held_elsewhere
    config = Qwen3Config(vocab_size=97, hidden_size=42, intermediate_size=58, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    models = [Qwen3ForCausalLM(config), AutoModelForCausalLM.from_config(config)]
    norm = held_elsewhere(8)

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += function is torch.ops.npu.npu_rms_norm.default
            return function(*args, **(kwargs or {{}}))

    with Count() as count:
        for model in models:
            model(torch.arange(6).view(2, 3))
        norm(torch.ones(2, 8))
    print(count.calls)
"""


@pytest.mark.parametrize("when", ["before", "between"])
def test_enable_reaches_models_imported_after_it(when: str, python: Callable[..., Any], norms: Any) -> None:
    places = dict.fromkeys(("before", "between"), "")
    places[when] = "npu_autopatch.enable(backend='emulate')"
    done = python(SCENARIO.format(first="sys", **places))
    assert (done.stdout.strip(), done.stderr) == (str(2 * norms["Qwen3"] + 1), "")


@pytest.mark.parametrize("first", ["transformers", "peft"])
def test_the_environment_reaches_models_whatever_is_imported_first(
    first: str, python: Callable[..., Any], norms: Any
) -> None:
    code = SCENARIO.format(first=first, before="", between="")
    done = python(code, started=True, NPU_AUTOPATCH="1", NPU_AUTOPATCH_BACKEND="emulate")
    assert done.stdout.strip() == str(2 * norms["Qwen3"] + 1), done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("npu_autopatch: ")
    assert "patched (rms_norm " in line


def test_a_norm_another_family_shares_is_patched_once(python: Callable[..., Any]) -> None:
    done = python(
        """
        import npu_autopatch
        npu_autopatch.enable(backend="emulate")
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as module
        import torch
        norm = getattr(module, "Qwen2RMSNorm", None) or module.Qwen2_5_VLRMSNorm
        patched = vars(norm)["forward"]
        assert patched.__npu_autopatch__ == "round_then_mul"
        assert not hasattr(patched.__wrapped__, "__npu_autopatch__")
        names = [row.name for row in npu_autopatch.report().sites]
        assert names.count("qwen2_5_vl.Qwen2_5_VLRMSNorm") + names.count("qwen2.Qwen2RMSNorm") >= 1, names
        assert len(names) == len(set(names)), names
        assert {row.state for row in npu_autopatch.report().sites} == {"patched"}, npu_autopatch.report()
        from transformers.models.qwen2 import modeling_qwen2
        assert vars(norm)["forward"] is patched
        npu_autopatch.disable()
        assert vars(norm)["forward"] is patched.__wrapped__
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("build", ["direct", "from_config", "model_init", "deepcopy"])
def test_every_way_of_building_a_model_is_reached(
    build: str, tiny_model: Any, tokens: Any, fused_calls: Any, norms: Any
) -> None:
    import copy

    with npu_autopatch.patched(backend="emulate"):
        model = tiny_model("Qwen3")
        if build == "from_config":
            model = transformers.AutoModelForCausalLM.from_config(model.config)
        elif build == "model_init":
            trainer = transformers.Trainer(
                model_init=lambda: tiny_model("Qwen3"),
                args=transformers.TrainingArguments(use_cpu=True, report_to="none"),
            )
            model = trainer.model
        elif build == "deepcopy":
            model = copy.deepcopy(model)
        with fused_calls() as count:
            model(tokens)
    assert count["npu_rms_norm"] == norms["Qwen3"]


def test_models_built_before_are_reached_and_let_go(tiny_model: Any, tokens: Any, fused_calls: Any, norms: Any) -> None:
    model = tiny_model("Llama")
    expected = model(tokens).logits
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        fused = model(tokens).logits
    assert count["npu_rms_norm"] == norms["Llama"]
    torch.testing.assert_close(fused, expected)
    with fused_calls() as count:
        assert torch.equal(model(tokens).logits, expected)
    assert count == {}


def test_classes_imported_by_name_before_are_reached(fused_calls: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm as HeldElsewhere

    norm, x = HeldElsewhere(8), torch.randn(2, 8)
    forward = norm.forward
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        norm(x)
        HeldElsewhere(8)(x)
        HeldElsewhere.forward(norm, x)
        forward(x)  # bound before: stays what it was
    assert count == {"npu_rms_norm": 3}


def test_saved_and_loaded_models_are_reached(
    tiny_model: Any, tokens: Any, fused_calls: Any, tmp_path: Path, norms: Any
) -> None:
    model = tiny_model("Llama")
    model.save_pretrained(tmp_path)
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    assert count["npu_rms_norm"] == 2 * norms["Llama"]


def test_the_pipelines_of_a_subclassed_model_are_reached(
    tiny_model: Any, tokens: Any, fused_calls: Any, norms: Any
) -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    config = tiny_model("Llama").config
    with npu_autopatch.patched(backend="emulate"), fused_calls() as count:
        Mine(config)(tokens)
    assert count["npu_rms_norm"] == norms["Llama"]


def test_a_module_imported_in_a_block_is_patched_and_restored(import_anew: Any) -> None:
    with npu_autopatch.patched(backend="emulate"):
        module = import_anew("olmo")
        again = import_anew("olmo2")
        assert again.Olmo2RMSNorm.forward.__npu_autopatch__ == "fp32_mul"
    assert not hasattr(again.Olmo2RMSNorm.forward, "__npu_autopatch__")
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_a_module_deleted_and_imported_again_is_patched_again(import_anew: Any) -> None:
    with npu_autopatch.patched(backend="emulate"):
        first, second = import_anew("olmo2").Olmo2RMSNorm, import_anew("olmo2").Olmo2RMSNorm
        assert first is not second
        assert second.forward.__npu_autopatch__ == "fp32_mul"
    assert not hasattr(first.forward, "__npu_autopatch__")
    assert not hasattr(second.forward, "__npu_autopatch__")


def test_a_reloaded_module_is_patched_again(import_anew: Any) -> None:
    with npu_autopatch.patched(backend="emulate"):
        module = import_anew("olmo2")
        old = module.Olmo2RMSNorm
        assert importlib.reload(module) is module
        assert module.Olmo2RMSNorm is not old
        assert module.Olmo2RMSNorm.forward.__npu_autopatch__ == "fp32_mul"
    assert not hasattr(module.Olmo2RMSNorm.forward, "__npu_autopatch__")
    assert not hasattr(old.forward, "__npu_autopatch__")


def test_a_reload_after_a_late_enable_is_patched_again(import_anew: Any) -> None:
    module = import_anew("olmo2")  # by its own loader
    with npu_autopatch.patched(backend="emulate"):
        importlib.reload(module)
        assert module.Olmo2RMSNorm.forward.__npu_autopatch__ == "fp32_mul"


@pytest.fixture
def halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A modeling module of a family that calls `halfway.act()` before its norm is defined."""
    hook = types.SimpleNamespace(act=lambda: None)
    package = "transformers.models.halfway"
    folder = tmp_path / "halfway"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "modeling_halfway.py").write_text(
        "import sys, torch\n"
        "class Early(torch.nn.Module):\n    pass\n"
        "sys.modules['transformers.models.halfway'].hook.act()\n"
        "class HalfwayRMSNorm(torch.nn.Module):\n"
        "    def __init__(self, size, eps=1e-6):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(size))\n"
        "        self.variance_epsilon = eps\n"
        "    def forward(self, x):\n"
        "        wide = x.float()\n"
        "        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)\n"
        "        return self.weight * wide.to(x.dtype)\n"
    )
    importlib.import_module("transformers.models")
    monkeypatch.setattr(transformers.models, "__path__", [*transformers.models.__path__, str(tmp_path)])
    importlib.import_module(package).hook = hook  # type: ignore[attr-defined]
    yield hook
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def test_enable_while_a_module_is_half_imported_patches_it_when_it_is_whole(halfway: Any) -> None:
    halfway.act = lambda: npu_autopatch.enable(backend="emulate")
    try:
        module = importlib.import_module("transformers.models.halfway.modeling_halfway")
        (row,) = [row for row in npu_autopatch.report().sites if row.name.startswith("halfway.")]
        assert (row.name, row.state) == ("halfway.HalfwayRMSNorm", "patched")
        assert module.HalfwayRMSNorm.forward.__npu_autopatch__ == "round_then_mul"
    finally:
        npu_autopatch.disable()
    assert not hasattr(module.HalfwayRMSNorm.forward, "__npu_autopatch__")


def test_the_next_import_finishes_a_module_that_was_half_imported(halfway: Any, import_anew: Any) -> None:
    halfway.act = lambda: npu_autopatch.enable(backend="emulate")
    try:
        module = importlib.import_module("transformers.models.halfway.modeling_halfway")
        import_anew("olmo2")
        assert module.HalfwayRMSNorm.forward.__npu_autopatch__ == "round_then_mul"
    finally:
        npu_autopatch.disable()


def test_a_module_that_fails_halfway_keeps_its_error_and_is_patched_on_the_next_try(halfway: Any) -> None:
    def fail() -> None:
        raise KeyError("theirs")

    name = "transformers.models.halfway.modeling_halfway"
    halfway.act = fail
    with npu_autopatch.patched(backend="emulate"):
        with pytest.raises(KeyError, match="theirs"):
            importlib.import_module(name)
        assert name not in sys.modules
        halfway.act = lambda: None
        assert importlib.import_module(name).HalfwayRMSNorm.forward.__npu_autopatch__ == "round_then_mul"


def test_looking_for_a_module_neither_imports_nor_patches_it() -> None:
    name = "transformers.models.olmo2.modeling_olmo2"
    present = sys.modules.pop(name, None)
    try:
        with npu_autopatch.patched(backend="emulate"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert name not in sys.modules
    finally:
        if present is not None:
            sys.modules[name] = present
