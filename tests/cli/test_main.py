"""The command as a whole: help, version, bad input, and a light start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from npu_autopatch.cli import _parsers
from npu_autopatch.version import __version__

COMMANDS = ("run", "doctor", "report", "verify", "analyze", "bisect", "coverage", "ops", "demo")


def test_without_a_command_it_prints_help_and_ends_with_2(command: Callable[..., object]) -> None:
    done = command()
    assert (done.code, done.err) == (2, "")
    assert all(f"    {name} " in done.out for name in COMMANDS)


def test_these_are_all_commands() -> None:
    assert tuple(_parsers()[1]) == COMMANDS


def test_version(command: Callable[..., object]) -> None:
    assert command("--version").out == f"npu-autopatch {__version__}\n"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns_and_has_an_example(command: Callable[..., object], name: str) -> None:
    done = command(*filter(None, (name, "--help")))
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    assert "example: " in done.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bogus",), ("'bogus'", *COMMANDS)),
        (("--bogus", "doctor"), ("--bogus", "--json")),
        (("doctor", "extra"), ("'extra'", "--json")),
        (("doctor", "--jso"), ("'--jso'", "--json")),
        (("report",), ("FILE",)),
        (("report", "none.json"), ("none.json", "NPU_AUTOPATCH_REPORT")),
        (("report", "none.json", "--state", "bad"), ("'bad'", "patched", "refused", "skipped", "failed", "foreign")),
        (("coverage", "--backend", "cuda"), ("'cuda'", "npu", "emulate")),
        (("coverage", "--kernels", "bad"), ("'bad'", "all", "rms_norm")),
        (("coverage", "--family", "qwen33"), ("'qwen33'", "qwen3")),
        (("demo", "--steps", "0"), ("'0'", "1 to 1000")),
        (("demo", "--seed", "x"), ("'x'", "--seed")),
        (("run", "--kernels", "bad", "script.py"), ("'bad'", "all", "rms_norm")),
        (("run", "--backend", "cuda", "script.py"), ("'cuda'", "npu", "emulate")),
        (("run", "--skip", "qwen[", "script.py"), ("'qwen['", "qwen3.Qwen3MLP")),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value, tuple) else None,
)
def test_bad_input_is_one_sentence_with_the_valid_choices(
    command: Callable[..., object], arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    command(*arguments).refused(*named)


def test_help_imports_neither_torch_nor_rich(environment: Callable[..., dict[str, str]]) -> None:
    timed = [sys.executable, "-X", "importtime", "-m", "npu_autopatch.cli", "--help"]
    # without what a start-up of the test machine may bring along
    done = subprocess.run(timed, env=environment(), capture_output=True, text=True)
    bare = subprocess.run([*timed[:3], "-c", ""], env=environment(), capture_output=True, text=True)

    def imported(said: str) -> set[str]:
        return {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line}

    assert "npu_autopatch" in imported(done.stderr)
    assert not (imported(done.stderr) - imported(bare.stderr)) & {"torch", "transformers", "wrapt", "rich", "torch_npu"}


def test_a_closed_pipe_is_no_traceback(environment: Callable[..., dict[str, str]]) -> None:
    line = f"{sys.executable} -m npu_autopatch.cli --help | true"
    assert subprocess.run(line, shell=True, env=environment(), capture_output=True, text=True).stderr == ""
