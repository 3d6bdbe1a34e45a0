"""In a child of `npu-autopatch analyze`: sends how far it is, and then what was found or what was wrong with MODEL."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from typing import Any

from npu_autopatch.cli import child, machine

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    send = child.sender()
    if machine.why_no_torch_npu():
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # else transformers stumbles over it too
    from npu_autopatch.analysis.analysing import analyze
    from npu_autopatch.verification.source import SourceError

    order: dict[str, Any] = json.loads(sys.argv[1])
    try:
        found = analyze(**order, progress=lambda words, share: send({"words": words, "share": share}))
    except SourceError as error:
        send({"error": str(error)})
    else:
        send({"found": json.loads(found.to_json())})
    sys.stdout.flush()
    os._exit(0)  # tearing a device down may take seconds, or fail
