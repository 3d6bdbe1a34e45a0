"""A model run in a child of a command, with a bar of how far it is."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any

from npu_autopatch.cli import child
from npu_autopatch.cli.terminal import CommandError, progress


def found(module: str, model: str, order: dict[str, Any]) -> dict[str, Any]:
    """What `module` of this package, run with `order` for `model`, has found, as JSON. Raises `CommandError`."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise CommandError(f"{package} is not installed: pip install 'npu-autopatch'")
    # Without it, torch itself does not start where torch_npu has no CANN; the child imports torch_npu.
    environment = {**os.environ, "NPU_AUTOPATCH": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONWARNINGS": "ignore"}
    command = child.module(module, json.dumps({**order, "model_or_config": model}))
    with progress() as bar:
        task = bar.add_task("torch and transformers", total=1)
        try:
            for message in child.messages(command, environment):
                if "error" in message:
                    raise CommandError(message["error"])
                if "found" in message:
                    result: dict[str, Any] = message["found"]
                    return result
                bar.update(task, completed=message["share"], description=message["words"])
        except child.ChildError as error:
            raise CommandError(f"{model} could not be run ({error}): see npu-autopatch doctor") from None
    raise CommandError(f"{model} could not be run (it ended without a word): see npu-autopatch doctor")
