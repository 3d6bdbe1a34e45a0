"""Verifies every model type of the installed transformers, each in a process of its own: ``make verify-all``.

Usage: python -m tests.verification.sweep LEAST [FILE.json]. Exit code 1 if a type fails, or fewer than LEAST pass.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from npu_autopatch.verification.verifying import verify

SECONDS = 120
PASSED, NOTHING, FAILED, NOT_RUN, ELSEWHERE = OUTCOMES = (
    "passed",
    "nothing to fuse",
    "failed",
    "not run",
    "by its text part",
)


def outcome(model_type: str) -> tuple[str, str]:
    """What became of a model type, and why."""
    try:
        text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
        if text != model_type and text in CONFIG_MAPPING:
            return ELSEWHERE, text
        found = verify(model_type)
    except Exception as error:
        return NOT_RUN, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not found.modes:
        return NOT_RUN, found.not_verified[0] if found.not_verified else "no mode"
    if found.problems:
        sites = [site.name for site in found.sites if site.problems]
        return FAILED, " | ".join([",".join(sites), *found.problems[:3]])[:600]
    lacking = "; ".join(found.not_verified)
    return PASSED if found.fused else NOTHING, f"{len(found.modes)} modes, {found.fused} calls fused; {lacking}"[:300]


def _send(model_type: str, end: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    end.send(outcome(model_type))


def one(model_type: str) -> tuple[str, str]:
    """The outcome of a model type, from a process of its own."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_send, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(SECONDS) else (NOT_RUN, f"not done in {SECONDS} s")
    except EOFError:
        return NOT_RUN, "the process ended"
    finally:
        process.kill()
        process.join()


def main(least: int, file: str) -> int:
    torch.set_num_threads(1)
    begin, types, found = time.time(), list(CONFIG_MAPPING), {}
    for place, model_type in enumerate(types, 1):
        found[model_type] = one(model_type)
        state, words = found[model_type]
        print(f"{place}/{len(types)} {model_type}: {state} ({words})", flush=True)
        if file:
            Path(file).write_text(json.dumps(found, indent=1))
    counts = Counter(state for state, _ in found.values())
    print(f"\ntransformers {transformers.__version__}, {time.time() - begin:.0f} s")
    print(", ".join(f"{counts[state]} {state}" for state in OUTCOMES))
    print("\n".join(f"failed: {name}: {words}" for name, (state, words) in found.items() if state == FAILED))
    return 1 if counts[FAILED] or counts[PASSED] < least else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
