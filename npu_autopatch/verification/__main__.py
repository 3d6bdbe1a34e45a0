"""What `npu-autopatch verify` runs in its child."""

from __future__ import annotations

from typing import Any

from npu_autopatch.cli import model_run


def _verified(order: dict[str, Any], progress: model_run.Progress, missing: str) -> str:
    from npu_autopatch.verification.verifying import verify

    found = verify(**order, progress=progress)
    if missing and not order["backend"]:
        found.chosen = missing
    return found.to_json()


if __name__ == "__main__":
    model_run.answer(_verified)
