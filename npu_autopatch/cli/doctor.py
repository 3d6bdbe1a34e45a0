"""`npu-autopatch doctor`: would `NPU_AUTOPATCH=1 python train.py` fuse on this machine, and if not, why not."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from npu_autopatch.cli import cann, machine, startup
from npu_autopatch.cli.run import chain_folder
from npu_autopatch.cli.terminal import console, progress
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.settings import Settings, SettingsError
from npu_autopatch.version import __version__

_PACKAGES = ("torch", "torch_npu", "transformers", "wrapt", "rich", "accelerate")


@dataclass
class Diagnosis:
    """All that was found. `problems` are pairs of what is wrong and what to do; `fuses` is the verdict."""

    versions: dict[str, str]
    cann: cann.Installation
    startup: startup.StartUp
    switched_on: bool
    settings: Settings | None
    settings_error: str
    machine: dict[str, Any]
    problems: list[tuple[str, str]] = field(default_factory=list)
    fuses: bool = False

    @property
    def backend(self) -> str:
        return self.settings.backend if self.settings else "npu"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `doctor` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "doctor",
        help="check whether this machine fuses, and say what to do if not",
        description="Check versions, devices, CANN, the start-up hook, the settings in the environment and every op. "
        "Exit code 0 if NPU_AUTOPATCH=1 python train.py would fuse here, 1 if not.",
        epilog="example: NPU_AUTOPATCH_BACKEND=emulate npu-autopatch doctor",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(func=_from_arguments)


def _from_arguments(arguments: argparse.Namespace) -> int:
    diagnosis = examine(os.environ)
    if arguments.json:
        print(json.dumps(_described(diagnosis), indent=1))
    else:
        _print(diagnosis)
    return 0 if diagnosis.fuses else 1


def examine(environ: Mapping[str, str]) -> Diagnosis:
    """Find out everything, and judge it."""
    settings, error = None, ""
    try:
        settings = Settings.from_environment(REGISTRY, startup.switched_on(environ))
    except SettingsError as wrong:
        error = str(wrong)
    with progress() as bar:
        task = bar.add_task("the start-up hook", total=2)
        hook = startup.examine(environ)
        bar.update(task, advance=1, description="torch and the devices")
        found = machine.examine(environ, settings.backend if settings else "npu")
    on = startup.switched_on(environ)["NPU_AUTOPATCH"] == environ.get("NPU_AUTOPATCH")
    diagnosis = Diagnosis(_versions(), cann.find(environ), hook, on, settings, error, found)
    _judge(diagnosis)
    return diagnosis


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "npu-autopatch": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _judge(diagnosis: Diagnosis) -> None:
    """Fill in `problems`, and `fuses`: whether none of them keeps everything from being fused."""
    blocking = [*_without_packages(diagnosis), *_startup(diagnosis), *_device(diagnosis)]
    if diagnosis.settings_error:
        blocking.append((diagnosis.settings_error, "correct the variable; until then nothing is patched"))
    kernels = diagnosis.settings.kernels if diagnosis.settings else ()
    missing = {name: diagnosis.machine["kernels"].get(name, "") for name in kernels}
    usable = [name for name in kernels if name in diagnosis.machine["kernels"] and not missing[name]]
    diagnosis.problems = list(blocking)
    if diagnosis.backend == "emulate" or not diagnosis.machine["torch_npu"]:  # else it has been said
        what = "its sites stay as they are; another torch_npu may have the op"
        diagnosis.problems += [(f"kernel {name}: {reason}", what) for name, reason in missing.items() if reason]
    diagnosis.fuses = bool(usable) and not blocking


def _without_packages(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [
        (f"{package} is not installed", f"pip install {package}")
        for package in ("torch", "transformers", "wrapt")
        if not diagnosis.versions[package]
    ]


def _startup(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    found = diagnosis.startup
    if found.effective:
        return []
    if found.complaint:
        return [(found.complaint, "pip install --force-reinstall --no-deps npu-autopatch")]
    if found.processed:
        return [(f"the start-up hook in {found.folder} has no effect", _INSTEAD)]
    if found.folder:
        return [(f"Python processes no .pth files in {found.folder}, as after pip install --target", _INSTEAD)]
    if found.boot or chain_folder():
        return [(f"{startup.HOOK} is in no folder of sys.path", _INSTEAD)]
    do = "pip install npu-autopatch, or call npu_autopatch.enable() in the script"
    return [("the start-up hook is not installed", do)]


_INSTEAD = "start programs with: npu-autopatch run train.py"


def _device(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    found, installed = diagnosis.machine, diagnosis.versions
    emulate = "or set NPU_AUTOPATCH_BACKEND=emulate"
    if found["torch"] and installed["torch"]:
        what = f"import torch fails: {found['torch']}"
        if found["torch_npu"] and installed["torch_npu"]:
            return [(what, f"{diagnosis.cann.advice}; to do without the NPU: pip uninstall torch_npu")]
        return [(what, "reinstall torch, or torch_npu of the same version")]
    if found["transformers"] and installed["transformers"]:
        what = f"import transformers fails: {found['transformers']}"
        without = "pip uninstall torch_npu, which transformers imports wherever it is installed"
        if found["torch_npu"] and installed["torch_npu"]:
            return [(what, f"{diagnosis.cann.advice}; to do without the NPU: {without}")]
        return [(what, "reinstall transformers, with the packages its error names")]
    if diagnosis.settings is None or diagnosis.backend == "emulate" or not installed["torch"]:
        return []
    if not installed["torch_npu"]:
        release = installed["torch"].partition("+")[0]
        do = f"on a machine with an NPU install the torch_npu made for torch {release}; elsewhere {emulate[3:]}"
        return [("torch_npu is not installed", do)]
    if found["torch_npu"]:
        return [(found["torch_npu"], f"{diagnosis.cann.advice}, {emulate}")]
    if not found["devices"]:
        seen = f"{len(diagnosis.cann.device_files)} /dev/davinci files are there"
        return [(f"torch.npu sees no device ({seen})", f"check npu-smi info and ASCEND_RT_VISIBLE_DEVICES, {emulate}")]
    return []


def _described(diagnosis: Diagnosis) -> dict[str, Any]:
    whole = asdict(diagnosis)
    whole["problems"] = [{"what": what, "do": do} for what, do in diagnosis.problems]
    return whole


def _print(diagnosis: Diagnosis) -> None:
    from rich.markup import escape
    from rich.table import Table

    screen = console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    words = {True: "[green]ok[/]", False: "[red]no[/]", None: "[dim]--[/]"}
    for subject, good, detail in _lines(diagnosis):
        table.add_row(escape(subject), words[good], escape(detail))
    screen.print(table)
    if diagnosis.problems:
        screen.print("\n[bold]What is wrong, and what to do[/]")
        steps = Table(box=None, show_header=False, pad_edge=False)
        for number, (what, do) in enumerate(diagnosis.problems, start=1):
            steps.add_row(f"{number}.", escape(what))
            steps.add_row("", "-> " + escape(do))
        screen.print(steps)
    how = "emulated on the CPU" if diagnosis.backend == "emulate" else "on the NPU"
    verdict = f"[green]would fuse[/], {how}" if diagnosis.fuses else "[red]would not fuse[/] here"
    screen.print(f"\nNPU_AUTOPATCH=1 python train.py {verdict}.")


def _lines(diagnosis: Diagnosis) -> list[tuple[str, bool | None, str]]:
    """Subject, whether it is good (None: neither), and the detail."""
    found, hook, emulated = diagnosis.machine, diagnosis.startup, diagnosis.backend == "emulate"
    lines: list[tuple[str, bool | None, str]] = []
    for package, installed in diagnosis.versions.items():
        optional = package in ("torch_npu", "accelerate", "rich")
        lines.append((package, bool(installed) or (None if optional else False), installed or "not installed"))
    if found["torch"]:
        lines.append(("import torch", False, found["torch"]))
    if found["transformers"]:
        lines.append(("import transformers", False, found["transformers"]))
    wanted = None if emulated else False
    why = found["torch_npu"] or f"torch.npu sees no device; {len(diagnosis.cann.device_files)} /dev/davinci files"
    if found["torch"] and not found["torch_npu"]:
        why = "unknown, as torch cannot be imported"
    names = ", ".join(f"{index} {name}" for index, name in enumerate(found["devices"]))
    lines.append(("NPU devices", True if names else wanted, names or why))
    lines.append(("CANN", True if diagnosis.cann.folder else wanted, diagnosis.cann.words))
    where = os.path.join(hook.folder, startup.HOOK) if hook.folder else "not installed"
    state = f"{where}; in a new interpreter it {'takes' if hook.effective else 'has no'} effect"
    lines.append(("start-up hook", hook.effective, state))
    if diagnosis.settings is None:
        lines.append(("settings", False, diagnosis.settings_error))
    else:
        chosen = diagnosis.settings
        off = "" if diagnosis.switched_on else "NPU_AUTOPATCH is off here; with 1 it would be: "
        text = f"{off}kernels {','.join(chosen.kernels)}; backend {chosen.backend}"
        text += f"; skip {','.join(chosen.skip)}" if chosen.skip else ""
        text += "; strict" if chosen.strict else ""
        text += f"; report {chosen.report_path}" if chosen.report_path else ""
        lines.append(("settings", True, text))
    for kernel in REGISTRY:
        missing = found["kernels"].get(kernel, "unknown, as torch cannot be imported")
        lines.append((f"kernel {kernel}", not missing, missing or ("emulated" if emulated else "can be used")))
    for op in found["ops"]:
        able = f"available, {'' if op['differentiable'] else 'not '}differentiable"
        lines.append((f"op {op['op']}", not op["missing"], op["missing"] or able))
    return lines
