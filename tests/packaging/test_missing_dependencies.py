"""Without torch or wrapt, with broken ones or with wrong settings, models load as ever and one line says why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from virtual_environment import FAKE_SITE, VirtualEnvironment

PROGRAM = """\
import sys
import transformers.models.plain9.modeling_plain9 as model
import transformers.dynamic_module_utils
print(model.ANSWER)
"""
# As much of wrapt as lets the import go on to torch.
WRAPT = """\
class ObjectProxy(object):
    def __init__(self, wrapped):
        self.__dict__["__wrapped__"] = wrapped
    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)
class FunctionWrapper(ObjectProxy):
    pass
"""


@pytest.fixture
def environment(changeable: VirtualEnvironment) -> VirtualEnvironment:
    shutil.copytree(FAKE_SITE, changeable.site_packages, dirs_exist_ok=True)
    return changeable


BREAKAGES = {
    "wrapt missing": (),
    "wrapt broken": (("wrapt.py", "raise RuntimeError('in two\\nlines')\n"),),
    "wrapt exits": (("wrapt.py", "raise SystemExit(3)\n"),),
    "wrapt too old": (("wrapt.py", ""),),
    "torch missing": (("wrapt.py", WRAPT),),
    "torch broken": (("wrapt.py", WRAPT), ("torch.py", "raise OSError('libhccl.so: cannot open')\n")),
    "torch exits": (("wrapt.py", WRAPT), ("torch.py", "raise SystemExit(3)\n")),
    "torch without anything": (("wrapt.py", WRAPT), ("torch.py", "")),
    "our own code broken": (("wrapt.py", WRAPT), ("npu_autopatch/activation.py", "raise RecursionError\n")),
    "our own code exits": (("wrapt.py", WRAPT), ("npu_autopatch/activation.py", "raise SystemExit(3)\n")),
}


@pytest.mark.parametrize("files", BREAKAGES.values(), ids=BREAKAGES)
def test_a_model_loads_and_one_line_says_what_is_missing(
    environment: VirtualEnvironment, files: tuple[tuple[str, str], ...]
) -> None:
    for name, text in files:
        environment.write(name, text)
    on = environment.python("-c", PROGRAM)
    assert (on.code, on.out) == (0, "42\n"), on.err
    lines = on.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("npu_autopatch: "), on.err
    environment.python("-c", PROGRAM, on=None).said("42\n")


@pytest.mark.parametrize("files", BREAKAGES.values(), ids=BREAKAGES)
def test_without_a_stderr_it_loads_too(
    environment: VirtualEnvironment, files: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    for name, text in files:
        environment.write(name, text)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment.shell(f"python {tmp_path / 'program.py'} 2>&-").said("42\n")
    assert environment.shell(f"python {tmp_path / 'program.py'} 2>/dev/full").out == "42\n"
