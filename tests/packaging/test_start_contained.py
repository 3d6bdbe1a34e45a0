"""Whatever is broken in the package, the program starts, and at most one line on stderr says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from virtual_environment import VirtualEnvironment

FINDER = "npu_autopatch/finder.py"
BOOT = "_npu_autopatch_boot.py"
RECURSION = "def f():\n    f()\nf()\n"


def delete_everything_but_the_pth(environment: VirtualEnvironment) -> None:
    for entry in environment.site_packages.iterdir():
        if entry.name != "npu_autopatch-init.pth":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def delete_the_package(environment: VirtualEnvironment) -> None:
    shutil.rmtree(environment.site_packages / "npu_autopatch")


def overwrite(name: str, text: str) -> Callable[[VirtualEnvironment], object]:
    return lambda environment: environment.write(name, text)


BREAKAGES = {
    "orphan .pth": delete_everything_but_the_pth,
    "orphan boot": delete_the_package,
    "empty package": overwrite(FINDER, ""),
    "half an update": overwrite("npu_autopatch/__init__.py", "import npu_autopatch.not_there\n"),
    "boot is not Python": overwrite(BOOT, "def init(:\n"),
    "boot without init": overwrite(BOOT, ""),
    "boot exits": overwrite(BOOT, "raise SystemExit(3)\n"),
    "finder raises": overwrite(FINDER, "raise ValueError('several\\nlines\\n\\nlong ' + 'x' * 5000)\n"),
    "finder is not Python": overwrite(FINDER, "\0"),
    "finder exits": overwrite(FINDER, "def install_from_environment():\n    raise SystemExit(3)\n"),
    "finder stops a generator": overwrite(FINDER, "raise GeneratorExit\n"),
    "finder recurses": overwrite(FINDER, RECURSION),
    "finder eats memory": overwrite(FINDER, "raise MemoryError\n"),
    "the error has no text": overwrite(FINDER, "class E(Exception):\n    __str__ = __repr__ = None\nraise E\n"),
}


@pytest.mark.parametrize("strict", ["", "1"], ids=["contained", "strict"])
@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES)
def test_a_broken_package_costs_the_program_one_line_at_most(
    changeable: VirtualEnvironment, breakage: Callable[[VirtualEnvironment], object], strict: str
) -> None:
    breakage(changeable)
    started = changeable.python("-c", "print('the program')", NPU_AUTOPATCH_STRICT=strict)
    assert (started.code, started.out) == (0, "the program\n")
    lines = started.err.splitlines()
    assert len(lines) <= 1 and all(line.startswith("npu_autopatch: not started") for line in lines)
    assert len(started.err) < 500
    assert lines or breakage is BREAKAGES["the error has no text"]


@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES)
def test_a_broken_package_that_is_off_is_not_noticed(
    changeable: VirtualEnvironment, breakage: Callable[[VirtualEnvironment], object]
) -> None:
    breakage(changeable)
    changeable.python("-c", "print(1)", on=None).said("1\n")
    changeable.python("-c", "print(1)", on="0").said("1\n")


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("breakage", ["orphan .pth", "finder exits", "boot exits"])
def test_with_no_stderr_to_write_to_the_program_still_runs(
    changeable: VirtualEnvironment, breakage: str, stderr: str
) -> None:
    BREAKAGES[breakage](changeable)
    changeable.shell(f"python -c 'print(1)' {stderr}").said("1\n")


@pytest.mark.parametrize("breakage", ["orphan .pth", "finder exits", "boot exits"])
def test_the_line_does_not_get_into_the_output_of_a_pipe(changeable: VirtualEnvironment, breakage: str) -> None:
    BREAKAGES[breakage](changeable)
    write = "import sys; sys.stdout.buffer.write(bytes([0, 255]))"
    piped = changeable.shell(f"python -c '{write}' 2>/dev/null | od -An -tx1")
    assert piped.out.split() == ["00", "ff"]


@pytest.mark.parametrize("broken", [FINDER, BOOT])
def test_a_keyboard_interrupt_during_start_still_interrupts(changeable: VirtualEnvironment, broken: str) -> None:
    changeable.write(broken, "raise KeyboardInterrupt\n")
    started = changeable.python("-c", "print(1)")
    assert started.code != 0 and started.out == "" and "KeyboardInterrupt" in started.err
