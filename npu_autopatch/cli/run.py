"""`npu-autopatch run`: start a script or module with the package on, where `.pth` files are not processed.

It sets the environment and replaces itself by the same interpreter. The folder put on PYTHONPATH holds nothing but the
`sitecustomize` that starts the package and then runs the user's own; child processes inherit both. Interpreters
started with -S or -I are left alone; those started with -E ignore PYTHONPATH and have only the `.pth`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

from npu_autopatch.kernels import REGISTRY
from npu_autopatch.settings import Settings, SettingsError

OFF_VALUES = ("", "0", "false", "off", "no")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `run` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "run",
        help="run a script or module with npu_autopatch on",
        description="Run a Python script or module, and every Python process it starts, with npu_autopatch on. "
        "Use it where .pth files are not processed, such as pip install --target.",
        usage="npu-autopatch run [options] (script.py | -m module) [arguments ...]",
        epilog="example: npu-autopatch run --report report.json train.py --epochs 3",
    )
    parser.add_argument("--kernels", metavar="LIST", help="as in NPU_AUTOPATCH: names of kernels, or all,-NAME")
    parser.add_argument("--skip", metavar="PATTERNS", help="sites to leave alone, as in NPU_AUTOPATCH_SKIP")
    parser.add_argument("--backend", choices=("npu", "emulate"), help="as in NPU_AUTOPATCH_BACKEND")
    parser.add_argument("--report", metavar="FILE", help="write the report there at exit, as in NPU_AUTOPATCH_REPORT")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script to run, and its arguments")
    parser.set_defaults(func=_from_arguments)


def run(argv: list[str], settings: Mapping[str, str] | None = None) -> int:
    """Become `python argv` with the package on; `argv` is ``["script.py", ...]`` or ``["-m", "module", ...]``.

    `settings` are NPU_AUTOPATCH variables to set. Returns only if there is nothing to run: 2, after one sentence on
    stderr.
    """
    chain = chain_folder()
    variables = environment(os.environ, chain, settings or {})
    problem = _wrong_setting(variables) or _problem(argv, chain)
    if not problem:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os.execve(sys.executable, [sys.executable, *argv], variables)
    print(f"npu-autopatch run: {problem}", file=sys.stderr)
    return 2


def environment(inherited: Mapping[str, str], chain: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The variables of the new process: the package on, and the folder `chain` first on PYTHONPATH."""
    variables = {**inherited, **settings}
    if variables.get("NPU_AUTOPATCH", "").strip().lower() in OFF_VALUES:
        variables["NPU_AUTOPATCH"] = "1"
    path = variables.get("PYTHONPATH", "")
    if path.split(os.pathsep)[0] != chain:
        variables["PYTHONPATH"] = chain + os.pathsep + path if path else chain
    return variables


def _from_arguments(arguments: argparse.Namespace) -> int:
    options = {
        "NPU_AUTOPATCH": arguments.kernels,
        "NPU_AUTOPATCH_SKIP": arguments.skip,
        "NPU_AUTOPATCH_BACKEND": arguments.backend,
        "NPU_AUTOPATCH_REPORT": arguments.report,
    }
    argv = arguments.script if arguments.module is None else ["-m", *arguments.module]
    if argv[:1] == ["--"]:
        argv = argv[1:]
    return run(argv, {name: value for name, value in options.items() if value is not None})


def _problem(argv: list[str], chain: str) -> str:
    """What keeps `argv` from being run, as a sentence; empty if nothing does."""
    if not chain:
        return "the folder _npu_autopatch_chain is not installed beside npu_autopatch: reinstall npu-autopatch"
    if not argv or argv == ["-m"]:
        return "nothing to run: give a script, or -m and a module"
    if argv[0] != "-m" and not os.path.exists(argv[0]):
        return f"there is no script {argv[0]!r}: give the path of a Python file, or -m and a module"
    return ""


def _wrong_setting(variables: Mapping[str, str]) -> str:
    """What the settings of the new process would be refused for: said here rather than at its first model."""
    try:
        Settings.from_environment(REGISTRY, variables)
    except SettingsError as error:
        return str(error)
    return ""


def chain_folder() -> str:
    """Where the wheel put the folder, which an editable install keeps apart from the package; empty if nowhere."""
    spec = PathFinder.find_spec("_npu_autopatch_chain")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return os.path.abspath(folders[0]) if folders else ""
