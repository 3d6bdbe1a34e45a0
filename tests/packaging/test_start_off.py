"""Off means off: unset or off-valued, the package costs one look at the environment and leaves no trace."""

from __future__ import annotations

import os
import statistics

import pytest
from virtual_environment import VirtualEnvironment, clean_environment

TRACE = """\
import sys
print(list(sys.modules), [repr(f).partition(" object at")[0] for f in sys.meta_path], len(sys.path_hooks))
import os, threading
print(sorted(os.environ), threading.active_count(), sys.flags, [p.partition("site-packages")[1:] for p in sys.path])
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


def test_off_costs_less_than_half_a_millisecond_of_start(
    installed: VirtualEnvironment, without: VirtualEnvironment
) -> None:
    def cpu_milliseconds(environment: VirtualEnvironment) -> float:
        python = str(environment.interpreter)
        pid = os.posix_spawn(python, [python, "-c", "pass"], clean_environment())
        _, status, used = os.wait4(pid, 0)
        assert status == 0
        return 1000 * (used.ru_utime + used.ru_stime)

    pairs = [(cpu_milliseconds(installed), cpu_milliseconds(without)) for _ in range(100)]
    difference = statistics.median(ours - theirs for ours, theirs in pairs)
    assert difference < 0.5, f"{difference:.3f} ms"
