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
        for again in range(ROUNDS):
            if again == 1:
                proved_so_far = dict(rope._proved)
            for kernel in kernels:
                # rope proves a code once in a process: the first round is what users pay
                name = kernel.name if kernel.name != "rope" or not again else "rope, each code anew"
                with quiet.undisturbed():
                    start = time.perf_counter()
                    sites = list(kernel.find(module))
                    looking[name].append((time.perf_counter() - start) * 1e3)
                    for site in sites:
                        if again:
                            rope._proved.clear()
                        start = time.perf_counter()
                        proved = isinstance(kernel.prove(site, ("npu",)), Match)
                        took = (time.perf_counter() - start) * 1e3
                        if proved:
                            seconds[name][site.name] = min(took, seconds[name].get(site.name, took))
        rope._proved.update(proved_so_far)
    for name, of in seconds.items():
        slowest = max(of, key=of.__getitem__)
        yield f"{name}: proving a site, mean of {len(of)}", statistics.mean(of.values()), 1.0, "ms"
        yield f"{name}: proving a site, median", statistics.median(of.values()), 1.0, "ms"
        yield f"{name}: proving the slowest ({slowest})", of[slowest], None, "ms"
        yield f"{name}: looking through a module, median", statistics.median(looking[name]), None, "ms"
