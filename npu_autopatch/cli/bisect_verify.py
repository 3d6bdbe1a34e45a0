"""What `npu-autopatch verify` says of a culprit, where that knows its family as a model type."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from npu_autopatch.cli import child


def verify(family: str, backend: str) -> dict[str, str]:
    """Verify a model of `family`; what that says of each of its sites, and nothing if it cannot be verified."""
    # the culprit is verified as it is, whatever the environment asks for
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_AUTOPATCH")}
    done = subprocess.run(
        child.module("npu_autopatch.cli", "verify", family, "--json", "--backend", backend),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    try:
        return {
            site["name"]: f"npu-autopatch verify {family}: {_words(site)}" for site in json.loads(done.stdout)["sites"]
        }
    except (ValueError, KeyError, TypeError):  # bad input: no output but a sentence on stderr
        return {}


def _words(site: dict[str, Any]) -> str:
    if site["problems"]:
        return "; ".join(site["problems"])
    if not site["fused"]:
        return "it was never fused there"
    return "nothing is wrong with it in a small model of random weights"
