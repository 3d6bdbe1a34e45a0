"""`coverage` imports the modeling modules in a child and counts what was patched."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_autopatch.cli import coverage_tables
from npu_autopatch.cli.coverage_report import Coverage

from .conftest import WITHOUT_CANN


def test_families_are_counted_in_80_columns(command: Callable[..., object], torch_npu: Callable[[str], Path]) -> None:
    done = command("coverage", "--family", "qwen3,mistral", "--refused", folders=(torch_npu(WITHOUT_CANN),))
    assert (done.code, done.err) == (0, ""), done
    assert done.columns <= 80
    assert "backend emulate, CPU kernels in place of the NPU's" in done.out and "Traceback" not in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["mistral", "1"] in [line[:2] for line in lines] and ["qwen3", "1"] in [line[:2] for line in lines]
    assert re.search(r"rms_norm 2 patched, \d+ refused", done.out)


def test_only_the_kernels_asked_for(command: Callable[..., object]) -> None:
    done = command("coverage", "--json", "--backend", "emulate", "--kernels", "rms_norm", "--family", "qwen3")
    assert (done.code, done.err) == (0, ""), done.err
    whole = json.loads(done.out)
    assert whole["settings"]["backend"] == "emulate" and whole["settings"]["kernels"] == ["rms_norm"]
    assert [site["name"] for site in whole["sites"]] == ["qwen3.Qwen3RMSNorm"] and whole["family"] == "qwen3"


def test_each_site_is_listed_by_family_with_variant_or_reason(command: Callable[..., object]) -> None:
    done = command("coverage", "--family", "qwen3,cohere", "--sites", "--backend", "emulate")
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    said = " ".join(done.out.split())
    assert "qwen3 3 patched Qwen3RMSNorm rms_norm patched: round_then_mul Qwen3MLP swiglu patched: separate," in said
    assert "cohere 2 patched, 1 refused CohereLayerNorm rms_norm refused: it subtracts the mean: a layer norm" in said


def test_modules_that_need_other_packages_are_listed_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    flax, tensorflow = (f"ModuleNotFoundError: No module named {name!r}" for name in ("flax", "tensorflow"))
    modules = [f"transformers.models.m{n}.modeling_{n}" for n in range(60)]
    missing = [{"module": name, "reason": (flax, tensorflow)[n % 2]} for n, name in enumerate(modules)]
    coverage_tables.show(Coverage({"sites": [], "versions": {"transformers": "5"}}, missing), False, False)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert f"{flax} (30)" in out and f"{tensorflow} (30)" in out and "Not imported 60" in out
    assert all(f"modeling_{n}" in out for n in range(60))


def test_without_ops_nothing_is_patched_and_that_is_a_failure(
    command: Callable[..., object], torch_npu: Callable[[str], Path]
) -> None:
    stand_in = torch_npu(WITHOUT_CANN)
    done = command("coverage", "--family", "qwen3", "--backend", "npu", "--refused", folders=(stand_in,))
    assert done.code == 1
    assert "rms_norm 0 patched, 1 refused" in done.out and "qwen3.Qwen3RMSNorm" in done.out


def test_a_terminal_shows_a_bar_on_stderr(environment: Callable[..., dict[str, str]]) -> None:
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "npu_autopatch.cli", "coverage", "--family", "gpt2,t5", "--json"],
        env=environment(TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    shown = []

    def read() -> None:
        with contextlib.suppress(OSError):  # all read
            while piece := os.read(screen, 4096):
                shown.append(piece)

    reader = threading.Thread(target=read)  # a terminal nobody reads stops the process after some 4 kB
    reader.start()
    out, _ = process.communicate(timeout=120)
    reader.join()
    os.close(screen)
    assert "torch and transformers" in b"".join(shown).decode() and "100%" in b"".join(shown).decode()
    assert json.loads(out)["summary"]["patched"] == 2  # T5LayerNorm, T5DenseGatedActDense
