"""What the wheel holds and declares."""

from __future__ import annotations

import ast
import re
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from virtual_environment import VirtualEnvironment, execute

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def archive(wheel: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


def test_start_up_files_lie_beside_the_package(archive: zipfile.ZipFile) -> None:
    names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.startswith("npu_autopatch/")}
    assert names == {
        "npu_autopatch-init.pth",
        "npu_autopatch-init.start",
        "_npu_autopatch_boot.py",
        "_npu_autopatch_chain/sitecustomize.py",
    }


def test_nothing_in_the_wheel_takes_the_place_of_a_users_sitecustomize(archive: zipfile.ZipFile) -> None:
    assert not {"sitecustomize.py", "usercustomize.py"} & set(archive.namelist())


def test_the_wheel_brings_every_module_table_and_page_of_the_source_and_its_type_marker(
    archive: zipfile.ZipFile,
) -> None:
    kinds = {".py", ".json", ".html", ".css", ".js"}
    files = (PROJECT / "npu_autopatch").rglob("*")
    source = {str(path.relative_to(PROJECT)) for path in files if path.suffix in kinds}
    assert {Path(name).suffix for name in source} == kinds
    assert source | {"npu_autopatch/py.typed"} <= set(archive.namelist())


def test_the_pth_is_one_line_that_looks_at_the_environment_first(archive: zipfile.ZipFile) -> None:
    (line,) = archive.read("npu_autopatch-init.pth").decode().splitlines()
    assert line.startswith('import os, sys; os.environ.get("NPU_AUTOPATCH"')


def test_the_start_file_names_the_boot(archive: zipfile.ZipFile, installed: VirtualEnvironment) -> None:
    (entry,) = archive.read("npu_autopatch-init.start").decode("utf-8-sig").split()
    code = f"import pkgutil; print(pkgutil.resolve_name({entry!r}).__module__)"
    installed.python("-c", code, on=None).said("_npu_autopatch_boot\n")


def test_every_reader_of_the_variable_agrees_on_what_off_means() -> None:
    def assigned(path: str) -> tuple[str, ...]:
        for node in ast.parse((PROJECT / path).read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OFF_VALUES":
                return ast.literal_eval(node.value)
        raise AssertionError(f"no OFF_VALUES in {path}")

    line = (PROJECT / "sitecustomize_hook/npu_autopatch-init.pth").read_text()
    in_pth = ast.literal_eval(re.search(r"not in (\(.*?\))", line)[1])
    assert in_pth == assigned("sitecustomize_hook/_npu_autopatch_boot.py") == assigned("npu_autopatch/cli/run.py")


def test_dependencies_have_lower_bounds_only(archive: zipfile.ZipFile) -> None:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert {re.match(r"[\w-]+", r)[0] for r in required} == {"torch", "transformers", "wrapt", "rich"}
    for requirement in metadata.get_all("Requires-Dist"):
        assert not re.search(r"<|==\s*\d|~=|!=", requirement.partition(";")[0]), requirement
    assert metadata["Requires-Python"].startswith(">=") and "<" not in metadata["Requires-Python"]


def test_a_wheel_built_from_the_source_distribution_is_the_same(
    archive: zipfile.ZipFile, builder: Path, build: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    made = execute(builder, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=PROJECT)
    assert made.code == 0, made.err
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as source:
        source.extractall(tmp_path / "source")
    (unpacked,) = (tmp_path / "source").iterdir()
    again = zipfile.ZipFile(build(unpacked, tmp_path / "again"))
    assert {i.filename: i.CRC for i in again.infolist()} == {i.filename: i.CRC for i in archive.infolist()}
