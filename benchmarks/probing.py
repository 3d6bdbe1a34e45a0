"""What it takes to recognise and prove a site of each kernel, for every one of the installed transformers."""

from __future__ import annotations

import importlib
import pathlib
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator

import transformers

from npu_autopatch import emulator
from npu_autopatch.kernels import REGISTRY, load, rope
from npu_autopatch.kernels import probing as quiet
from npu_autopatch.kernels.base import Match

ROUNDS = 5


def rows() -> Iterator[tuple[str, float, float | None, str]]:
    emulator.install()
    kernels = [load(name) for name in REGISTRY]
    models = pathlib.Path(transformers.__file__).parent / "models"
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    looking: dict[str, list[float]] = defaultdict(list)
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
            for kernel in kernels:
                with quiet.undisturbed():
                    start = time.perf_counter()
                    sites = list(kernel.find(module))
                    looking[kernel.name].append((time.perf_counter() - start) * 1e3)
                    for site in sites:
                        rope._proved.clear()  # as if it were the first function of its code in the process
                        start = time.perf_counter()
                        proved = isinstance(kernel.prove(site, ("npu",)), Match)
                        took = (time.perf_counter() - start) * 1e3
                        if proved:
                            seconds[kernel.name][site.name] = min(took, seconds[kernel.name].get(site.name, took))
    for name, of in seconds.items():
        slowest = max(of, key=of.__getitem__)
        yield f"{name}: proving a site, mean of {len(of)}", statistics.mean(of.values()), 1.0, "ms"
        yield f"{name}: proving a site, median", statistics.median(of.values()), 1.0, "ms"
        yield f"{name}: proving the slowest ({slowest})", of[slowest], None, "ms"
        yield f"{name}: looking through a module, median", statistics.median(looking[name]), None, "ms"
