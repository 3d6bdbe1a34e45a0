"""`npu-autopatch run` starts a program with the package on, and changes nothing else about it."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

import pytest
from virtual_environment import STATE, Outcome, VirtualEnvironment

FINDER = "ModelingFinder"

# The command without the rest of the command line, which needs packages that these environments do not have.
MAIN = """\
import argparse, sys
from npu_autopatch.cli import run
parser = argparse.ArgumentParser(prog="npu-autopatch")
run.add_parser(parser.add_subparsers())
arguments = parser.parse_args(["run", *sys.argv[1:]])
sys.exit(arguments.func(arguments))
"""


@pytest.fixture(scope="module")
def target(wheel: Path, installed: VirtualEnvironment, tmp_path_factory: pytest.TempPathFactory) -> VirtualEnvironment:
    """`pip install --target`: no `.pth` is processed, so all that starts the package is `run`."""
    folder = tmp_path_factory.mktemp("target")
    environment = VirtualEnvironment.create(folder / "venv", installed.builder, installed.interpreter)
    environment.pip("install", "--no-deps", "--no-index", "--target", folder / "venv" / "target", wheel)
    return environment


def run(target: VirtualEnvironment, *arguments: str | Path, on: str | None = None, **variables: str) -> Outcome:
    path = str(target.folder / "target")
    if "PYTHONPATH" in variables:
        path += ":" + variables.pop("PYTHONPATH")
    return target.python("-c", MAIN, *arguments, on=on, PYTHONPATH=path, **variables)


def write(folder: Path, name: str, program: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(program))
    return path


def test_a_script_runs_with_one_finder_its_arguments_and_exit_code(target: VirtualEnvironment, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", f"{STATE}print(json.dumps(sys.argv)); sys.exit(7)")
    done = run(target, script, "-m", "--kernels", "x y", "--", "")
    state, argv = map(json.loads, done.out.splitlines())
    assert (done.code, done.err) == (7, "")
    assert state["finders"].count(FINDER) == 1
    assert argv == [str(script), "-m", "--kernels", "x y", "--", ""]


def test_a_module_runs_as_python_m_would_run_it(target: VirtualEnvironment, tmp_path: Path) -> None:
    write(tmp_path, "program.py", f"{STATE}print(__name__, sys.argv[1:], __spec__.name)")
    done = run(target, "-m", "program", "-m", "a", PYTHONPATH=str(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1] == "__main__ ['-m', 'a'] program"
    assert FINDER in done.out


def test_the_program_sees_no_other_path_modules_or_name_than_without_run(
    target: VirtualEnvironment, tmp_path: Path
) -> None:
    script = write(tmp_path, "script.py", STATE)
    ran = run(target, script).state
    plain = target.python(script, on=None, PYTHONPATH=str(target.folder / "target")).state
    assert ran["path"] == plain["path"]
    added = set(ran["modules"]) - set(plain["modules"])
    assert all("npu_autopatch" in name or name == "__future__" for name in added)
    assert "sitecustomize" not in ran["modules"]


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_run_turns_it_on_if_it_is_off(target: VirtualEnvironment, tmp_path: Path, value: str | None) -> None:
    script = write(tmp_path, "script.py", "import os; print(os.environ['NPU_AUTOPATCH'])")
    run(target, script, on=value).said("1\n")


def test_run_keeps_the_users_own_list_of_kernels(target: VirtualEnvironment, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import os; print(os.environ['NPU_AUTOPATCH'])")
    run(target, script, on="rms_norm").said("rms_norm\n")


def test_run_refuses_a_list_it_cannot_follow_before_it_starts_anything(
    target: VirtualEnvironment, tmp_path: Path
) -> None:
    script = write(tmp_path, "script.py", "print('started')")
    done = run(target, script, on="rms_nrom")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("npu-autopatch") and "'rms_nrom' is unknown: choose" in done.err


def test_options_become_variables(target: VirtualEnvironment, tmp_path: Path) -> None:
    program = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('NPU_AUTO')}))"
    script = write(tmp_path, "script.py", program)
    options = ("--kernels", "rms_norm", "--skip", "glm4*", "--backend", "emulate", "--report", "r.json")
    done = run(target, *options, script, "--report", "mine", on="all", NPU_AUTOPATCH_SKIP="before")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "NPU_AUTOPATCH": "rms_norm",
        "NPU_AUTOPATCH_SKIP": "glm4*",
        "NPU_AUTOPATCH_BACKEND": "emulate",
        "NPU_AUTOPATCH_REPORT": "r.json",
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), "nothing to run"), (("-m",), "nothing to run"), (("missing.py", "x"), "'missing.py'")],
    ids=["nothing", "-m alone", "missing script"],
)
def test_nothing_to_run_is_one_sentence_and_exit_code_2(
    target: VirtualEnvironment, arguments: tuple[str, ...], named: str
) -> None:
    done = run(target, *arguments)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert done.err.startswith("npu-autopatch run: ") and named in done.err


def test_without_the_chain_folder_run_says_so(changeable: VirtualEnvironment) -> None:
    shutil.rmtree(changeable.site_packages / "_npu_autopatch_chain")
    done = changeable.python("-c", MAIN, "-m", "this", on=None)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1) and "reinstall" in done.err


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([sys.executable, __file__, 'child'])",
        "subprocess.run([sys.executable, __file__, 'child'], cwd='/')",
        "os.execv(sys.executable, [sys.executable, __file__, 'child'])",
    ],
    ids=["subprocess", "other folder", "exec"],
)
def test_children_inherit_it_once(target: VirtualEnvironment, tmp_path: Path, start: str) -> None:
    program = f"""\
    import os, subprocess, sys
    if sys.argv[1:]:
        print([type(f).__name__ for f in sys.meta_path].count({FINDER!r}), os.environ["PYTHONPATH"].count("_chain"))
    else:
        {start}
    """
    run(target, write(tmp_path, "script.py", program)).said("1 1\n")


def test_run_within_run_adds_nothing(target: VirtualEnvironment, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import os; print(os.environ['PYTHONPATH'].count('_npu_autopatch_chain'))")
    again = write(tmp_path, "again.py", MAIN)
    run(target, again, again, script).said("1\n")


def test_a_child_can_turn_it_off(target: VirtualEnvironment, tmp_path: Path) -> None:
    program = f"""\
    import os, subprocess, sys
    code = "import sys; print({FINDER!r} in str(sys.meta_path), 'npu_autopatch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={{**os.environ, "NPU_AUTOPATCH": "0"}})
    """
    run(target, write(tmp_path, "script.py", program)).said("False False\n")


def test_an_installed_environment_starts_once_by_pth_and_run_together(
    installed: VirtualEnvironment, tmp_path: Path
) -> None:
    script = write(tmp_path, "script.py", STATE)
    done = installed.python("-c", MAIN, script, on=None)
    assert (done.code, done.err, done.state["finders"].count(FINDER)) == (0, "", 1)


def test_the_installed_command_runs_a_program_with_fused_norms(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "from observing import *; print(fused(family('qwen9').Qwen9RMSNorm))")
    command = f"npu-autopatch run --backend emulate {script}"
    with_models.shell(command, on=None, NPU_AUTOPATCH_LOG="warning").said("1\n")
    missing = with_models.shell("npu-autopatch run missing.py", on=None)
    assert (missing.code, missing.out, len(missing.err.splitlines())) == (2, "", 1)


def test_interpreters_the_package_is_not_made_for_step_aside(target: VirtualEnvironment) -> None:
    others = [path for path in Path.home().glob(".pyenv/versions/*/bin/python") if path.parents[1].name[0] in "23"]
    path = f"{target.folder / 'target' / '_npu_autopatch_chain'}:{target.folder / 'target'}"
    for interpreter in others:
        other = VirtualEnvironment(interpreter.parents[1], target.builder)
        done = other.python("-B", "-c", "print(1)", PYTHONPATH=path)
        assert (done.code, done.out, done.err) == (0, "1\n", ""), interpreter
