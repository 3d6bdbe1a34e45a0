"""The real command in a process of its own, and stand-ins for torch_npu that any machine can have."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
HOOK = PROJECT / "sitecustomize_hook"

# Where a real torch_npu is installed without CANN, `import torch` needs the stand-in for CANN's libraries.
_CANN = f"import sys; sys.path.append({str(PROJECT)!r})\nfrom tests.virtual_npu.cann_library import load; load()\n"

WITHOUT_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"

WITH_TWO_DEVICES = """\
import sys, types
import torch
torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")
npu.is_available, npu.device_count, npu.get_device_name = lambda: True, lambda: 2, "Ascend910B{}".format
torch.npu = sys.modules["torch.npu"] = npu
library = torch.library.Library("npu", "DEF")
library.define("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
library.impl("npu_rms_norm", lambda *_: None, "AutogradPrivateUse1")
library.define("npu_swiglu(Tensor self, int dim=-1) -> Tensor")
library.impl("npu_swiglu", lambda *_: None, "AutogradPrivateUse1")
library.define("npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor")
library.impl("npu_rotary_mul", lambda *_: None, "AutogradPrivateUse1")
library.define(
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor? group_list=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0) -> Tensor[]"
)
library.define("npu_moe_token_permute(Tensor tokens, Tensor indices) -> (Tensor, Tensor)")
library.define("npu_moe_token_unpermute(Tensor tokens, Tensor sorted_indices, Tensor? probs=None) -> Tensor")
for op in ("npu_moe_token_permute", "npu_moe_token_unpermute"):
    library.impl(op, lambda *_: None, "AutogradPrivateUse1")
npu_fusion_attention = None  # transformers imports it
def _autoload():
    pass
"""


@dataclass(frozen=True)
class Outcome:
    """Exit code, stdout and stderr of a command that ended."""

    code: int
    out: str
    err: str

    def refused(self, *named: str) -> None:
        """Insist on bad input: one sentence on stderr that names what is valid, and nothing else."""
        assert (self.code, self.out, len(self.err.splitlines())) == (2, "", 1), self
        assert self.err.startswith("npu-autopatch") and "Traceback" not in self.err
        for word in named:
            assert word in self.err, self.err

    @property
    def columns(self) -> int:
        """Of the widest line on stdout."""
        return max(map(len, self.out.splitlines()), default=0)


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """This process's variables without what steers the package; `folders` come first on PYTHONPATH."""

    def build(*folders: Path, **variables: str) -> dict[str, str]:
        steering = ("NPU_AUTOPATCH", "PYTHON", "ASCEND", "HF_", "COLUMNS", "TORCH_DEVICE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        path = [*folders, PROJECT]
        if importlib.util.find_spec("torch_npu") is not None:
            (tmp_path / "cann").mkdir(exist_ok=True)
            (tmp_path / "cann" / "sitecustomize.py").write_text(_CANN)
            path.append(tmp_path / "cann")
        return {**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1", **variables}

    return build


@pytest.fixture
def command(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> Callable[..., Outcome]:
    """Run `npu-autopatch` as ``python -m``; `started`: with what the wheel installs for start-up in place."""

    def run(*arguments: str | Path, folders: tuple[Path, ...] = (), started: bool = False, **variables: str) -> Outcome:
        if started:
            folders = (HOOK / "chain", HOOK, *folders)
        done = subprocess.run(
            [sys.executable, "-m", "npu_autopatch.cli", *map(str, arguments)],
            env=environment(*folders, **variables),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def torch_npu(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a torch_npu of this code, which torch loads when it starts as it does the real one."""

    def write(code: str) -> Path:
        folder = tmp_path / "stand_in"
        metadata = folder / "torch_npu-2.13.0.dist-info"
        for name, text in (
            (folder / "torch_npu" / "__init__.py", code),
            (metadata / "METADATA", "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"),
            (metadata / "entry_points.txt", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"),
        ):
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text(text)
        return folder

    return write
