"""A process started with NPU_AUTOPATCH: one line on stderr, and no error of ours in the user's program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BREAK_GEMMA2 = """
    import sys
    from npu_autopatch.kernels import load
    kernel = type(load("rms_norm"))
    prove = kernel.prove

    def fail(self, site, devices):
        if "gemma2" in site.name:
            raise ZeroDivisionError("of the kernel")
        return prove(self, site, devices)

    kernel.prove = fail
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    print(hasattr(Gemma2RMSNorm.forward, "__npu_autopatch__"), hasattr(LlamaRMSNorm.forward, "__npu_autopatch__"))
"""


@pytest.mark.parametrize("error", ["ZeroDivisionError", "SystemExit", "RecursionError"])
def test_a_failing_kernel_is_one_line_and_the_next_model_is_patched(
    error: str, python: Callable[..., Any], tmp_path: Path
) -> None:
    done = python(
        BREAK_GEMMA2.replace("ZeroDivisionError", error),
        started=True,
        NPU_AUTOPATCH="1",
        NPU_AUTOPATCH_BACKEND="emulate",
        NPU_AUTOPATCH_LOG="warning",
        NPU_AUTOPATCH_REPORT=str(tmp_path / "report.json"),
    )
    assert (done.returncode, done.stdout) == (0, "False True\n")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("npu_autopatch: transformers.models.gemma2.modeling_gemma2 was not patched and is as it was")
    assert f"{error}: of the kernel" in line
    report = json.loads((tmp_path / "report.json").read_text())
    states = {site["name"]: site["state"] for site in report["sites"]}
    assert states["gemma2.Gemma2RMSNorm"] == "failed"
    assert {state for name, state in states.items() if name.startswith("llama.")} == {"patched"}
    assert "patched" not in {state for name, state in states.items() if name.startswith("gemma2.")}
    assert "Traceback" in next(site["reason"] for site in report["sites"] if site["state"] == "failed")
    assert report["settings"]["backend"] == "emulate"


def test_strict_lets_the_error_through(python: Callable[..., Any]) -> None:
    done = python(
        BREAK_GEMMA2, started=True, NPU_AUTOPATCH="1", NPU_AUTOPATCH_BACKEND="emulate", NPU_AUTOPATCH_STRICT="1"
    )
    assert done.returncode == 1
    assert "ZeroDivisionError: of the kernel" in done.stderr
    assert "PatchError: transformers.models.gemma2.modeling_gemma2 was not patched and is as it was" in done.stderr


def test_strict_lets_a_wrong_setting_through(python: Callable[..., Any]) -> None:
    code = "import transformers.models.llama.modeling_llama"
    done = python(code, started=True, NPU_AUTOPATCH="rms_nrom", NPU_AUTOPATCH_STRICT="1")
    assert done.returncode == 1
    assert "SettingsError: in the NPU_AUTOPATCH variables, kernel 'rms_nrom' is unknown" in done.stderr
    assert python(code, started=True, NPU_AUTOPATCH="rms_nrom").returncode == 0


def test_a_model_nobody_serves_loads_quietly_but_for_the_last_line(python: Callable[..., Any]) -> None:
    code = """
        from transformers import GPT2Config, GPT2LMHeadModel
        import torch
        config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, bos_token_id=1, eos_token_id=1)
        GPT2LMHeadModel(config)(torch.ones(1, 2, dtype=int))
    """
    done = python(code, started=True, NPU_AUTOPATCH="1", NPU_AUTOPATCH_BACKEND="emulate")
    assert (done.returncode, done.stdout) == (0, "")
    line = "npu_autopatch: enabled, but nothing was patched: no site was found in the modeling modules imported so far"
    assert done.stderr.strip() == line


def test_without_torch_npu_the_models_are_untouched_and_the_line_says_so(python: Callable[..., Any]) -> None:
    code = """
        import sys
        sys.modules["torch_npu"] = None
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "torch_npu" else find(name, *rest)
        from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        print(hasattr(Gemma2RMSNorm.forward, "__npu_autopatch__"), hasattr(LlamaRMSNorm.forward, "__npu_autopatch__"))
    """
    done = python(code, started=True, NPU_AUTOPATCH="rms_norm")
    assert (done.returncode, done.stdout) == (0, "False False\n")
    line = "npu_autopatch: enabled, but nothing was patched: 2 of 2 sites torch_npu is not installed"
    assert done.stderr.strip() == line
