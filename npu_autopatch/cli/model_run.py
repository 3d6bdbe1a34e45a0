"""The child of a command that runs a model: sends how far it is, then what it found or what was wrong with MODEL."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from npu_autopatch.cli import child, machine

Progress = Callable[[str, float], None]


def answer(run: Callable[[dict[str, Any], Progress, str], str]) -> None:
    """Send what `run` finds, as JSON, and end. It gets the order, what to call with how far it is, and `machine`'s
    reason where there is no torch_npu.
    """
    warnings.simplefilter("ignore")
    logging.disable()
    send = child.sender()
    if missing := machine.why_no_torch_npu():
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # else transformers stumbles over it too
    from npu_autopatch.verification.source import SourceError

    order: dict[str, Any] = json.loads(sys.argv[1])
    try:
        found = run(order, lambda words, share: send({"words": words, "share": share}), missing)
    except SourceError as error:
        send({"error": str(error)})
    else:
        send({"found": json.loads(found)})
    sys.stdout.flush()
    os._exit(0)  # tearing a device down may take seconds, or fail
