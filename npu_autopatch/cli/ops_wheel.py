"""What the files of the installed torch_npu say of its ops, read as text: importing it needs CANN, and may fail."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_DOCUMENTATION = "_op_plugin_docs.py"
_SCHEMAS = ("csrc/aten/npu_native_functions.yaml", "csrc/aten/npu_native_functions_by_codegen.yaml")
# The ops of torch_npu itself stand in sections of those files that are called so, one line each.
_OWN = re.compile(r"(?ms)^custom\w*:\n(.*?)(?=^\w|\Z)")
_SIGNATURE = re.compile(r"(?m)^[ -]*func: ([\w.]+\(.*\) -> .*?)\s*$")


@dataclass(frozen=True)
class Wheel:
    """The version, and by name of the op its signatures, one an overload, and its documentation."""

    version: str
    signatures: dict[str, list[str]] = field(default_factory=dict)
    documentation: dict[str, str] = field(default_factory=dict)


def read() -> Wheel | None:
    """The installed torch_npu, which is not imported; None without one."""
    spec = find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        installed = version("torch_npu")
    except PackageNotFoundError:
        installed = "of unknown version"
    signatures: dict[str, list[str]] = {}
    for file in _SCHEMAS:
        for section in _OWN.findall(_text(folder / file)):
            for signature in _SIGNATURE.findall(section):
                name = re.split(r"[.(]", signature, maxsplit=1)[0]
                # torch registers the argument under the name that Python can pass it by
                signatures.setdefault(name, []).append(re.sub(r"\bself\b", "input", signature))
    return Wheel(installed, signatures, _documentation(_text(folder / _DOCUMENTATION)))


def _documentation(code: str) -> dict[str, str]:
    """The texts that `code` would attach to functions: calls of a name and a text."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return {}
    texts = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 2:
            name, text = (node.value if isinstance(node, ast.Constant) else None for node in node.args)
            if isinstance(name, str) and isinstance(text, str):
                texts[name.partition(".")[0]] = text.strip()
    return texts


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
