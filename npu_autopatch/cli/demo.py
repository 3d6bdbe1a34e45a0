"""`npu-autopatch demo`: one unmodified training script run twice, without and with NPU_AUTOPATCH=1, and compared."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from npu_autopatch.cli import child, machine, startup
from npu_autopatch.cli.plot import BOTH, FIRST, SECOND, plot
from npu_autopatch.cli.terminal import CommandError, console, progress
from npu_autopatch.listing import listing
from npu_autopatch.reporting import PATCHED, Row
from npu_autopatch.settings import BACKENDS

# What fp32 noise can do to the curves: over six runs of 100 steps (three seeds), changing the last bit of the initial
# weights moved no loss by more than 1.1e-4. Ten times that is the least difference that is no noise.
LIMIT = 1e-3


@dataclass
class Run:
    """One training: the loss of each step, the fused ops of one step by name, seconds, and the sites of its report."""

    losses: list[float] = field(default_factory=list)
    ops: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    sites: list[dict[str, Any]] = field(default_factory=list)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `demo` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small Qwen3 twice, without and with npu_autopatch",
        description="Train a small Qwen3 on the bytes of a licence text with the Hugging Face Trainer, without and "
        "with NPU_AUTOPATCH=1, and compare the losses. Exit code 1 if nothing was fused or the losses differ.",
        epilog="example: npu-autopatch demo --steps 60 --backend emulate",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=_steps, default=100, metavar="N", help="1 to 1000 training steps (100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")
    parser.add_argument("--backend", choices=BACKENDS, help="default: npu where torch has a device, else emulate")
    parser.add_argument("--json", action="store_true", help="losses, ops and sites as JSON")
    parser.set_defaults(func=_from_arguments)


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: give 1 to 1000")
    return int(text)


def _from_arguments(arguments: argparse.Namespace) -> int:
    for package, extra in (("torch", ""), ("transformers", ""), ("accelerate", "[demo]")):
        if find_spec(package) is None:
            raise CommandError(f"{package} is not installed: pip install 'npu-autopatch{extra}'")
    backend, without, fused = train_twice(arguments.steps, arguments.seed, arguments.backend or "")
    problems = judge(without, fused)
    if arguments.json:
        whole: dict[str, Any] = {"backend": backend, "without": asdict(without), "with": asdict(fused)}
        whole |= {"largest_difference": _difference(without, fused), "limit": LIMIT, "problems": problems}
        print(json.dumps(whole, indent=1))
    else:
        _print(backend, without, fused, problems)
    return 1 if problems else 0


def train_twice(steps: int, seed: int, backend: str) -> tuple[str, Run, Run]:
    """The backend, and the runs without and with the package. Raises `CommandError`."""
    # One thread: a model so small is fastest so, and its sums have one order.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    text = licence()
    with progress() as bar, tempfile.TemporaryDirectory() as folder:
        tasks = [bar.add_task(words, total=steps) for words in ("without npu_autopatch", "with NPU_AUTOPATCH=1")]
        if backend != "emulate":
            found = machine.examine(environ, "npu")
            backend = backend or ("npu" if found["devices"] and not found["torch"] else "emulate")
        # In a folder of its own, as a user's script is: beside it, modules of ours would hide others.
        script = shutil.copy(Path(__file__).with_name("demo_train.py"), Path(folder, "train.py"))
        command = [sys.executable, str(script), str(text), folder, str(steps), str(seed)]
        command.append("cpu" if backend == "emulate" else "device")
        settings = {"NPU_AUTOPATCH_BACKEND": backend, "NPU_AUTOPATCH_REPORT": str(Path(folder, "report.json"))}
        settings |= {"NPU_AUTOPATCH": "1", "NPU_AUTOPATCH_SKIP": "", "NPU_AUTOPATCH_STRICT": "1"}
        without = _train(command, {**environ, "NPU_AUTOPATCH": "0"}, folder, lambda: bar.advance(tasks[0]))
        fused = _train(command, startup.environment(environ, settings), folder, lambda: bar.advance(tasks[1]))
        report = Path(folder, "report.json")
        fused.sites = json.loads(report.read_text())["sites"] if report.is_file() else []
    return backend, without, fused


def _train(command: list[str], environ: Mapping[str, str], folder: str, step: Any) -> Run:
    run, begin = Run(), time.perf_counter()
    try:
        for message in child.messages(command, environ, folder):
            run.ops = message.get("ops", run.ops)
            if "loss" in message:
                run.losses.append(message["loss"])
                step()
    except child.ChildError as error:
        raise CommandError(f"the training script failed ({error}): see npu-autopatch doctor") from None
    run.seconds = time.perf_counter() - begin
    return run


def licence() -> Path:
    """A licence text that is installed here: one of a package's, or else Python's documentation of itself."""
    for package in ("transformers", "torch", "accelerate", "rich", "wrapt"):
        try:
            named = [file for file in files(package) or () if file.stem.upper() in ("LICENSE", "LICENCE")]
        except PackageNotFoundError:
            continue
        for file in named:
            path = Path(str(file.locate()))
            if path.is_file() and path.stat().st_size > 8000:
                return path
    import pydoc_data.topics

    return Path(pydoc_data.topics.__file__)


def judge(without: Run, fused: Run) -> list[str]:
    """What is wrong with the comparison; empty if it shows what it should."""
    problems = []
    if not any(site["state"] == PATCHED for site in fused.sites):
        problems.append("no site was patched")
    if not gained(without, fused):
        problems.append("no fused op ran that did not run without npu_autopatch")
    if len(without.losses) != len(fused.losses) or not fused.losses:
        problems.append(f"{len(without.losses)} and {len(fused.losses)} steps cannot be compared")
    elif not _difference(without, fused) <= LIMIT:  # a NaN is no agreement
        problems.append(f"the losses differ by {_difference(without, fused):.1e}, more than {LIMIT:.0e}")
    return problems


def gained(without: Run, fused: Run) -> dict[str, int]:
    """The fused ops of one step that are npu_autopatch's; torch_npu calls some of its own, such as attention."""
    return dict(Counter(fused.ops) - Counter(without.ops))


