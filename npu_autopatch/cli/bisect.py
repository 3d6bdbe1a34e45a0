"""`npu-autopatch bisect`: which sites make a program fail, found by running it with others skipped."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_autopatch.cli import machine, startup
from npu_autopatch.cli.bisect_criteria import Command, Criterion, NotANumber, Numbers
from npu_autopatch.cli.bisect_outcome import Outcome, described, print_, so_far, where
from npu_autopatch.cli.bisect_run import Program, Run
from npu_autopatch.cli.bisect_search import Search
from npu_autopatch.cli.bisect_sites import Sites, setting
from npu_autopatch.cli.bisect_verify import verify
from npu_autopatch.cli.terminal import CommandError, progress
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.reporting import PATCHED, SKIPPED
from npu_autopatch.settings import BACKENDS, Settings

if TYPE_CHECKING:
    from rich.progress import Progress

_DESCRIPTION = """\
Find the smallest set of sites that makes COMMAND fail: run it with everything
patched (it must fail) and with everything skipped (it must pass), then with
ever fewer sites patched. One culprit among 1000 sites takes ten runs beside
these two, and two that confirm it: it fails alone, and all others pass.
Several culprits take more.

A run fails if its exit code is not 0; with --until-nan also if it prints a
nan or inf as a number, and it is stopped there; with --compare also if the
losses it prints differ from those of a run with NPU_AUTOPATCH=0. So for a
loss that is wrong: fix the seeds, shorten the training to the first steps
that show it, and let it print its losses as it does. With a CMD of your own,
anything that it prints or writes can be compared.

Exit code 0 if culprits were found, 1 if there is nothing to find: COMMAND
passes, or fails without patches, too.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `bisect` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "bisect",
        help="find the sites that make a program fail",
        description=_DESCRIPTION,
        usage="npu-autopatch bisect [options] -- COMMAND ...",
        epilog="example: npu-autopatch bisect --compare -- python train.py --max_steps 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--until-nan", action="store_true", help="a nan or inf printed as a number is a failure, too")
    words = "a shell command that ends with 0 if the output is right; it gets the file of the output, or files in "
    words += "the places of {output} and {reference}, a run with NPU_AUTOPATCH=0. Without CMD: losses are compared"
    kinds.add_argument("--compare", nargs="?", const="", metavar="CMD", help=words)
    parser.add_argument(
        "--value", metavar="WORD", help="with --compare alone: the word before the numbers to compare (loss)"
    )
    parser.add_argument(
        "--tolerance", type=_positive, metavar="X", help="with --compare alone: relative difference allowed (0.01)"
    )
    parser.add_argument(
        "--timeout", type=_positive, default=0.0, metavar="S", help="a run of more than S seconds is a failure, too"
    )
    backends = "default: NPU_AUTOPATCH_BACKEND, or npu where torch has a device, else emulate"
    parser.add_argument("--backend", choices=BACKENDS, help=backends)
    parser.add_argument("--logs", metavar="FOLDER", help="where the output of each run goes (a new one in /tmp)")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not verify the culprits' models")
    parser.add_argument("--json", action="store_true", help="runs, culprits and what to skip as JSON")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    parser.set_defaults(func=_from_arguments)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _from_arguments(arguments: argparse.Namespace) -> int:
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        raise CommandError("nothing to run: give a program and its arguments after --, such as -- python train.py")
    criterion = _criterion(arguments)
    settings = Settings.from_environment(REGISTRY, startup.switched_on(os.environ))
    folder = _folder(arguments.logs)
    program = Program(command, folder, criterion, arguments.timeout)
    with _ended_like_interrupted(), progress() as bar:
        task = bar.add_task("looking for devices", total=None)
        outcome = Outcome(_backend(arguments.backend), program, own=settings.skip)
        bar.console.print(f"{shlex.join(command)}\n{where(outcome)}; output in {folder}", markup=False, soft_wrap=True)
        try:
            outcome.verdict, outcome.words = _bisect(outcome, _Runs(program, outcome.backend, bar, task))
            if arguments.verify:
                _verify(outcome, bar, task)
        except KeyboardInterrupt:
            outcome.words = outcome.words or so_far(outcome)
    if arguments.json:
        print(json.dumps(described(outcome), indent=1))
    else:
        print_(outcome)
    return {"found": 0, "interrupted": 130}.get(outcome.verdict, 1)


def _criterion(arguments: argparse.Namespace) -> Criterion:
    if arguments.compare != "" and (arguments.value or arguments.tolerance):
        raise CommandError("--value and --tolerance go with --compare without CMD: give --compare -- COMMAND")
    if arguments.compare is None:
        return NotANumber() if arguments.until_nan else Criterion()
    if arguments.compare:
        return Command(arguments.compare)
    return Numbers(arguments.value or "loss", arguments.tolerance or 0.01)


def _folder(asked: str | None) -> Path:
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="npu-autopatch-bisect-"))
    folder = Path(asked).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--logs {asked!r} cannot be made ({error.strerror}): give a folder") from None
    return folder


