"""`doctor` says whether NPU_AUTOPATCH=1 python train.py would fuse, and if not why not."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_autopatch.cli import cann

from .conftest import HOOK, PROJECT, WITH_TWO_DEVICES, WITHOUT_CANN


def flat(text: str) -> str:
    return " ".join(text.split())


def test_emulate_with_the_hook_in_place_would_fuse(command: Callable[..., object]) -> None:
    done = command("doctor", started=True, NPU_AUTOPATCH="rms_norm", NPU_AUTOPATCH_BACKEND="emulate")
    assert (done.code, done.err) == (0, ""), done
    assert done.columns <= 80
    words = flat(done.out)
    assert "in a new interpreter it takes effect" in words
    assert "kernels rms_norm; backend emulate" in words and "is off" not in words
    assert "op npu_rms_norm ok available, differentiable" in words
    assert "would fuse, emulated on the CPU" in words and "What is wrong" not in words


def test_an_npu_that_torch_can_use_would_fuse(
    command: Callable[..., object], torch_npu: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "cann_8").mkdir()
    (tmp_path / "cann_8" / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[7.7.0.1:8.1.RC1]\n")
    stand_in = torch_npu(WITH_TWO_DEVICES)
    done = command("doctor", "--json", started=True, folders=(stand_in,), ASCEND_HOME_PATH=str(tmp_path / "cann_8"))
    found = json.loads(done.out)
    assert (done.code, found["fuses"], found["problems"]) == (0, True, [])
    assert found["machine"]["devices"] == ["Ascend910B0", "Ascend910B1"]
    assert found["cann"]["version"] == "8.1.RC1"
    assert found["switched_on"] is False and found["settings"]["backend"] == "npu"


def test_torch_npu_without_cann_is_said_in_words(
    command: Callable[..., object], torch_npu: Callable[[str], Path]
) -> None:
    done = command("doctor", started=True, folders=(torch_npu(WITHOUT_CANN),))
    assert done.code == 1 and "Traceback" not in done.out + done.err
    assert "import torch fails: ImportError: libhccl.so: cannot open shared object file" in flat(done.out)
    assert "set_env.sh" in done.out and "would not fuse" in done.out


@pytest.fixture
def installed(tmp_path: Path) -> tuple[Path, Path]:
    """A virtual environment with this one's packages and what the wheel installs: interpreter, site-packages."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for entry in (entry for path in site.getsitepackages() for entry in Path(path).iterdir()):
        ours = entry.name.startswith(("npu_autopatch", "_npu_autopatch"))  # installed for development, maybe
        if not ours and entry.suffix not in (".pth", ".start"):
            (packages / entry.name).symlink_to(entry)
    (packages / "npu_autopatch").symlink_to(PROJECT / "npu_autopatch")
    (packages / "_npu_autopatch_chain").symlink_to(HOOK / "chain")
    for name in ("npu_autopatch-init.pth", "npu_autopatch-init.start", "_npu_autopatch_boot.py"):
        shutil.copy(HOOK / name, packages)
    return folder / "bin" / "python", packages


def diagnosed(interpreter: Path, variables: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Exit code and findings of doctor in an environment where only what is installed can be imported."""
    variables["PYTHONPATH"] = variables["PYTHONPATH"].replace(str(PROJECT), "")
    command = [interpreter, "-m", "npu_autopatch.cli", "doctor", "--json"]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    return ended.returncode, json.loads(ended.stdout)


def test_without_the_hook_and_with_wrong_settings_it_names_both(
    installed: tuple[Path, Path], environment: Callable[..., dict[str, str]]
) -> None:
    interpreter, packages = installed
    for start_up_file in (*packages.glob("npu_autopatch-init.*"), *packages.glob("_npu_autopatch_*")):
        start_up_file.unlink()
    code, found = diagnosed(interpreter, environment(NPU_AUTOPATCH="rms_nrom", NPU_AUTOPATCH_BACKEND="emulate"))
    assert (code, found["fuses"], found["startup"]["effective"]) == (1, False, False)
    hook, settings = found["problems"]
    assert "start-up hook is not installed" in hook["what"] and "pip install npu-autopatch" in hook["do"]
    assert "'rms_nrom' is unknown: choose" in settings["what"] and "rms_norm" in settings["what"]


def test_the_installed_pth_is_found_and_its_absence_leads_to_run(
    installed: tuple[Path, Path], environment: Callable[..., dict[str, str]]
) -> None:
    interpreter, packages = installed

    code, found = diagnosed(interpreter, environment(NPU_AUTOPATCH_BACKEND="emulate"))
    assert (code, found["problems"]) == (0, [])
    assert found["startup"] == {
        "folder": str(packages), "processed": True, "boot": True, "effective": True, "complaint": ""
    }  # fmt: skip
    for name in ("npu_autopatch-init.pth", "npu_autopatch-init.start"):
        (packages / name).unlink()
    code, found = diagnosed(interpreter, environment(NPU_AUTOPATCH_BACKEND="emulate"))
    assert (code, found["startup"]["effective"]) == (1, False)
    assert "npu-autopatch run" in found["problems"][0]["do"]


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n", "8.3.RC1"),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.6.0.1:8.1.RC1]\n", "8.1.RC1"),
        ("opp/version.info", "Version=8.0.0\n", "8.0.0"),
        ("readme", "version=1\n", ""),
    ],
)
def test_the_version_of_cann_is_read_where_it_stands(tmp_path: Path, file: str, text: str, version: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    found = cann.find({"ASCEND_TOOLKIT_HOME": str(tmp_path)})
    assert (found.folder, found.version) == (str(tmp_path), version)


def test_a_folder_of_cann_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = cann.find({"ASCEND_HOME_PATH": str(tmp_path / "gone")})
    assert found.folder == "" and str(tmp_path / "gone") in found.advice and "set_env.sh" in found.advice
