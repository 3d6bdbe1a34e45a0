"""Off means off: unset or off-valued, the package costs one look at the environment and leaves no trace."""

from __future__ import annotations

import pytest
from virtual_environment import VirtualEnvironment

TRACE = """\
import sys
print(list(sys.modules), [repr(f).partition(" object at")[0] for f in sys.meta_path], len(sys.path_hooks))
import os, threading
print(sorted(os.environ), threading.active_count(), sys.flags, [p.partition("site-packages")[1:] for p in sys.path])
"""

# what the line of the .pth file calls itself
CALLS = """\
import pathlib, sys, sysconfig
file = str(pathlib.Path(sysconfig.get_path("purelib"), "npu_autopatch-init.pth"))
line, calls = compile(open(file).read(), file, "exec"), []
def note(frame, event, called):
    if event == "c_call" and frame.f_code is line:
        calls.append(called.__name__)
    elif event == "call" and frame.f_back.f_code is line:
        calls.append(frame.f_code.co_name)
sys.setprofile(note)
exec(line, {})
sys.setprofile(None)
print(*calls)
"""


@pytest.fixture(scope="session")
def without(installed: VirtualEnvironment, tmp_path_factory: pytest.TempPathFactory) -> VirtualEnvironment:
    """The same Python without the wheel; with some .pth, because the first one makes `site` import a codec."""
    folder = tmp_path_factory.mktemp("without") / "venv"
    environment = VirtualEnvironment.create(folder, installed.builder, installed.interpreter)
    environment.write("comment.pth", "# nothing\n")
    return environment


@pytest.mark.parametrize("value", [None, "", "0", "false", "OFF", " no "])
@pytest.mark.parametrize("flags", [(), ("-X", "dev"), ("-W", "error")], ids=" ".join)
def test_off_leaves_an_interpreter_as_it_would_be_without_the_package(
    installed: VirtualEnvironment, without: VirtualEnvironment, value: str | None, flags: tuple[str, ...]
) -> None:
    off, absent = (environment.python(*flags, "-c", TRACE, on=value) for environment in (installed, without))
    assert (off.code, off.err) == (0, "")
    assert off == absent


@pytest.mark.parametrize("value", [None, "0"])
def test_off_imports_not_one_file_of_ours(installed: VirtualEnvironment, value: str | None) -> None:
    imported = installed.python("-v", "-c", "pass", on=value)
    assert imported.code == 0 and "import 'site'" in imported.err
    assert "import '_npu_autopatch_boot'" not in imported.err and "import 'npu_autopatch" not in imported.err


def test_off_does_no_more_than_look_at_the_environment_once(installed: VirtualEnvironment) -> None:
    """What a start pays, counted; in milliseconds it is shown by the benchmarks."""
    calls = installed.python("-c", CALLS, on=None)
    assert (calls.code, calls.out.split(), calls.err) == (0, ["get", "strip", "lower"], "")


def test_the_cost_of_a_start_is_the_one_pth_file(installed: VirtualEnvironment) -> None:
    (file,) = (path for path in installed.site_packages.glob("*.pth") if "npu" in path.read_text())
    assert file.name == "npu_autopatch-init.pth"
    (line,) = file.read_text().splitlines()
    assert len(line) < 1024
