"""`patched`, `enable` and `disable` in every order: what is patched when, and exact restoration at the end."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import npu_autopatch
from npu_autopatch import finder
from npu_autopatch.settings import SettingsError

LLAMA, QWEN3, GEMMA2 = modeling_llama.LlamaRMSNorm, modeling_qwen3.Qwen3RMSNorm, modeling_gemma2.Gemma2RMSNorm
ORIGINALS = {cls: vars(cls)["forward"] for cls in (LLAMA, QWEN3, GEMMA2)}


def are_patched(*classes: type) -> list[bool]:
    return [vars(cls)["forward"] is not ORIGINALS[cls] for cls in classes or ORIGINALS]


def block(**settings: object) -> contextlib.AbstractContextManager[object]:
    return npu_autopatch.patched(backend="emulate", **settings)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def all_is_as_it_was() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    npu_autopatch.disable()
    assert are_patched() == [False, False, False]
    assert sys.meta_path == finders
    assert npu_autopatch.report().settings["active"] is False


def test_a_block_patches_inside_and_restores_outside() -> None:
    with block() as report:
        assert are_patched() == [True, True, True]
        assert {row.name for row in report.sites if row.state == "patched"} >= {
            "llama.LlamaRMSNorm",
            "qwen3.Qwen3RMSNorm",
        }
    assert are_patched() == [False, False, False]


def test_an_exception_in_the_body_passes_and_undoes() -> None:
    with pytest.raises(ZeroDivisionError), block():
        assert all(are_patched())
        _ = 1 / 0


def test_blocks_nest() -> None:
    with block():
        patched = vars(LLAMA)["forward"]
        assert all(are_patched())
        with block():
            assert vars(LLAMA)["forward"] is patched  # not wrapped twice
        assert vars(LLAMA)["forward"] is patched


def test_a_block_is_used_once_and_its_decorator_each_time() -> None:
    @block()
    def body() -> list[bool]:
        return are_patched()

    assert body() == body() == [True, True, True]
    assert are_patched() == [False, False, False]


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_may_end_in_any_order(first: int) -> None:
    blocks = [block(), block()]
    for each in blocks:
        each.__enter__()
    blocks[first].__exit__(None, None, None)
    assert all(are_patched())
    blocks[1 - first].__exit__(None, None, None)
    assert not any(are_patched())


def test_each_of_two_overlapping_blocks_keeps_what_it_wants() -> None:
    all_sites, without_qwen3 = block(), block(skip="qwen3")
    all_sites.__enter__()
    without_qwen3.__enter__()
    assert are_patched(LLAMA, QWEN3) == [True, True]
    all_sites.__exit__(None, None, None)
    assert are_patched(LLAMA, QWEN3) == [True, False]
    without_qwen3.__exit__(None, None, None)


def test_an_inner_block_adds_and_takes_back_its_own() -> None:
    with block(skip="qwen3"):
        assert are_patched(LLAMA, QWEN3) == [True, False]
        with block():
            assert are_patched(LLAMA, QWEN3) == [True, True]
        assert are_patched(LLAMA, QWEN3) == [True, False]


def test_a_generator_restores_when_it_is_exhausted_or_closed() -> None:
    def batches() -> Iterator[list[bool]]:
        with block():
            yield are_patched()
            yield are_patched()

    assert list(batches()) == [[True] * 3] * 2
    assert not any(are_patched())
    abandoned = batches()
    next(abandoned)
    assert all(are_patched())
    abandoned.close()


def test_interleaved_generators_restore_after_the_last() -> None:
    def body() -> Iterator[None]:
        with block():
            yield

    first, second = body(), body()
    next(first), next(second)
    first.close()
    assert all(are_patched())
    second.close()


def test_threads_in_and_out_leave_nothing_behind() -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def work() -> None:
        try:
            start.wait()
            for _ in range(4):
                with block():
                    assert all(are_patched())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_a_block_of_one_thread_is_seen_by_the_other() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with block():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    with block():
        leave.set()
        thread.join(60)
        assert all(are_patched())
    assert not any(are_patched())


def test_enable_lasts_until_disable() -> None:
    npu_autopatch.enable(backend="emulate")
    assert all(are_patched())
    npu_autopatch.disable()
    assert not any(are_patched())


def test_enabling_and_disabling_twice_is_as_once() -> None:
    npu_autopatch.enable(backend="emulate")
    patched = vars(LLAMA)["forward"]
    assert all(are_patched())
    npu_autopatch.enable(backend="emulate")
    assert vars(LLAMA)["forward"] is patched
    npu_autopatch.disable()
    assert not any(are_patched())
    npu_autopatch.disable()


def test_disable_without_enable_does_nothing() -> None:
    npu_autopatch.disable()
    with block():
        npu_autopatch.disable()  # a block is not ended by others
        assert all(are_patched())


def test_a_block_in_an_enabled_process_leaves_what_enable_patched() -> None:
    npu_autopatch.enable(backend="emulate")
    with block():
        assert all(are_patched())
    assert all(are_patched())


def test_disable_in_a_block_leaves_the_block_its_patches() -> None:
    npu_autopatch.enable(backend="emulate")
    with block():
        npu_autopatch.disable()
        assert all(are_patched())
    assert not any(are_patched())


def test_two_backends_at_once_are_refused() -> None:
    npu_autopatch.enable(backend="emulate")
    with pytest.raises(SettingsError, match=r"backend 'npu' cannot join 'emulate': call disable\(\) first"):
        npu_autopatch.enable()
    with pytest.raises(SettingsError), npu_autopatch.patched():
        pass
    assert all(are_patched())
    npu_autopatch.disable()
    with npu_autopatch.patched():
        pass


def test_a_block_keeps_its_backend_and_its_reach_when_the_environment_asks_for_another(
    monkeypatch: pytest.MonkeyPatch, import_anew: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPU_AUTOPATCH", "1")
    finder.install_from_environment()  # as at start-up; the settings are read with the first model
    capfd.readouterr()
    with block():
        first, second = import_anew("olmo2"), import_anew("olmo2")
        (line,) = capfd.readouterr().err.splitlines()
        assert line == "npu_autopatch: off: backend 'npu' cannot join 'emulate': call disable() first"
        assert first.Olmo2RMSNorm.forward.__npu_autopatch__
        assert second.Olmo2RMSNorm.forward.__npu_autopatch__


def test_disable_takes_back_what_the_environment_asked_for_and_was_not_needed_yet(
    monkeypatch: pytest.MonkeyPatch, import_anew: Any
) -> None:
    monkeypatch.setenv("NPU_AUTOPATCH", "1")
    finder.install_from_environment()
    npu_autopatch.disable()
    assert finder.finder not in sys.meta_path
    assert not hasattr(import_anew("olmo2").Olmo2RMSNorm.forward, "__npu_autopatch__")


def test_a_later_foreign_patch_is_left_alone_and_reported_with_whose() -> None:
    def forward(self, hidden_states):  # type: ignore[no-untyped-def]
        return hidden_states

    forward.__module__ = "their_package.norms"
    try:
        with block():
            LLAMA.forward = forward
        assert vars(LLAMA)["forward"] is forward
        assert are_patched(QWEN3, GEMMA2) == [False, False]
        (row,) = [row for row in npu_autopatch.report().sites if row.name == "llama.LlamaRMSNorm"]
        assert row.state == "foreign"
        assert "their_package.norms" in row.reason
    finally:
        LLAMA.forward = ORIGINALS[LLAMA]


def test_a_foreign_patch_over_ours_that_calls_it_still_works_after_undo() -> None:
    import torch

    try:
        with block():
            inner = LLAMA.forward
            assert inner.__npu_autopatch__
            LLAMA.forward = lambda self, hidden_states: inner(self, hidden_states) * 2
        x, norm = torch.randn(2, 3, 8), LLAMA(8)
        torch.testing.assert_close(norm(x), ORIGINALS[LLAMA](norm, x) * 2)
    finally:
        LLAMA.forward = ORIGINALS[LLAMA]


def test_after_a_foreign_patch_is_gone_the_next_block_patches_again() -> None:
    with block():
        ours = LLAMA.forward
        LLAMA.forward = lambda self, hidden_states: ours(self, hidden_states)
    LLAMA.forward = ORIGINALS[LLAMA]
    with block():
        assert are_patched(LLAMA) == [True]
        (row,) = [row for row in npu_autopatch.report().sites if row.name == "llama.LlamaRMSNorm"]
        assert row.state == "patched"
