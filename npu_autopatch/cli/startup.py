"""Whether NPU_AUTOPATCH=1 takes effect in a new interpreter, and the environment in which it does."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from npu_autopatch.cli import run
from npu_autopatch.cli.terminal import CommandError

HOOK = f"npu_autopatch-init.{'start' if sys.version_info >= (3, 15) else 'pth'}"


@dataclass(frozen=True)
class StartUp:
    """The start-up hook: the folder it lies in, whether Python processes that, and what a new interpreter did."""

    folder: str
    processed: bool
    boot: bool
    effective: bool
    complaint: str


def examine(environ: Mapping[str, str]) -> StartUp:
    """Look for the hook, and start an interpreter to see whether it works."""
    folder = next((path for path in sys.path if os.path.isfile(os.path.join(path, HOOK))), "")
    processed = {os.path.realpath(path) for path in _site_folders()}
    child = subprocess.run(
        [sys.executable, "-c", "import sys; print(*(type(finder).__name__ for finder in sys.meta_path))"],
        env=switched_on(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    return StartUp(
        folder,
        bool(folder) and os.path.realpath(folder) in processed,
        find_spec("_npu_autopatch_boot") is not None,
        "ModelingFinder" in child.stdout.split(),
        next((line for line in child.stderr.splitlines() if line.startswith("npu_autopatch:")), ""),
    )


def switched_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables as they would be if the user set NPU_AUTOPATCH=1, unless it is on already."""
    on = environ.get("NPU_AUTOPATCH", "").strip().lower() not in run.OFF_VALUES
    return {**environ, "NPU_AUTOPATCH": environ["NPU_AUTOPATCH"] if on else "1"}


def environment(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a program starts with the package on.

    What a user sets where the start-up hook works, else what `npu-autopatch run` sets. Raises `CommandError`.
    """
    if examine({**environ, **settings}).effective:
        return switched_on({**environ, **settings})
    chain = run.chain_folder()
    if chain:
        return run.environment(environ, chain, settings)
    source = Path(__file__).parents[2]
    hook = source / "sitecustomize_hook"
    if not hook.is_dir():
        raise CommandError("the start-up files are not installed beside npu_autopatch: reinstall npu-autopatch")
    path = os.pathsep.join(filter(None, (str(hook), str(source), environ.get("PYTHONPATH", ""))))
    return run.environment({**environ, "PYTHONPATH": path}, str(hook / "chain"), settings)


def _site_folders() -> list[str]:
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
