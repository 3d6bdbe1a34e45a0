"""All benchmarks of the Python side, as one table: ``python -m benchmarks``. Ratios are taken within one run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks import call, finder, importing, mlp, probing, rotary, startup


def main() -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("what", "measured", "limit", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    console = Console()
    for measure in (startup.rows, importing.rows, finder.rows, probing.rows, call.rows, mlp.rows, rotary.rows):
        with console.status(f"measuring {measure.__module__}"):
            for what, value, limit, unit in measure():
                verdict = "" if limit is None else "ok" if value <= limit else "over"
                table.add_row(what, f"{value:.3g} {unit}", "" if limit is None else f"{limit:g} {unit}", verdict)
    console.print(table)


if __name__ == "__main__":
    main()
