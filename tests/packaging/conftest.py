"""The wheel, built once a test run, and virtual environments it is installed in."""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from virtual_environment import FAKE_SITE, VirtualEnvironment, execute

PROJECT = Path(__file__).resolve().parents[2]


def interpreters() -> dict[str, Path]:
    """The running Python and one of each other minor version that the machine has."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": Path(sys.executable)}
    for minor in ("3.10", "3.12", "3.13"):
        installed = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python"))
        on_path = shutil.which(f"python{minor}")
        for candidate in (*installed, *([Path(on_path)] if on_path else [])):
            if minor not in found and execute(candidate, "-c", "import venv").code == 0:
                found[minor] = candidate
    return found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder common to all xdist workers of this test run."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "packaging"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def once(shared: Path, name: str) -> Iterator[bool]:
    """Give True to the first worker that comes here; the others wait until it is through."""
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / f"{name}.done"
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def builder(shared: Path) -> Path:
    """The interpreter of an environment with pip and hatchling."""
    folder = shared / "builder"
    with once(shared, "builder") as first:
        if first:
            assert execute(sys.executable, "-m", "venv", folder).code == 0
            installed = execute(folder / "bin" / "python", "-m", "pip", "-q", "install", "hatchling>=1.24")
            assert installed.code == 0, installed.err
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def build(builder: Path) -> Callable[[Path, Path], Path]:
    """Build the wheel of a source tree into a folder."""

    def build(source: Path, folder: Path) -> Path:
        done = execute(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
        assert done.code == 0, done.err
        (wheel,) = folder.glob("*.whl")
        return wheel

    return build


@pytest.fixture(scope="session")
def wheel(shared: Path, build: Callable[[Path, Path], Path]) -> Path:
    """The wheel of this source tree."""
    with once(shared, "wheel") as first:
        if first:
            build(PROJECT, shared / "dist")
    (path,) = (shared / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="session")
def install(wheel: Path, builder: Path) -> Callable[..., VirtualEnvironment]:
    """Make an environment of an interpreter in a folder, and install the wheel there."""

    def install(folder: Path, interpreter: Path = Path(sys.executable)) -> VirtualEnvironment:
        environment = VirtualEnvironment.create(folder, builder, interpreter)
        environment.pip("install", "--no-deps", "--no-index", wheel)
        return environment

    return install


@pytest.fixture
def bare(tmp_path: Path, builder: Path) -> VirtualEnvironment:
    """An environment without the wheel."""
    return VirtualEnvironment.create(tmp_path / "bare", builder)


@pytest.fixture(scope="session", params=interpreters().items(), ids=lambda item: f"python{item[0]}")
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, install: Callable[..., VirtualEnvironment]
) -> VirtualEnvironment:
    """The wheel and nothing else, in each Python of the machine, for tests that leave the environment as it is."""
    version, interpreter = request.param
    return install(tmp_path_factory.mktemp(f"installed{version}") / "venv", interpreter)


@pytest.fixture
def changeable(installed: VirtualEnvironment, tmp_path: Path) -> VirtualEnvironment:
    """A copy of `installed` for one test."""
    return installed.copy(tmp_path / "changeable")


@pytest.fixture(scope="session")
def with_models(
    tmp_path_factory: pytest.TempPathFactory, install: Callable[..., VirtualEnvironment]
) -> VirtualEnvironment:
    """The wheel, small stand-ins for transformers' models, and what this test run has (torch)."""
    environment = install(tmp_path_factory.mktemp("with_models") / "venv")
    shutil.copytree(FAKE_SITE, environment.site_packages, dirs_exist_ok=True)
    # A path line, which brings packages but does not process the .pth files among them.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment.write("zz_test_run.pth", "".join(f"{path}\n" for path in packages))
    where = environment.python("-c", "import npu_autopatch, transformers as t; print(npu_autopatch.__file__, t)")
    assert where.out.count(str(environment.site_packages)) == 2, where
    return environment
