"""A virtual environment of its own for a test, and what an interpreter in it said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FAKE_SITE = Path(__file__).resolve().parent / "fake_site"

# What the start of an interpreter left behind, as JSON on stdout.
STATE = """\
import sys
modules, finders = list(sys.modules), [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path]
import json
print(json.dumps({"modules": modules, "finders": finders, "path": sys.path}))
"""


@dataclass(frozen=True)
class Outcome:
    """Exit code, stdout and stderr of a process that ended."""

    code: int
    out: str
    err: str

    @property
    def state(self) -> dict[str, list[str]]:
        """What `STATE`, as the last thing printed, found."""
        return json.loads(self.out.splitlines()[-1])

    def said(self, out: str) -> Outcome:
        """Insist on success, exactly this stdout and an empty stderr."""
        assert (self.code, self.out, self.err) == (0, out, "")
        return self


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what steers Python, this package or a measuring test run."""
    steering = ("PYTHON", "NPU_AUTOPATCH", "COV_", "COVERAGE", "PYTEST", "VIRTUAL_ENV", "PIP_TARGET", "__PYVENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return {**kept, **variables}


def execute(*command: str | Path, cwd: Path | None = None, shell: bool = False, **variables: str) -> Outcome:
    """Run a command to its end in a clean environment plus `variables`."""
    done = subprocess.run(
        command[0] if shell else [str(part) for part in command],
        cwd=cwd,
        shell=shell,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class VirtualEnvironment:
    """A virtual environment in `folder`; packages come in through the pip of the interpreter `builder`."""

    folder: Path
    builder: Path

    @classmethod
    def create(cls, folder: Path, builder: Path, interpreter: str | Path = sys.executable) -> VirtualEnvironment:
        """What `python -m venv` makes."""
        made = execute(interpreter, "-m", "venv", "--without-pip", folder)
        assert made.code == 0, made.err
        return cls(folder, builder)

    def copy(self, folder: Path) -> VirtualEnvironment:
        """The same in another folder; the commands in `bin` go on belonging to the first."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return VirtualEnvironment(folder, self.builder)

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (path,) = self.folder.glob("lib/python3*/site-packages")
        return path

    def pip(self, *arguments: str | Path) -> None:
        """Run pip on this environment."""
        done = execute(self.builder, "-m", "pip", "-q", "--python", self.interpreter, *arguments)
        assert done.code == 0, done.out + done.err

    def write(self, name: str, text: str) -> Path:
        """Write a file into site-packages."""
        path = self.site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, *arguments: str | Path, on: str | None = "1", **variables: str) -> Outcome:
        """Run the interpreter with NPU_AUTOPATCH=`on`, or without the variable if that is None."""
        if on is not None:
            variables["NPU_AUTOPATCH"] = on
        return execute(self.interpreter, *arguments, cwd=self.folder, **variables)

    def shell(self, command: str, on: str | None = "1", **variables: str) -> Outcome:
        """Run a shell command, in which `python` is this interpreter."""
        if on is not None:
            variables["NPU_AUTOPATCH"] = on
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return execute(command, cwd=self.folder, shell=True, PATH=path, **variables)

    def ours(self) -> list[str]:
        """Names in site-packages that come from this package."""
        return sorted(entry.name for entry in self.site_packages.iterdir() if "npu_autopatch" in entry.name)
