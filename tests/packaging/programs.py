"""Running a program on the CPU emulator in an environment with models."""

from __future__ import annotations

import textwrap
from pathlib import Path

from virtual_environment import Outcome, VirtualEnvironment

# A program that hangs is a failure with every thread's stack.
WATCHDOG = "import faulthandler; faulthandler.dump_traceback_later(60, exit=True)\nfrom observing import *\n"


def emulated(
    environment: VirtualEnvironment, program: str, file: Path | None = None, on: str | None = "1", **variables: str
) -> Outcome:
    """Run `program` under NPU_AUTOPATCH_BACKEND=emulate; from `file`, where its children must be able to import it."""
    program = WATCHDOG + textwrap.dedent(program)
    variables = {"NPU_AUTOPATCH_BACKEND": "emulate", "NPU_AUTOPATCH_LOG": "warning", **variables}
    if file is None:
        return environment.python("-c", program, on=on, **variables)
    file.write_text(program)
    return environment.python(file, on=on, **variables)
