"""One run of a program in an environment: its output in a file, its end judged, its reports read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from npu_autopatch.cli.bisect_criteria import Criterion
from npu_autopatch.cli.terminal import CommandError
from npu_autopatch.reporting import Row

_POLL = 0.1
_GRACE = 20.0  # for a program to end by itself, and to write its report, after it is interrupted


@dataclass
class Run:
    """A run that has ended. `failure` says why it counts as failed, and is empty if it passed."""

    what: str
    log: Path
    failure: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


@dataclass
class Program:
    """The command under test, run with output into numbered files of `folder`. `timeout` is in seconds, 0: none."""

    command: Sequence[str]
    folder: Path
    criterion: Criterion
    timeout: float = 0.0
    runs: list[Run] = field(default_factory=list)

    def run(self, what: str, environment: Mapping[str, str], judged: bool = True) -> Run:
        """Run it, and judge it unless it is the reference. Raises `CommandError` if it cannot be run."""
        run = Run(what, self.folder / f"{len(self.runs) + 1:02}.log")
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as reports:
            # each process of a launcher writes its own; and what a crash leaves in a buffer cannot be judged
            named = {"NPU_AUTOPATCH_REPORT": str(Path(reports, "{pid}.json")), "PYTHONUNBUFFERED": "1"}
            run.failure = self._execute(run.log, {**environment, **named})
            run.rows = [row for file in sorted(Path(reports).glob("*.json")) for row in _rows(file)]
        if judged and not run.failure:
            run.failure = self.criterion.of_output(run.log)
        run.seconds = time.perf_counter() - begin
        self.runs.append(run)
        return run

    def _execute(self, log: Path, environment: Mapping[str, str]) -> str:
        with log.open("wb") as output:
            try:
                # a session of its own: all processes that it starts can be ended with it
                process = subprocess.Popen(
                    self.command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                words = f"{self.command[0]!r} cannot be run ({error.strerror})"
                raise CommandError(f"{words}: give a program and its arguments after --") from None
        try:
            failure = self._watch(process, log)
        finally:
            if process.returncode is None:
                _end(process)
        return failure

    def _watch(self, process: subprocess.Popen[bytes], log: Path) -> str:
        """Wait for the end, or for what shows that the run has failed; why it has, or an empty string."""
        begin, begun = time.monotonic(), ""
        with log.open(errors="replace") as output:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL)
                ended = process.returncode is not None
                *lines, begun = f"{begun}{output.read()}".split("\n")
                for line in [*lines, begun] if ended else lines:
                    if failure := self.criterion.of_line(line):
                        return failure
                if ended:
                    return _exit(process.returncode)
                if self.timeout and time.monotonic() - begin > self.timeout:
                    return f"ran for more than {self.timeout:g} seconds"


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that it writes its report; by force after a while, or if the user has no patience either."""
    try:
        for number, patience in ((signal.SIGINT, _GRACE), (signal.SIGTERM, _GRACE / 4)):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
        _wait_for_others(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_others(group: int) -> None:
    """Processes that the first one has started may be writing their reports."""
    until = time.monotonic() + _GRACE / 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(_POLL)


def _rows(file: Path) -> list[Row]:
    try:
        return [Row(**site) for site in json.loads(file.read_text())["sites"]]
    except (OSError, ValueError, KeyError, TypeError):  # of a version that writes others
        return []
