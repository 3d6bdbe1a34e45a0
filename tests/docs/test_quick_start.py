"""The quick start's script says what the page shows: the report and the trace, word for word."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quick-start.md").read_text()
SCRIPT = re.search(r"^```python\n# train.py\n(.*?)^```", PAGE, re.M | re.S)


def shown(command: str) -> str:
    """What the page shows below the line that has `command`."""
    found = re.search(rf"^\$ [^\n]*{re.escape(command)}[^\n]*\n(.*?)^```", PAGE, re.M | re.S)
    assert found, command
    return found[1]


def test_the_script_says_what_the_page_shows(python: Callable[..., Any], tmp_path: Path) -> None:
    assert SCRIPT is not None
    variables = {"NPU_AUTOPATCH": "1", "NPU_AUTOPATCH_BACKEND": "emulate", "COLUMNS": "80"}
    report = str(tmp_path / "report.json")
    on = python(SCRIPT[1], started=True, NPU_AUTOPATCH_REPORT=report, NPU_AUTOPATCH_TRACE="1", **variables)
    off = python(SCRIPT[1], started=True, NPU_AUTOPATCH="0")
    assert on.returncode == off.returncode == 0, on.stderr + off.stderr
    assert on.stdout == off.stdout and len(on.stdout.splitlines()) == 5
    assert on.stderr == shown("NPU_AUTOPATCH_TRACE=1 python train.py")
    command = f"import sys; from npu_autopatch.cli import main; sys.exit(main(['report', {report!r}]))"
    assert python(command, COLUMNS="80").stdout == shown("npu-autopatch report report.json")
