"""The command `npu-autopatch`: one module a command, each with `add_parser`, imported light.

Exit codes of every command: 0; 1 if a check failed; 2 for bad input, after one sentence on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from npu_autopatch.cli import analyze, bisect, coverage, demo, doctor, ops, report, run, verify
from npu_autopatch.cli.terminal import CommandError
from npu_autopatch.settings import SettingsError
from npu_autopatch.version import __version__

_COMMANDS = (run, doctor, report, verify, analyze, bisect, coverage, ops, demo)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("invalid choice", "unknown")
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str] | None = None) -> int:
    """Run one command and give its exit code."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # a pager or `head` that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str] | None) -> int:
    parser, commands = _parsers()
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    # a command with actions names the parser of the one chosen
    command: argparse.ArgumentParser = getattr(arguments, "parser", commands[arguments.command])
    if unknown:
        options = ", ".join(option for action in command._actions for option in action.option_strings[-1:])
        command.error(f"unknown argument {' '.join(unknown)!r} (choose from {options})")
    try:
        code: int = arguments.func(arguments)
    except (CommandError, SettingsError) as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        print(f"{command.prog}: rich is not installed: pip install 'npu-autopatch'", file=sys.stderr)
        return 2
    return code


def _parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="npu-autopatch",
        description="Hugging Face transformers on Ascend NPU fused kernels, by one environment variable.",
        epilog="example: NPU_AUTOPATCH=1 python train.py, after npu-autopatch doctor",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"npu-autopatch {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for module in _COMMANDS:
        module.add_parser(subparsers)
    return parser, dict(subparsers.choices)
