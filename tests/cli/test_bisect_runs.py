"""`bisect` as a command over programs that pretend to have sites: verdicts, endings, interruption, bad input."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import HOOK, PROJECT, WITH_TWO_DEVICES, Outcome

# Writes the report that the package would write, and does as FAULTS says for the sites that are patched:
# {"name": "exit" | "nan" | "hang" | "crash" | "loss"}.
PROGRAM = f"""\
import json, os, signal, sys, time
sys.path.insert(0, {str(PROJECT)!r})
from npu_autopatch.settings import Settings
on = os.environ["NPU_AUTOPATCH"] != "0"
settings = Settings.from_environment(("rms_norm",), {{**os.environ, "NPU_AUTOPATCH": "1"}})
long = "x" * int(os.environ.get("LONG", 0))
names = [f"family{{n // 7}}.Class{{n}}{{long}}" for n in range(int(os.environ.get("SITES", 5)))]
states = {{name: "skipped" if settings.skips(name) else "patched" for name in names}}
faults = json.loads(os.environ.get("FAULTS", "{{}}"))
done = {{faults[name] for name, state in states.items() if on and state == "patched" and name in faults}}
done |= {{faults["always"]}} if "always" in faults else set()
done |= {{faults["on"]}} if on and "on" in faults else set()

def hang():
    time.sleep(60)
    open(os.environ["TMPDIR"] + "/woke", "w").close()

if os.environ.get("SLOW") and settings.skip not in ((), ("*",)):
    open(os.environ["SLOW"], "w").write(str(os.getpid()))
    hang()
try:
    print("backend", settings.backend)
    print("loss", 2.5 if "loss" in done else 2.0, "at", time.time())
    if "crash" in done:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "nan" in done:
        print("loss nan")
        hang()
    if "hang" in done:
        hang()
    sys.exit(3 if "exit" in done else 0)
finally:
    rows = [dict(module="transformers.models.m.modeling_m", name=name, kernel="rms_norm", variant="plain", state=state)
            for name, state in states.items()]
    if on and names and not os.environ.get("SILENT"):
        with open(os.environ["NPU_AUTOPATCH_REPORT"].replace("{{pid}}", str(os.getpid())), "w") as file:
            json.dump({{"sites": rows}}, file)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the logs
    (tmp_path / "program.py").write_text(PROGRAM)
    return ("--", sys.executable, "-S", str(tmp_path / "program.py"))


@pytest.fixture
def bisect(command: Callable[..., Outcome], program: tuple[str, ...]) -> Callable[..., Outcome]:
    def run(*options: str, faults: dict[str, str], **variables: str) -> Outcome:
        variables = {"NPU_AUTOPATCH_BACKEND": "emulate", "FAULTS": json.dumps(faults), **variables}
        return command("bisect", "--no-verify", *options, *program, started=True, **variables)

    return run


def columns(done: Outcome) -> int:
    """Of the widest line that holds no path."""
    return max(len(line) for line in done.out.splitlines() if "npu-autopatch-bisect-" not in line)


def found(done: Outcome) -> dict:  # type: ignore[type-arg]
    assert done.code == 0, done
    whole = json.loads(done.out)
    assert whole["verdict"] == "found"
    return whole


def names(whole: dict) -> list[list[str]]:  # type: ignore[type-arg]
    return [[site["name"] for site in culprit["sites"]] for culprit in whole["culprits"]]


def test_one_culprit_of_a_thousand_takes_two_runs_ten_and_two(bisect: Callable[..., Outcome]) -> None:
    whole = found(bisect("--json", faults={"family97.Class685": "exit"}, SITES="1000"))
    assert names(whole) == [["family97.Class685"]] and whole["skip"] == "family97.Class685"
    assert whole["sites"] == 1000 and len(whole["runs"]) <= 2 + 10 + 2
    assert all(Path(run["log"]).read_text().startswith("backend emulate\nloss 2.0") for run in whole["runs"])


def test_more_sites_than_fit_into_a_variable_are_told_apart(bisect: Callable[..., Outcome]) -> None:
    culprit = f"family57.Class400{'x' * 300}"
    whole = found(bisect("--json", faults={culprit: "exit"}, SITES="1000", LONG="300"))
    assert names(whole) == [[culprit]] and whole["skip"] == culprit


