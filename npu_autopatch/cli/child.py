"""Work in a process of its own, which sends JSON lines: torch and models stay out of the caller's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# A module of ours under the caller's own sys.path, whatever the current folder holds.
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class ChildError(Exception):
    """A child process that did not finish; the message is its last line on stderr, or how it ended."""


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in a child."""
    return [sys.executable, "-c", _START, json.dumps(sys.path), name, *arguments]


def messages(command: list[str], environment: Mapping[str, str], folder: str | None = None) -> Iterator[dict[str, Any]]:
    """Run `command` and give each JSON object it writes on a line of stdout. Raises `ChildError`."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    try:
                        yield json.loads(line)
                    except ValueError:  # a line of the program's own
                        continue
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code:
            stderr.seek(0)
            lines = [line.strip() for line in stderr if line.strip()]
            raise ChildError(lines[-1] if lines and code > 0 else f"it ended with code {code}")


def sender() -> Callable[[dict[str, Any]], None]:
    """In the child: what sends a message. From here on nothing else reaches stdout."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return send
