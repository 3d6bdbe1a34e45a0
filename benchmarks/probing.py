"""What it takes to recognise and prove a norm, for every norm of the installed transformers."""

from __future__ import annotations

import importlib
import pathlib
import statistics
import time
import warnings
from collections.abc import Iterator

import transformers

from npu_autopatch import emulator
from npu_autopatch.kernels import load
from npu_autopatch.kernels import probing as quiet
from npu_autopatch.kernels.base import Match

ROUNDS = 5


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    emulator.install()
    kernel = load("rms_norm")
    models = pathlib.Path(transformers.__file__).parent / "models"
    seconds: dict[str, float] = {}
    looking = []
    for file in sorted(models.glob("*/modeling_*.py")):
        name = ".".join(("transformers.models", *file.relative_to(models).with_suffix("").parts))
        if ".auto." in name:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except Exception:  # an optional dependency is not installed
            continue
        for _ in range(ROUNDS):
            with quiet.undisturbed():
                start = time.perf_counter()
                sites = list(kernel.find(module))
                looking.append((time.perf_counter() - start) * 1e3)
                for site in sites:
                    start = time.perf_counter()
                    proved = isinstance(kernel.prove(site, ("npu",)), Match)
                    took = (time.perf_counter() - start) * 1e3
                    if proved:
                        seconds[site.name] = min(took, seconds.get(site.name, took))
    yield f"proving a norm, mean of {len(seconds)}", statistics.mean(seconds.values()), 1.0, "ms"
    yield "proving a norm, median", statistics.median(seconds.values()), 1.0, "ms"
    yield f"proving a norm, the slowest ({max(seconds, key=seconds.__getitem__)})", max(seconds.values()), None, "ms"
    yield "looking for norms in a module, median", statistics.median(looking), None, "ms"