@pytest.mark.parametrize(
    ("fault", "options", "failure"),
    [
        ("exit", (), "exit code 3"),
        ("crash", (), "ended by SIGSEGV"),
        ("nan", ("--until-nan",), "printed 'loss nan'"),
        ("hang", ("--timeout", "2.5"), "ran for more than 2.5 seconds"),
        ("loss", ("--compare",), "loss 2.5, not 2 (number 1, 2.0e-01 off)"),
        ("loss", ("--compare", "grep -q 'loss 2.0'"), "by --compare: exit code 1"),
        ("loss", ("--compare", "cut -c-9 {output} >a; cut -c-9 {reference} | cmp a -"), "by --compare: "),
        ("loss", ("--compare", "echo so; echo wrong; ! grep 'loss 2.5'"), "by --compare: loss 2.5"),
    ],
)  # fmt: skip
def test_each_kind_of_failure_leads_to_its_culprit(
    bisect: Callable[..., Outcome], tmp_path: Path, fault: str, options: tuple[str, ...], failure: str
) -> None:
    whole = found(bisect(*options, "--json", faults={"family0.Class3": fault}))
    assert names(whole) == [["family0.Class3"]]
    assert whole["culprits"][0]["failure"].startswith(failure)
    assert not (tmp_path / "woke").exists(), "what hangs is stopped"


