"""In a child of `npu-autopatch verify`: sends how far it is, and then what was found or what was wrong with MODEL."""

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
    if missing := machine.why_no_torch_npu():
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # else transformers stumbles over it too
    from npu_autopatch.verification.source import SourceError
    from npu_autopatch.verification.verifying import verify

    order: dict[str, Any] = json.loads(sys.argv[1])
    try:
        found = verify(**order, progress=lambda words, share: send({"words": words, "share": share}))
    except SourceError as error:
        send({"error": str(error)})
    else:
        if missing and not order["backend"]:
            found.chosen = missing
        send({"found": json.loads(found.to_json())})
    sys.stdout.flush()
    os._exit(0)  # tearing a device down may take seconds, or fail
