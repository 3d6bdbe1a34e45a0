"""Two curves in plain characters, told apart without colour."""

from __future__ import annotations

from collections.abc import Sequence

FIRST, SECOND, BOTH = "o", "+", "#"


def plot(first: Sequence[float], second: Sequence[float], width: int = 68, height: int = 14) -> str:
    """`FIRST`, `SECOND`, and `BOTH` where they fall together; values up, their index to the right."""
    values = [*first, *second]
    low, high = min(values), max(values)
    scale = (height - 1) / ((high - low) or 1.0)
    steps = max(len(first), len(second))
    grid = [[" "] * width for _ in range(height)]
    for column in range(width):
        index = round(column * (steps - 1) / (width - 1))
        at = [curve[index] if index < len(curve) else None for curve in (first, second)]
        rows = [-1 if value is None else height - 1 - round((value - low) * scale) for value in at]
        for row, mark in zip(rows, (FIRST, SECOND), strict=True):
            if row >= 0:
                grid[row][column] = BOTH if rows[0] == rows[1] else mark
    labels = {0: f"{high:8.3f}", height - 1: f"{low:8.3f}"}
    lines = [f"{labels.get(number, ''):8} |{''.join(row)}".rstrip() for number, row in enumerate(grid)]
    axis = f"{'':8} +{'-' * width}"
    return "\n".join([*lines, axis, f"{'':8}  {'step 1':<{width - len(str(steps))}}{steps}"])