def _difference(without: Run, fused: Run) -> float:
    """The largest, or a NaN if there is one."""
    differences = [abs(a - b) for a, b in zip(without.losses, fused.losses, strict=False)]
    return max(differences, key=lambda value: (value != value, value), default=0.0)


def _print(backend: str, without: Run, fused: Run, problems: list[str]) -> None:
    from rich.table import Table

    screen = console()
    where = "CPU kernels in place of the NPU's" if backend == "emulate" else "on the NPU"
    screen.print(f"A small Qwen3 trained by the Hugging Face Trainer, backend {backend}, {where}.\n")
    if without.losses and fused.losses:
        screen.print(plot(without.losses, fused.losses), markup=False)
        screen.print(f"loss at each step: {FIRST} without, {SECOND} with npu_autopatch, {BOTH} both\n", markup=False)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "first loss", "last loss", "seconds in all"):
            table.add_column(column, justify="right" if column else "left")
        for name, run in (("NPU_AUTOPATCH=0", without), ("NPU_AUTOPATCH=1", fused)):
            table.add_row(name, f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}", f"{run.seconds:.1f}")
        screen.print(table)
        largest = _difference(without, fused)
        screen.print(f"\nlargest difference {largest:.1e}; up to {LIMIT:.0e} it may be fp32 noise\n")
    screen.print(listing((Row(**site) for site in fused.sites), screen.width))
    ran = ", ".join(f"{name} {count}" for name, count in gained(without, fused).items())
    screen.print(f"\nmore fused ops in one step, counted by torch's profiler: {ran or 'none'}")
    if problems:
        screen.print(f"[red]failed[/]: {'; '.join(problems)}")
    else:
        emulated = " (time means nothing when emulated)" if backend == "emulate" else ""
        screen.print(f"[green]ok[/]: fused ops really ran, and the training is the same{emulated}")
