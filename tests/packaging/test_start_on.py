"""On means one finder and nothing more, whichever way and however often start-up comes by."""

from __future__ import annotations

import shutil
import zipapp
from pathlib import Path

import pytest
from virtual_environment import STATE, Outcome, VirtualEnvironment

FINDER = "ModelingFinder"
BOOT_ONLY = {"_npu_autopatch_boot", "npu_autopatch", "npu_autopatch.finder"}


def assert_on(outcome: Outcome) -> None:
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.state["finders"].count(FINDER) == 1 and outcome.state["finders"][0] == FINDER


def assert_off(outcome: Outcome) -> None:
    assert (outcome.code, outcome.err) == (0, "")
    assert FINDER not in outcome.state["finders"]
    assert not [name for name in outcome.state["modules"] if name.startswith("npu_autopatch")]


@pytest.mark.parametrize("value", ["1", "all", "rms_norm,rope", "all,-moe", "surely not a kernel"])
def test_on_adds_one_finder_in_front_and_imports_three_small_modules(installed: VirtualEnvironment, value: str) -> None:
    on = installed.python("-c", STATE, on=value)
    off = installed.python("-c", STATE, on=None)
    assert_on(on)
    assert on.state["finders"][1:] == off.state["finders"]
    added = set(on.state["modules"]) - set(off.state["modules"]) - {"__future__"}
    assert added == BOOT_ONLY


def test_on_and_without_models_the_program_says_what_it_says_without_us(installed: VirtualEnvironment) -> None:
    program = "import json, decimal, unittest, sys; print(json.dumps(sys.argv)); sys.exit(7)"
    assert installed.python("-c", program, "a") == installed.python("-c", program, "a", on=None)


# The documented results: -S has no site at all, -I asks to be isolated, and NPU_AUTOPATCH is no PYTHON* variable.
@pytest.mark.parametrize("flag", ["-E", "-s", "-B", "-O", "-OO", "-u", "-Xutf8", "-Werror", "-bb", "-Xdev"])
def test_interpreter_flags_that_leave_it_on(installed: VirtualEnvironment, flag: str) -> None:
    assert_on(installed.python(flag, "-c", STATE))


@pytest.mark.parametrize("flag", ["-S", "-I", "-IE", "-SE"])
def test_interpreter_flags_that_turn_it_off(installed: VirtualEnvironment, flag: str) -> None:
    assert_off(installed.python(flag, "-c", STATE))


def test_a_second_pth_and_every_further_call_of_the_boot_find_it_done(changeable: VirtualEnvironment) -> None:
    ours = changeable.site_packages / "npu_autopatch-init.pth"
    shutil.copy(ours, changeable.site_packages / "aa-copy.pth")
    again = "import pkgutil; init = pkgutil.resolve_name('_npu_autopatch_boot:init'); init(); init()\n"
    assert_on(changeable.python("-c", again + STATE))


def test_a_copy_in_the_user_site_does_not_add_a_second_finder(changeable: VirtualEnvironment, tmp_path: Path) -> None:
    config = changeable.folder / "pyvenv.cfg"
    config.write_text(config.read_text().replace("system-site-packages = false", "system-site-packages = true"))
    user = tmp_path / "user"
    find = changeable.python("-c", "import site; print(site.USER_SITE)", on=None, PYTHONUSERBASE=str(user))
    shutil.copytree(changeable.site_packages, find.out.strip())
    started = changeable.python("-c", STATE, PYTHONUSERBASE=str(user))
    assert find.out.strip() in started.state["path"]
    # The base interpreter's own packages may add finders too.
    assert (started.code, started.err, started.state["finders"].count(FINDER)) == (0, "", 1)


def test_a_zipapp_is_a_program_like_any_other(installed: VirtualEnvironment, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(STATE)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    assert_on(installed.python(tmp_path / "app.pyz"))


def test_packed_into_a_zipapp_it_is_importable_but_nothing_starts_it(
    installed: VirtualEnvironment, bare: VirtualEnvironment, tmp_path: Path
) -> None:
    app = tmp_path / "app"
    shutil.copytree(installed.site_packages, app)
    (app / "__main__.py").write_text("import npu_autopatch; del __import__('sys').modules['npu_autopatch']\n" + STATE)
    zipapp.create_archive(app, tmp_path / "app.pyz")
    assert_off(bare.python(tmp_path / "app.pyz"))


def test_installed_by_target_it_is_off_until_run_starts_it(
    bare: VirtualEnvironment, wheel: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    bare.pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    script = tmp_path / "script.py"
    script.write_text(STATE)
    assert_off(bare.python(script, PYTHONPATH=str(target)))
    command = ("-c", "import sys; from npu_autopatch.cli.run import run; sys.exit(run(sys.argv[1:]))")
    assert_on(bare.python(*command, script, on=None, PYTHONPATH=str(target)))


def test_standard_streams_that_are_closed_do_not_matter(installed: VirtualEnvironment, tmp_path: Path) -> None:
    result = tmp_path / "result"
    program = f"import sys; open({str(result)!r}, 'w').write(type(sys.meta_path[0]).__name__)"
    done = installed.shell(f'python -c "{program}" <&- >&- 2>&-')
    assert (done.code, result.read_text()) == (0, FINDER)


def test_the_environment_of_the_process_is_left_alone(installed: VirtualEnvironment) -> None:
    program = "import os; print(sorted(os.environ.items()))"
    on, off = installed.python("-c", program), installed.python("-c", program, on=None)
    assert on.out.replace("('NPU_AUTOPATCH', '1'), ", "") == off.out
