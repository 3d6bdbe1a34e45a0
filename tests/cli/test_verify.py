"""`verify` runs a model in a child, shows what it found, and fails with the name of a site that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

# what a child does once the emulated ops are there: a rotation the other way round, in models but in no proof
SABOTAGE = """\
import sys
if any("npu_autopatch.verification" in argument for argument in sys.argv + sys.orig_argv):
    import torch
    from torch.overrides import TorchFunctionMode

    class Turned(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if str(function) == "npu.npu_rotary_mul.default":
                x, cos, sin, mode = args
                args = x, cos, -sin, mode
            return function(*args, **(kwargs or {}))

    Turned().__enter__()
"""


def test_a_table_in_80_columns(command: Callable[..., object]) -> None:
    done = command("verify", "qwen3", "--backend", "emulate")
    assert (done.code, done.err) == (0, ""), done
    assert done.columns <= 80
    for words in (
        "CPU kernels in place of the NPU's",
        "qwen3.Qwen3RMSNorm",
        "fp32 training",
        "bf16 checkpoints",
        "ok:",
    ):
        assert words in done.out


def test_a_sabotaged_kernel_is_exit_code_1_and_its_site_is_named(
    command: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "sitecustomize.py").write_text(SABOTAGE)
    done = command("verify", "qwen3", "--backend", "emulate", "--json", folders=(tmp_path / "bad",))
    assert done.code == 1, done
    found = json.loads(done.out)
    assert found["passed"] is False
    assert [site["name"] for site in found["sites"] if site["problems"]] == ["qwen3.apply_rotary_pos_emb"]


def test_bad_input_is_one_sentence(command: Callable[..., object], tmp_path: Path) -> None:
    command("verify", "qwen33").refused("config.json", "qwen3")
    (tmp_path / "config.json").write_text('{"model_type": "no_such", "auto_map": {"AutoModel": "m.M"}}')
    command("verify", tmp_path).refused("--trust-remote-code")
    command("verify", "qwen3", "--kernels", "rmsnorm").refused("rms_norm")
    command("verify", "qwen3", "--skip", "a b(").refused("skip")
