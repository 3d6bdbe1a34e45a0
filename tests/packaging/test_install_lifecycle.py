"""Installing, upgrading, reinstalling and uninstalling: start-up works in between, and nothing stays behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from virtual_environment import STATE, VirtualEnvironment, execute

PROJECT = Path(__file__).resolve().parents[2]
BESIDE_THE_PACKAGE = {
    "_npu_autopatch_boot.py",
    "_npu_autopatch_chain",
    "npu_autopatch-init.pth",
    "npu_autopatch-init.start",
}


def assert_starts(environment: VirtualEnvironment) -> None:
    started = environment.python("-c", STATE)
    assert (started.code, started.err, started.state["finders"][0]) == (0, "", "ModelingFinder")


def assert_gone(environment: VirtualEnvironment) -> None:
    assert environment.ours() == []
    assert not (environment.folder / "bin" / "npu-autopatch").exists()
    environment.python("-c", "print(1)").said("1\n")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the source tree, to change or to install from."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("npu_autopatch", "sitecustomize_hook"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, folder)
    return folder


@pytest.fixture
def bare(bare: VirtualEnvironment) -> VirtualEnvironment:
    """With some other package in it, since pip would remove an empty site-packages."""
    bare.write("other.py", "")
    return bare


def test_install_reinstall_uninstall(bare: VirtualEnvironment, wheel: Path) -> None:
    before = sorted(bare.site_packages.iterdir())
    bare.pip("install", "--no-deps", "--no-index", wheel)
    assert set(bare.ours()) > BESIDE_THE_PACKAGE | {"npu_autopatch"}
    assert_starts(bare)
    bare.pip("install", "--no-deps", "--no-index", "--force-reinstall", wheel)
    assert_starts(bare)
    ran = bare.python("-c", "import sys; from npu_autopatch.cli.run import run; run(['-m', 'this'])", on=None)
    assert ran.code == 0 and "Zen" in ran.out  # the chain folder now has bytecode
    bare.pip("uninstall", "-y", "npu-autopatch")
    assert_gone(bare)
    left = [entry for entry in bare.site_packages.iterdir() if entry.name != "__pycache__"]
    assert sorted(left) == before


def test_upgrade_replaces_every_file(
    bare: VirtualEnvironment, wheel: Path, source: Path, build: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    (source / "npu_autopatch" / "version.py").write_text('__version__ = "99.0.0"\n')
    (source / "npu_autopatch" / "new_in_99.py").touch()
    newer = build(source, tmp_path / "dist")
    bare.pip("install", "--no-deps", "--no-index", wheel)
    bare.pip("install", "--no-deps", "--no-index", newer)
    bare.python("-c", "import npu_autopatch.new_in_99; print(npu_autopatch.__version__)", on=None).said("99.0.0\n")
    assert len([name for name in bare.ours() if name.endswith(".dist-info")]) == 1
    assert_starts(bare)
    bare.pip("install", "--no-deps", "--no-index", wheel)  # and back
    assert not (bare.site_packages / "npu_autopatch" / "new_in_99.py").exists()
    assert_starts(bare)
    bare.pip("uninstall", "-y", "npu-autopatch")
    assert_gone(bare)


def test_editable_install_starts_too_and_goes_without_a_trace(bare: VirtualEnvironment, source: Path) -> None:
    bare.pip("install", "--no-deps", "-e", source)
    where = bare.python("-c", "import npu_autopatch; print(npu_autopatch.__file__)", on=None)
    where.said(f"{source / 'npu_autopatch' / '__init__.py'}\n")
    assert set(bare.ours()) >= BESIDE_THE_PACKAGE
    assert_starts(bare)
    script = bare.folder / "script.py"
    script.write_text(STATE)
    ran = bare.python("-c", f"from npu_autopatch.cli.run import run; run([{str(script)!r}])", on=None)
    assert (ran.code, ran.err, ran.state["finders"][0]) == (0, "", "ModelingFinder")
    bare.pip("uninstall", "-y", "npu-autopatch")
    assert_gone(bare)


def test_from_editable_to_wheel(bare: VirtualEnvironment, source: Path, wheel: Path) -> None:
    bare.pip("install", "--no-deps", "-e", source)
    bare.pip("install", "--no-deps", "--no-index", "--force-reinstall", wheel)
    bare.python("-c", "import npu_autopatch; print(npu_autopatch.__file__)", on=None).said(
        f"{bare.site_packages / 'npu_autopatch' / '__init__.py'}\n"
    )
    assert_starts(bare)
    bare.pip("uninstall", "-y", "npu-autopatch")
    assert_gone(bare)


def test_pip_and_venv_run_undisturbed_with_the_variable_set(installed: VirtualEnvironment, tmp_path: Path) -> None:
    made = installed.python("-m", "venv", "--without-pip", tmp_path / "inner")
    assert (made.code, made.out, made.err) == (0, "", "")
    inner = VirtualEnvironment(tmp_path / "inner", installed.builder)
    inner.python("-c", "print(1)").said("1\n")
    pip = (installed.builder, "-m", "pip", "--disable-pip-version-check", "--python", installed.interpreter, "list")
    on, off = execute(*pip, NPU_AUTOPATCH="1"), execute(*pip)
    assert on == off
    assert (on.code, on.err) == (0, "") and "npu-autopatch" in on.out.replace("_", "-")
