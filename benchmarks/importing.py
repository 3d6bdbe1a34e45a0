"""What the import of a model costs with everything enabled: fresh interpreters, in turn, one ratio."""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

RUNS = 15
PROJECT = pathlib.Path(__file__).parent.parent
CODE = """
import time
start = time.perf_counter()
import transformers.models.qwen3.modeling_qwen3
print(time.perf_counter() - start)
"""


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    """Medians; the backend is ``emulate``, so that every site is found, proved and patched."""
    hook = PROJECT / "sitecustomize_hook"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NPU_AUTOPATCH")}
    common = {**kept, "PYTHONPATH": os.pathsep.join(map(str, (hook / "chain", hook, PROJECT)))}
    surroundings = {
        "off": {**common, "NPU_AUTOPATCH": "0"},
        "on": {
            **common,
            "NPU_AUTOPATCH": "1",
            "NPU_AUTOPATCH_BACKEND": "emulate",
            "NPU_AUTOPATCH_LOG": "warning",
        },
    }
    times: dict[str, list[float]] = {name: [] for name in surroundings}
    for _ in range(RUNS):
        for name, environment in surroundings.items():
            run = [sys.executable, "-c", CODE]
            printed = subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout
            times[name].append(float(printed))
    medians = {name: statistics.median(values) for name, values in times.items()}
    yield "importing modeling_qwen3, off", medians["off"] * 1e3, None, "ms"
    yield "importing modeling_qwen3, all kernels", medians["on"] * 1e3, None, "ms"
    yield "all kernels to off", medians["on"] / medians["off"], 1.03, "times"
