"""The kernel in docs/writing-a-kernel.md, as it is written there, is found, proved, patched and undone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (PROJECT / "docs" / "writing-a-kernel.md").read_text(), re.M | re.S)
FILES = {
    code.partition("\n")[0].removeprefix("# "): code.partition("\n")[2] for kind, code in BLOCKS if kind == "python"
}
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/kernels/test_gelu.py")
DIFFS = [code for kind, code in BLOCKS if kind == "diff"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with what the document adds to it, and the tests that the document's own stand on."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PROJECT / "npu_autopatch", root / "npu_autopatch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/__init__.py", "tests/counting.py", "tests/kernels/__init__.py", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, root / name)
    for name, code in FILES.items():
        assert not (PROJECT / name).exists(), f"{name} is part of the project already"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(code)
    for diff in DIFFS:
        first, *lines = diff.splitlines(keepends=True)
        file = root / first.removeprefix("+++ ").strip()
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        text = file.read_text()
        assert text.count(before) == 1, f"{file.name} does not have, once:\n{before}"
        file.write_text(text.replace(before, after))
    return root


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("NPU_AUTOPATCH", "PYTEST"))}
    variables |= {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=variables, capture_output=True, text=True, timeout=300
    )


def test_the_document_has_each_part_of_a_kernel() -> None:
    assert list(FILES) == [
        "npu_autopatch/ops/gelu.py",
        "npu_autopatch/emulator/gelu.py",
        "tests/virtual_npu/samples/gelu.py",
        "npu_autopatch/kernels/gelu.py",
        "tests/kernels/test_gelu.py",
    ]
    assert len(DIFFS) == 3


def test_the_documents_own_tests_pass_on_its_kernel(copy: Path) -> None:
    done = run(copy, *TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


def test_its_code_is_as_clean_as_the_projects(copy: Path) -> None:
    for command in (("ruff", "check"), ("ruff", "format", "--check")):
        done = run(copy, "-m", *command, "--no-cache", *FILES)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_knows_the_kernel(copy: Path) -> None:
    done = run(
        copy, "-m", "npu_autopatch.cli", "coverage", "--family", "esm", "--kernels", "gelu", "--backend", "emulate"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gelu 1 patched, 0 refused" in done.stdout
