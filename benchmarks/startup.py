"""What an interpreter pays at start: disabled, and enabled without any model."""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator

RUNS = 200
PROJECT = pathlib.Path(__file__).parent.parent


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    """Medians of interleaved runs, in ms above an environment with an empty ``.pth``."""
    with tempfile.TemporaryDirectory() as folder:
        empty, ours = (_environment(pathlib.Path(folder) / name) for name in ("empty", "ours"))
        (_packages(empty) / "empty.pth").write_text("")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", _packages(ours), PROJECT],
            check=True,
        )
        off = {key: value for key, value in os.environ.items() if not key.startswith(("NPU_AUTOPATCH", "PYTHON"))}
        times: dict[str, list[float]] = {"empty": [], "off": [], "on": []}
        for _ in range(RUNS):
            for name, python, environ in (
                ("empty", empty, off),
                ("off", ours, off),
                ("on", ours, {**off, "NPU_AUTOPATCH": "1"}),
            ):
                start = time.perf_counter()
                subprocess.run([python, "-c", "pass"], env=environ, check=True)
                times[name].append((time.perf_counter() - start) * 1e3)
        medians = {name: statistics.median(values) for name, values in times.items()}
    yield "start-up with an empty .pth", medians["empty"], None, "ms"
    yield "start-up disabled, above that", medians["off"] - medians["empty"], 0.5, "ms"
    yield "start-up enabled, above that", medians["on"] - medians["empty"], None, "ms"


def _environment(folder: pathlib.Path) -> pathlib.Path:
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def _packages(python: pathlib.Path) -> pathlib.Path:
    (packages,) = python.parent.parent.glob("lib/python3.*/site-packages")
    return packages
