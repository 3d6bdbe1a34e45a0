"""Builds the stand-in for CANN's runtime libraries that the installed torch_npu wheel links against.

Imports neither torch nor torch_npu: it runs before them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("cann_runtime.c")
_RUNTIME = "ascendcl"
_LINKED_TO_RUNTIME = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
_NO_SUCH_KERNEL = 500002
_ANSWERS = dict.fromkeys(("aclopCompileAndExecute", "aclopCompileAndExecuteV2"), _NO_SUCH_KERNEL)
# Functions that torch_npu looks up by name at run time stand as strings in its binaries.
_LOOKED_UP = re.compile(rb"(?<=\0)(?:acl(?!nn|Error)[a-z]*[A-Z]|rt[A-Z]|Hccl|hccl[A-Z]|Msprof)[A-Za-z0-9]{3,60}(?=\0)")
_LINKED = re.compile(r"acl|rt[A-Z]|Hccl|Msprof")


def installed() -> bool:
    """Whether a torch_npu wheel is there to be run."""
    return importlib.util.find_spec("torch_npu") is not None


def load() -> None:
    """Put the stand-in's functions where ``import torch_npu`` will find them."""
    libraries = build()
    for name in (_RUNTIME, *_LINKED_TO_RUNTIME):
        ctypes.CDLL(str(libraries / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)


def build() -> Path:
    """The folder of the stand-in's libraries, compiled if this wheel and this source have none yet."""
    content = _SOURCE.read_bytes() + Path(__file__).read_bytes()
    key = f"{importlib.metadata.version('torch_npu')}-{hashlib.sha256(content).hexdigest()[:16]}"
    ready = _cache() / key
    with (_cache() / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            unfinished = ready.with_name(f"{key}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _compile(unfinished)
            unfinished.rename(ready)
    return ready


def _cache() -> Path:
    in_environment = os.access(sys.prefix, os.W_OK) and sys.prefix != sys.base_prefix
    cache = (
        Path(sys.prefix, "virtual_npu") if in_environment else Path(tempfile.gettempdir(), f"virtual_npu-{os.getuid()}")
    )
    cache.mkdir(mode=0o700, exist_ok=True)
    return cache


def _compile(into: Path) -> None:
    missing = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"the virtual NPU needs {' and '.join(missing)} on PATH; install gcc and binutils")
    source = _SOURCE.read_text()
    written = set(re.findall(r"\b((?:acl|rt)\w+)\s*\(", source))
    generated = [f"long {name}(void) {{ return {_ANSWERS.get(name, 0)}; }}\n" for name in _wanted() - written]
    unit = into / "cann.c"
    unit.write_text(source + "".join(sorted(generated)))
    library = ["cc", "-w", "-shared", "-fPIC", "-x", "c"]
    _run(*library, unit, "-o", into / f"lib{_RUNTIME}.so", f"-Wl,-soname,lib{_RUNTIME}.so")
    for name in _LINKED_TO_RUNTIME:
        # Linked to the runtime, so that a look-up in any of them finds every function.
        link = ["-Wl,--no-as-needed", f"-L{into}", f"-l{_RUNTIME}", "-Wl,-rpath,$ORIGIN"]
        _run(*library, os.devnull, "-o", into / f"lib{name}.so", f"-Wl,-soname,lib{name}.so", *link)


def _wanted() -> set[str]:
    """The CANN functions that the wheel's binaries are linked to or look up."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("torch_npu is not installed; pip install --no-deps torch_npu==2.13.0")
    root = Path(spec.submodule_search_locations[0])
    names = set()
    for binary in (*root.glob("lib/*.so"), *root.glob("_C*.so")):
        names |= {name.decode() for name in _LOOKED_UP.findall(binary.read_bytes())}
        symbols = [line.split()[-1].partition("@")[0] for line in _run("nm", "-D", "-u", binary).splitlines()]
        names |= {name for name in symbols if _LINKED.match(name)}
    return names


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