def _backend(asked: str | None) -> str:
    """As asked for, or as the environment says, or emulate where there is no device."""
    if chosen := asked or os.environ.get("NPU_AUTOPATCH_BACKEND", "").strip().lower():
        return chosen
    found = machine.examine(os.environ, "npu")
    return "npu" if found["devices"] and not found["torch"] else "emulate"


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """A closed terminal or a job that is cancelled ends the program under test, too, which has its own session."""
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in signals:
        signal.signal(number, signal.default_int_handler)
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as of a job in the background
    if ignored:
        signal.signal(signal.SIGINT, lambda *_: None)  # a program would inherit that, and not end when asked to
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Runs:
    """Runs of the program with the package on, with sites skipped, or off; each said on stderr as it ends."""

    def __init__(self, program: Program, backend: str, bar: Progress, task: Any) -> None:
        settings = {"NPU_AUTOPATCH_BACKEND": backend}
        self.program, self._bar, self._task = program, bar, task
        self.on = startup.environment(os.environ, settings)
        self.off = {**os.environ, "NPU_AUTOPATCH": "0"}

    def with_skip(self, what: str, patterns: Collection[str]) -> Run:
        file = self.program.folder / f"{len(self.program.runs) + 1:02}.skip"
        return self._run(what, {**self.on, "NPU_AUTOPATCH_SKIP": setting(patterns, file)})

    def without(self, judged: bool = True) -> Run:
        return self._run("NPU_AUTOPATCH=0", self.off, judged)

    def to_come(self, count: int) -> None:
        """How many more there will be, if things go as they mostly do."""
        self._bar.update(self._task, total=len(self.program.runs) + count)

    def _run(self, what: str, environment: dict[str, str], judged: bool = True) -> Run:
        done = len(self.program.runs)
        self._bar.update(self._task, completed=done, description=f"run {done + 1}: {what}")
        run = self.program.run(what, environment, judged)
        failed = f"fails: {run.failure}" if run.failure else "passes" if judged else "to compare with"
        line = f"{run.log.name}  {run.what:<28} {run.seconds:6.1f} s  {failed}"
        self._bar.console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
        return run


def _bisect(outcome: Outcome, runs: _Runs) -> tuple[str, str]:
    """The verdict, and its words. `outcome` has what is known so far at any time."""
    criterion = outcome.program.criterion
    runs.to_come(4 + criterion.needs_reference)
    if criterion.needs_reference:
        reference = runs.without(judged=False)
        if reference.failure:
            return _not_ours(reference)
        criterion.take_reference(reference.log)
    everything = runs.with_skip("everything patched", outcome.own)
    if not everything.failure:
        return "passes", f"COMMAND does not fail with npu_autopatch on{_by(criterion)}: there is nothing to find"
    nothing = runs.with_skip("everything skipped", ["*"])
    if nothing.failure:
        return _without_sites(nothing, runs.without(), criterion)
    outcome.sites = sites = Sites(everything.rows, nothing.rows)
    if not sites.patterns:
        if any(row.state in (PATCHED, SKIPPED) for row in nothing.rows):
            return "no site", "no site was patched, and still COMMAND fails with npu_autopatch on only: please tell us"
        return "no site", (
            "no process of COMMAND has reported a site: it imports no model, or NPU_AUTOPATCH=1 has no effect in it; "
            "see npu-autopatch doctor"
        )

    def fails(patched: frozenset[str]) -> bool:
        runs.to_come(len(search.suspects).bit_length() + 2)
        what = f"{len(patched)} of {len(sites.patterns)} patched"
        run = runs.with_skip(what, sites.skipping_all_but(patched, outcome.own))
        if run.failure:
            outcome.failed[patched] = run
        return bool(run.failure)

    outcome.failed[frozenset(sites.patterns)] = everything
    outcome.search = search = Search(sites.patterns, sites.shared, fails)
    search.run()
    return "found", "with this in the environment COMMAND passes:"


def _verify(outcome: Outcome, bar: Progress, task: Any) -> None:
    """Have the culprits verified, a model for each family."""
    rows = [row for culprit in outcome.culprits for row in culprit.rows]
    families = {row.name.partition(".")[0] for row in rows if row.module.startswith("transformers.models.")}
    for number, family in enumerate(sorted(families)):
        bar.update(task, total=len(families), completed=number, description=f"npu-autopatch verify {family}")
        outcome.verified |= verify(family, outcome.backend)


def _by(criterion: Criterion) -> str:
    if not isinstance(criterion, Numbers):
        return ""
    return f" (largest difference {criterion.largest:.1e}, within the tolerance of {criterion.tolerance:g})"


def _without_sites(nothing: Run, without: Run, criterion: Criterion) -> tuple[str, str]:
    """Of a run that fails with every site skipped, and one with the package off."""
    if without.failure and isinstance(criterion, Numbers):
        words = f"two runs with NPU_AUTOPATCH=0 differ, too ({without.failure}): fix the seeds, or allow a --tolerance"
        return "not ours", words
    if without.failure:
        return _not_ours(without)
    words = f"COMMAND fails with every site skipped ({nothing.failure}), and passes with NPU_AUTOPATCH=0: no site's "
    return "no site", words + "fault, but npu_autopatch's own, or it does not fail each time; please tell us"


def _not_ours(run: Run) -> tuple[str, str]:
    return "not ours", f"COMMAND fails with NPU_AUTOPATCH=0, too ({run.failure}): it is not npu_autopatch's fault"