def test_in_the_background_what_hangs_is_stopped_and_writes_its_report(
    bisect: Callable[..., Outcome], tmp_path: Path
) -> None:
    """A shell has its jobs ignore Ctrl-C, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        whole = found(bisect("--timeout", "2.5", "--json", faults={"family0.Class3": "hang"}))
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(whole) == [["family0.Class3"]] and whole["culprits"][0]["sites"][0]["state"] == "patched"
    assert not (tmp_path / "woke").exists(), "what hangs is stopped"


def test_what_crashes_before_its_report_is_found_among_the_sites_of_the_skipped_run(
    bisect: Callable[..., Outcome],
) -> None:
    whole = found(bisect("--json", faults={"family1.Class8": "crash"}, SITES="10"))
    assert names(whole) == [["family1.Class8"]] and whole["culprits"][0]["sites"][0]["state"] == "skipped"


def test_the_users_own_skip_list_stays(bisect: Callable[..., Outcome]) -> None:
    faults = {"family0.Class1": "exit", "family1.Class9": "exit"}
    whole = found(bisect("--json", faults=faults, SITES="20", NPU_AUTOPATCH_SKIP="family1"))
    assert whole["skip"] == "family1,family0.Class1" and whole["sites"] == 13


def test_both_culprits_stand_in_the_table_with_the_line(bisect: Callable[..., Outcome]) -> None:
    done = bisect(faults={"family0.Class1": "exit", "family0.Class4": "crash"})
    assert done.code == 0 and columns(done) <= 80
    assert (
        "culprit 1 fails alone: exit code 3 (0" in done.out and "culprit 2 fails alone: ended by SIGSEGV (0" in done.out
    )
    assert "  family0.Class4  rms_norm, plain\n" in done.out
    assert "\n  NPU_AUTOPATCH_SKIP=family0.Class1,family0.Class4\n" in done.out


@pytest.mark.parametrize(
    ("options", "faults", "variables", "verdict", "words"),
    [
        ((), {}, {}, "passes", "COMMAND does not fail with npu_autopatch on"),
        (("--compare", "--tolerance", "0.5"), {"family0.Class1": "loss"}, {}, "passes", "largest difference 2.0e-01"),
        ((), {"always": "exit"}, {}, "not ours", "fails with NPU_AUTOPATCH=0, too (exit code 3)"),
        (("--compare",), {"always": "exit"}, {}, "not ours", "fails with NPU_AUTOPATCH=0, too (exit code 3)"),
        (("--compare", "--value", "at", "--tolerance", "1e-12"), {}, {}, "not ours", "fix the seeds"),
        ((), {"on": "exit"}, {}, "no site", "npu_autopatch's own"),
        ((), {"family0.Class1": "exit"}, {"SILENT": "1"}, "no site", "see npu-autopatch doctor"),
    ],
)  # fmt: skip
def test_where_no_site_is_at_fault_it_says_so_and_ends_with_1(
    bisect: Callable[..., Outcome],
    options: tuple[str, ...],
    faults: dict[str, str],
    variables: dict[str, str],
    verdict: str,
    words: str,
) -> None:
    done = bisect("--json", *options, faults=faults, **variables)
    assert done.code == 1, done
    whole = json.loads(done.out)
    assert (whole["verdict"], whole["culprits"], whole["skip"]) == (verdict, [], "")
    assert words in whole["words"]


def test_the_verdict_is_a_sentence_in_80_columns(bisect: Callable[..., Outcome]) -> None:
    done = bisect(faults={"always": "exit"})
    assert done.code == 1 and columns(done) <= 80
    assert "COMMAND fails with NPU_AUTOPATCH=0, too (exit code 3): it is not npu_autopatch's" in " ".join(
        done.out.split()
    )


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_program_and_leaves_what_is_known(
    environment: Callable[..., dict[str, str]], program: tuple[str, ...], tmp_path: Path, ended_by: signal.Signals
) -> None:
    slow = tmp_path / "slow"
    process = subprocess.Popen(
        [sys.executable, "-m", "npu_autopatch.cli", "bisect", "--no-verify", *program],
        env=environment(
            HOOK / "chain", HOOK, NPU_AUTOPATCH_BACKEND="emulate", FAULTS='{"family0.Class1": "exit"}', SLOW=str(slow)
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored, if the tests run in the background
    )
    until = time.monotonic() + 60
    while not (slow.exists() and slow.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(ended_by)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert "interrupted; a culprit is among these 5: family0.Class0, family0.Class1" in out
    assert "2 runs" in out and "01.log" in err and "02.log" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(slow.read_text()), 0)


def test_on_a_machine_with_an_npu_the_backend_is_npu(
    command: Callable[..., Outcome], program: tuple[str, ...], torch_npu: Callable[[str], Path]
) -> None:
    faults = json.dumps({"family0.Class1": "exit"})
    done = command(
        "bisect", "--no-verify", *program, folders=(torch_npu(WITH_TWO_DEVICES),), started=True, FAULTS=faults
    )
    assert done.code == 0 and "backend npu" in done.out and "emulate" not in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), ("after --", "python train.py")),
        (("--",), ("after --", "python train.py")),
        (("--", "./none"), ("'./none'", "after --")),
        (("--until-nan", "--compare", "--", "true"), ("--until-nan", "--compare")),
        (("--tolerance", "-1", "--", "true"), ("'-1'", "above 0")),
        (("--tolerance", "0.1", "--", "true"), ("--tolerance", "--compare")),
        (("--timeout", "soon", "--", "true"), ("'soon'", "above 0")),
        (("--backend", "cuda", "--", "true"), ("'cuda'", "npu", "emulate")),
        (("--logs", "/dev/null/x", "--", "true"), ("'/dev/null/x'", "folder")),
        (("--until-nam", "--", "true"), ("'--until-nam'", "--until-nan")),
        (("--compare", "--", "true"), ("'loss'", "--value WORD")),
        (("--compare", "none-such", "--", "true"), ("'none-such'", "shell command")),
    ],
    ids=lambda value: shlex.join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_sentence(
    command: Callable[..., Outcome], arguments: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    done = command("bisect", *arguments, NPU_AUTOPATCH_BACKEND="emulate", TMPDIR=str(tmp_path))
    assert (done.code, done.out) == (2, ""), done
    said = [line for line in done.err.splitlines() if line.startswith("npu-autopatch bisect: ")]
    assert len(said) == 1 and all(word in said[0] for word in named), done.err
    assert "Traceback" not in done.err


def test_culprits_that_nobody_can_verify_are_found_all_the_same(
    command: Callable[..., Outcome], program: tuple[str, ...]
) -> None:
    variables = {"NPU_AUTOPATCH_BACKEND": "emulate", "FAULTS": '{"family0.Class1": "exit"}'}
    whole = found(command("bisect", "--json", *program, started=True, **variables))
    assert names(whole) == [["family0.Class1"]] and whole["culprits"][0]["verified"] == []


def test_wrong_settings_are_refused_before_anything_runs(command: Callable[..., Outcome]) -> None:
    command("bisect", "--", "true", NPU_AUTOPATCH="rms_nrom").refused("'rms_nrom'", "rms_norm")
