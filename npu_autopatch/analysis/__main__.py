"""What `npu-autopatch analyze` runs in its child."""

from __future__ import annotations

from typing import Any

from npu_autopatch.cli import model_run


def _analyzed(order: dict[str, Any], progress: model_run.Progress, missing: str) -> str:
    from npu_autopatch.analysis.analysing import analyze

    return analyze(**order, progress=progress).to_json()


if __name__ == "__main__":
    model_run.answer(_analyzed)
