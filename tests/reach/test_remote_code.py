"""Remote code: classes of a model's own repository, loaded by `trust_remote_code`, are patched on every load."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

import npu_autopatch

CONFIGURATION = """
    from transformers import PretrainedConfig

    class OddConfig(PretrainedConfig):
        model_type = "odd_one"

        def __init__(self, width=24, tick=1e-5, **rest):
            self.width, self.tick = width, tick
            super().__init__(**rest)
"""
SCALER = """
    import torch

    class Scaler(torch.nn.Module):
        def __init__(self, width, tick):
            super().__init__()
            self.gains = torch.nn.Parameter(torch.ones(width))
            self.tick = tick

        def forward(self, stream):
            wide = stream.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tick)
            return self.gains * wide.to(stream.dtype)
"""
MODELING = """
    import torch
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput
    from .configuration_odd import OddConfig
    from .scaling import Scaler

    class Evener(torch.nn.Module):
        def __init__(self, width, tick=1e-5):
            super().__init__()
            self.gains = torch.nn.Parameter(torch.ones(width))
            self.tick = tick

        def forward(self, stream):
            wide = stream.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tick)
            return (self.gains.float() * wide).to(stream.dtype)

    class OddForCausalLM(PreTrainedModel):
        config_class = OddConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed = torch.nn.Embedding(97, config.width)
            self.first = Evener(config.width, config.tick)
            self.second = Scaler(config.width, config.tick)
            self.head = torch.nn.Linear(config.width, 97, bias=False)
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, input_ids, **kwargs):
            return CausalLMOutput(logits=self.head(self.second(self.first(self.embed(input_ids)))))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A saved model with code of its own; transformers keeps its copies of that code in tmp_path too."""
    cache = str(tmp_path / "modules")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "path", list(sys.path))
    present = {name for name in sys.modules if name.startswith("transformers_modules")}
    assert not present
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, code in {"configuration_odd": CONFIGURATION, "scaling": SCALER, "modeling_odd": MODELING}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    (folder / "config.json").write_text(
        '{"model_type": "odd_one", "width": 24, "auto_map": {"AutoConfig": "configuration_odd.OddConfig", '
        '"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}}'
    )
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def from_config(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def from_pretrained(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture
def saved(folder: Path) -> Path:
    """`folder` with weights."""
    torch.save({"unused": torch.zeros(1)}, folder / "ignored.bin")
    model = from_config(folder)
    model.save_pretrained(folder / "weights")
    for file in (folder / "weights").glob("*.safetensors"):
        file.rename(folder / file.name)
    return folder


def calls(model: Any, fused_calls: Any) -> dict[str, int]:
    with fused_calls() as count:
        model(torch.arange(6).view(2, 3))
    return dict(count)


@pytest.mark.parametrize("load", [from_config, from_pretrained])
def test_both_files_of_remote_code_are_patched(load: Callable[[Path], Any], saved: Path, fused_calls: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    with npu_autopatch.patched(backend="emulate"):
        model = load(saved)
        assert calls(model, fused_calls) == {"npu_rms_norm": 2}
        rows = {
            row.name.rpartition(".")[2]: row
            for row in npu_autopatch.report().sites
            if row.module == type(model.first).__module__
        }
        rows |= {
            row.name.rpartition(".")[2]: row
            for row in npu_autopatch.report().sites
            if row.module == type(model.second).__module__
        }
        assert {name: (row.state, row.variant) for name, row in rows.items()} == {
            "Evener": ("patched", "fp32_mul"),
            "Scaler": ("patched", "round_then_mul"),
        }
    assert calls(model, fused_calls) == {}


def test_remote_code_loaded_before_is_patched(folder: Path, fused_calls: Any) -> None:
    model = from_config(folder)
    with npu_autopatch.patched(backend="emulate"):
        assert calls(model, fused_calls) == {"npu_rms_norm": 2}
    assert calls(model, fused_calls) == {}


def test_every_load_of_the_same_code_is_patched(folder: Path, fused_calls: Any) -> None:
    with npu_autopatch.patched(backend="emulate"):
        models = [from_config(folder) for _ in range(3)]
        assert [calls(model, fused_calls) for model in models] == [{"npu_rms_norm": 2}] * 3
        patched = type(models[0].first).forward
        assert not hasattr(patched.__wrapped__, "__npu_autopatch__")  # once


def by_class(folder: Path, **options: Any) -> Any:
    cls = dynamic_module_utils.get_class_from_dynamic_module("modeling_odd.OddForCausalLM", folder, **options)
    return cls(cls.config_class())


def test_code_executed_anew_without_a_change_is_patched(folder: Path, fused_calls: Any) -> None:
    with npu_autopatch.patched(backend="emulate"):
        first, second = by_class(folder), by_class(folder, force_download=True)
        assert type(second.first) is not type(first.first)
        assert calls(second, fused_calls) == {"npu_rms_norm": 2}
    assert calls(second, fused_calls) == calls(first, fused_calls) == {}


@pytest.mark.parametrize("changed", ["modeling_odd", "scaling"])
def test_a_load_after_a_file_changed_is_patched(changed: str, folder: Path, fused_calls: Any) -> None:
    with npu_autopatch.patched(backend="emulate"):
        first = by_class(folder)
        file = folder / f"{changed}.py"
        file.write_text(file.read_text() + "\nCHANGED = True\n")
        second = by_class(folder)
        assert type(second.first) is not type(first.first)
        assert calls(second, fused_calls) == {"npu_rms_norm": 2}
    assert calls(second, fused_calls) == calls(first, fused_calls) == {}


def test_a_site_of_remote_code_is_skipped_by_its_family(folder: Path, fused_calls: Any) -> None:
    with npu_autopatch.patched(backend="emulate", skip="*Evener"):
        assert calls(from_config(folder), fused_calls) == {"npu_rms_norm": 1}
        (row,) = [row for row in npu_autopatch.report().sites if row.name.endswith("Evener") and row.state == "skipped"]
        assert "*Evener" in row.reason


def test_the_loader_of_remote_code_is_itself_again_after_a_block() -> None:
    holders = [
        module for module in list(sys.modules.values()) if "get_class_in_module" in getattr(module, "__dict__", {})
    ]
    before = [vars(module)["get_class_in_module"] for module in holders]
    with npu_autopatch.patched(backend="emulate"):
        assert dynamic_module_utils.get_class_in_module is not before[holders.index(dynamic_module_utils)]
    assert all(
        vars(module)["get_class_in_module"] is original for module, original in zip(holders, before, strict=True)
    )


def test_errors_of_remote_code_stay_its_own(folder: Path) -> None:
    (folder / "modeling_odd.py").write_text("raise LookupError('theirs')\n")
    with npu_autopatch.patched(backend="emulate"), pytest.raises(LookupError, match="theirs"):
        from_config(folder)


def test_remote_code_in_a_process_started_with_the_environment(folder: Path, python: Callable[..., Any]) -> None:
    done = python(
        f"""
        from transformers import AutoConfig, AutoModelForCausalLM
        config = AutoConfig.from_pretrained({str(folder)!r}, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        print(type(model.first).forward.__npu_autopatch__, type(model.second).forward.__npu_autopatch__)
        """,
        started=True,
        NPU_AUTOPATCH="rms_norm",
        NPU_AUTOPATCH_BACKEND="emulate",
    )
    assert done.stdout == "fp32_mul round_then_mul\n", done.stderr


def test_its_version_of_transformers_is_the_one_reported() -> None:
    assert npu_autopatch.report().versions["transformers"] == transformers.__version__


@pytest.mark.parametrize("model", ["", "import transformers.models.llama.modeling_llama"], ids=["before", "after"])
def test_the_loader_of_remote_code_is_watched_without_torch_and_let_go(model: str, python: Callable[..., Any]) -> None:
    """Tokenizers load it too: what watches it imports nothing that patching needs, and goes with `disable`."""
    done = python(
        f"""
        import sys
        from transformers import AutoTokenizer, dynamic_module_utils, generation
        import transformers.generation.utils as holder
        print("npu_autopatch.activation" in sys.modules)
        original = dynamic_module_utils.get_class_in_module.__wrapped__
        {model}
        import npu_autopatch
        npu_autopatch.disable()
        print([m.get_class_in_module is original for m in (dynamic_module_utils, holder)])
        print([type(finder).__name__ for finder in sys.meta_path].count("ModelingFinder"))
        """,
        started=True,
        NPU_AUTOPATCH="1",
        NPU_AUTOPATCH_BACKEND="emulate",
        NPU_AUTOPATCH_LOG="warning",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["False", "[True, True]", "0", ""]
