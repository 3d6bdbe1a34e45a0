"""`analyze` takes a model apart in a child, for people, programs, reviews and browsers; and says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from npu_autopatch.analysis.result import FUSED, MODES, Analysis


def test_a_table_in_80_columns_and_a_page(command: Callable[..., object], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = command("analyze", "llama", "--tokens", "64", "--html", page)
    assert (done.code, done.err) == (0, ""), done
    assert done.columns <= 80 or str(page) in done.out
    for words in (
        "1 x 64 tokens",
        "on tensors without values",
        *MODES,
        "a layer, 32 layers",
        "fused here:",
        "rotary_mul",
        "fused by torch_npu",
        "npu_cross_entropy_loss: loss",
        str(page),
    ):
        assert words in done.out, words
    written = page.read_text()
    assert written.lstrip().lower().startswith("<!doctype html>") and "npu_rotary_mul" in written


def test_the_same_as_json(command: Callable[..., object]) -> None:
    done = command("analyze", "llama", "--tokens", "32", "--batch", "2", "--kernels", "all,-rope", "--json")
    assert (done.code, done.err) == (0, ""), done
    found = Analysis.of(json.loads(done.out))
    assert json.loads(found.to_json()) == json.loads(done.out)
    (prefill, _, training) = found.modes
    assert prefill.input == "2 x 32 tokens"
    layer = next(part for part in training.parts if part.count == 32)
    fused = {chain.name for chain in layer.chains if chain.judgement.state == FUSED}
    assert fused == {"residual add and norm", "MLP"}
    rope = next(chain for chain in layer.chains if chain.name == "rope")
    assert rope.before == rope.after and rope.before.launches > 2


def test_the_same_as_markdown(command: Callable[..., object]) -> None:
    done = command("analyze", "llama", "--tokens", "32", "--markdown", "--skip", "llama.LlamaMLP")
    assert (done.code, done.err) == (0, ""), done
    lines = done.out.splitlines()
    rows = [line for line in lines if line.startswith("| self_attn")]
    assert rows and {line.count(" | ") for line in rows} == {6}
    assert "### `npu_add_rms_norm`: residual add and norm in prefill" in done.out
    assert "- smallest experiment: " in done.out
    assert any("LlamaMLP" in line and "SKIP" in line for line in lines if "| MLP |" in line)


def test_bad_input_is_one_sentence(command: Callable[..., object], tmp_path: Path) -> None:
    command("analyze", "qwen33").refused("config.json", "qwen3")
    command("analyze", "llama", "--tokens", "0").refused("--tokens", "1 or more")
    command("analyze", "llama", "--kernels", "rmsnorm").refused("rms_norm")
    command("analyze", "llama", "--html", tmp_path / "none" / "page.html").refused("--html", "folder")
    command("analyze", "llama", "--json", "--markdown").refused("--json")
    command("analyze", "vit").refused("pixel_values", "reads text")
