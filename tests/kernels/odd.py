"""A module of test classes, as if it were a modeling module of transformers."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import npu_autopatch


@contextmanager
def patched_copy(original: ModuleType, kernel: str) -> Iterator[Callable[[type], tuple[Any, type]]]:
    """A patched copy of `original`; gives, for a class of it, the report's row, or None, and the copy's class."""
    name = f"transformers.models.odd.modeling_{original.__name__.rpartition('.')[2]}"
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(original.__file__))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    try:
        with npu_autopatch.patched(kernels=kernel, backend="emulate"):
            rows = {row.name: row for row in npu_autopatch.report().sites if row.module == name}
            yield lambda cls: (rows.get(f"odd.{cls.__name__}"), getattr(module, cls.__name__))
    finally:
        del sys.modules[name]
