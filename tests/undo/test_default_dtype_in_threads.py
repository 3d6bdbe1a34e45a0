"""The default dtype belongs to every thread: probing in one never shows in another."""

from __future__ import annotations

import threading

import torch
from transformers.models.llama import modeling_llama

from npu_autopatch import emulator
from npu_autopatch.kernels import load, probing


def test_probing_never_sets_the_default_dtype() -> None:
    emulator.install()
    kernel, seen, done = load("rms_norm"), set(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(torch.get_default_dtype())

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with probing.undisturbed():
            (site,) = kernel.find(modeling_llama)
            for _ in range(20):
                assert kernel.prove(site, ("cpu",)).variant == "round_then_mul"
    finally:
        done.set()
        watcher.join()
        torch.set_default_dtype(before)
    assert seen == {torch.bfloat16}
