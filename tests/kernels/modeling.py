"""Every modeling module of the installed transformers, and what a kernel makes of its classes."""

from __future__ import annotations

import functools
import importlib
import pathlib
from types import ModuleType
from typing import Any

import transformers

import npu_autopatch
from npu_autopatch.kernels import probing

MODELS = pathlib.Path(transformers.__file__).parent / "models"


@functools.cache
def modules() -> dict[str, ModuleType]:
    """By name, all that can be imported here: some need an optional dependency."""
    found = {}
    for file in sorted(MODELS.glob("**/modeling_*.py")):
        name = "transformers.models." + ".".join(file.relative_to(MODELS).with_suffix("").parts)
        if ".auto." in name:
            continue
        try:
            found[name] = importlib.import_module(name)
        except Exception:
            continue
    return found


def swept_classes(kernel: str, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of `kernel` in every module, and class, original and fused forward of each patched site."""
    classes = {(name, cls.__name__): cls for name, module in modules().items() for cls in probing.classes(module)}
    originals = {cls: cls.forward for cls in classes.values()}
    with npu_autopatch.patched(kernels=kernel, backend=backend) as report:
        rows = {row.name: row for row in report.sites if row.module in modules() and row.kernel == kernel}
        fused = {cls: cls.forward for cls in originals}
    sites = {}
    for row in rows.values():
        if row.state == "patched":
            cls = classes[row.module, row.name.rpartition(".")[2]]
            sites[row.name] = (cls, originals[cls], fused[cls])
    return rows, sites
