"""What commands say: results on stdout, progress on stderr, bad input in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class CommandError(Exception):
    """A command that cannot be carried out; the message is one sentence that says what to give instead."""


def console() -> Console:
    """Stdout, as wide as the terminal; 80 columns without one."""
    from rich.console import Console

    return Console(highlight=False)


def progress() -> Progress:
    """A bar with the words of the task, on stderr; gone when done, and never there without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    percent, words = TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}")
    columns = (BarColumn(24), percent, TimeElapsedColumn(), words)
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
