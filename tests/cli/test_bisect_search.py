"""The search of `bisect`: how many runs it takes, what it finds, and how its sites are named."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from math import ceil, log2
from pathlib import Path

import pytest

from npu_autopatch.cli.bisect_criteria import NotANumber, Numbers
from npu_autopatch.cli.bisect_search import Search
from npu_autopatch.cli.bisect_sites import Sites, setting
from npu_autopatch.reporting import Row
from npu_autopatch.settings import Settings


def searched(
    sites: list[str], fails: Callable[[Collection[str]], bool], shared: int = 0
) -> tuple[list[list[str]], list[frozenset[str]]]:
    """What is found, and the sets that were run for it, beside all and none."""
    runs: list[frozenset[str]] = []

    def run(patched: frozenset[str]) -> bool:
        runs.append(patched)
        return bool(fails(patched))

    search = Search(sites, shared, run)
    search.run()
    assert search.suspects == []
    assert len(set(runs)) == len(runs)
    return search.found, runs


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 65, 1000])
def test_one_culprit_takes_ten_runs_among_a_thousand_and_two_that_confirm_it(count: int) -> None:
    sites = [f"family{n}.Class" for n in range(count)]
    for culprit in sites:
        found, runs = searched(sites, lambda patched, culprit=culprit: culprit in patched)
        assert found == [[culprit]]
        assert len(runs) <= ceil(log2(count)) + 2
        assert {culprit} in [*runs, set(sites)], "it fails alone"
        assert set(sites) - {culprit} in [*runs, set()], "all others pass"


@pytest.mark.parametrize("seed", range(40))
def test_several_culprits_are_all_found_each_minimal(seed: int) -> None:
    drawn = random.Random(seed)
    sites = [f"family{n}.Class" for n in range(drawn.choice([5, 30, 200]))]
    groups: list[set[str]] = []
    for _ in range(drawn.randint(1, 3)):
        free = [site for site in sites if not any(site in group for group in groups)]
        groups.append(set(drawn.sample(free, min(len(free), drawn.choice([1, 1, 2])))))
    groups = [group for group in groups if group]
    found, runs = searched(sites, lambda patched: any(group <= patched for group in groups))
    assert sorted(map(sorted, found)) == sorted(map(sorted, groups))
    assert len(runs) <= sum(map(len, groups)) * (ceil(log2(len(sites))) + 2) + 1


def test_what_serves_a_culprit_is_found_cheaply_and_blamed_only_if_it_fails_alone() -> None:
    sites = [*(f"moe.entry{n}" for n in range(3)), *(f"family{n}.Class" for n in range(997))]
    found, runs = searched(sites, lambda patched: {"moe.entry1", "family500.Class"} <= patched, shared=3)
    assert found == [["moe.entry1", "family500.Class"]]
    assert len(runs) <= 10 + 6
    assert set(sites) - {"family500.Class"} in runs, "the entry stays"
    assert searched(sites, lambda patched: "moe.entry1" in patched, shared=3)[0] == [["moe.entry1"]]


def rows(*names: str, state: str = "patched", module: str = "transformers.models.m.modeling_m") -> list[Row]:
    return [Row(module, name, "rms_norm", "v", state) for name in names]


def left(skip: str | list[str], names: Collection[str]) -> set[str]:
    settings = Settings.of(("rms_norm",), skip=skip)
    return {name for name in names if not settings.skips(name)}


@pytest.mark.parametrize(
    "names",
    [
        ["qwen3.Qwen3RMSNorm", "qwen3.Qwen3MLP", "qwen3_next.Qwen3NextRMSNorm", "qwen3.qwen3"],
        ["odd+1.Norm", "odd.Norm", "a b.Norm", "a,b.MLP"],
        ["odd[1].Norm", "odd1.Norm", "odd*.MLP", "oddest.MLP"],
        ["odd+1.Norm", "odd-1.Norm", "odd 1.Norm", "odd!1.Norm", "odd]1.Norm", "odd^1.Norm", "odd?1.Norm"],
        ["a\\b.Norm", "a@b.Norm", "@b.Norm", "a~b.Norm", "a&&b.Norm", "a,b.Norm", "a.Norm"],
        ["größe.Norm", "grösse.Norm"],
        ["sam.text.Norm", "sam.text.MLP", "sam.Norm"],
    ],
)
def test_each_site_can_be_skipped_alone_whatever_its_name(names: list[str], tmp_path: Path) -> None:
    sites = Sites(rows(*names))
    assert len(sites.patterns) == len(names)
    for pattern in sites.patterns:
        (row,) = sites.rows[pattern]
        for file in (tmp_path / "skip", tmp_path / "a, b"):
            assert left(setting(sites.skipping_all_but({pattern}, ()), file), names) == {row.name}
            assert left(setting([pattern], file), names) == {*names} - {row.name}


def test_a_site_that_many_processes_have_is_one() -> None:
    first = rows("a.Norm", "a.Norm") + rows("a.Norm", state="refused")
    (site,) = Sites(first, rows("a.Norm", state="skipped")).rows.values()
    assert site == rows("a.Norm")


def test_what_is_too_long_for_a_variable_goes_through_a_file(tmp_path: Path) -> None:
    names = [f"family{n // 4}.{'Long' * 50}{n % 4}" for n in range(1000)]
    sites = Sites(rows(*names))
    value = setting(sites.skipping_all_but(set(sites.patterns[::4]), ["glm4*"]), tmp_path / "skip")
    assert value == f"@{tmp_path / 'skip'}" and left(value, names) == set(names[::4])
    assert Settings.of(("rms_norm",), skip=value).skip[0] == "glm4*"


def test_whole_families_are_named_once_and_the_users_own_stay(tmp_path: Path) -> None:
    names = [f"family{n // 4}.Class{n % 4}" for n in range(1000)]
    sites = Sites(rows(*names))
    assert sites.skipping_all_but({"family7.Class2"}, ["glm4*"])[:3] == ["glm4*", "family0", "family1"]
    half = set(sites.patterns[:500])
    skip = setting(sites.skipping_all_but(half, ()), tmp_path / "skip")
    assert left(skip, names) == half and len(skip) < 3000
    worst = setting(sites.skipping_all_but(set(sites.patterns[::4]), ()), tmp_path / "skip")
    assert left(worst, names) == set(names[::4]) and "@" not in worst
    assert len(f"NPU_AUTOPATCH_SKIP={worst}") < 128 * 1024, "what Linux takes for one variable"


def test_sites_of_modules_that_the_failing_run_has_not_reached_are_suspects() -> None:
    first = rows("a.Norm") + rows("a.MLP", state="refused")
    second = rows("a.Norm", "a.MLP", "b.Norm", state="skipped") + rows("b.Foreign", state="foreign")
    second += rows("moe.entry", state="skipped", module="transformers.integrations.moe")
    sites = Sites(first, second)
    assert sites.patterns == ["moe.entry", "a.Norm", "b.Norm"] and sites.shared == 1


@pytest.mark.parametrize(
    "line",
    [
        "nan", "loss nan", "loss: nan", "loss=nan", "loss=inf,", "step 3 loss nan lr 0.1", "loss is NaN", "-inf",
        "{'loss': nan, 'epoch': 1}", "{'loss': 'nan', 'grad_norm': '1.2'}", "tensor([nan, 1.])", "[1.0, -inf]",
        "tensor(nan, grad_fn=<NllLossBackward0>)", '{"loss": NaN}', "ppl Infinity", "loss nan, step 3", "1, nan",
        " 5%|# | 1/20 [00:01<00:05,  1.2it/s, loss=nan]", "3 | nan | 2.0", "loss nan (best 2.3)", "loss=nan: stopping",
        "step 3: nan", "0.1 nan 0.3",
    ],
)  # fmt: skip
def test_a_nan_that_is_printed_as_a_number_counts(line: str) -> None:
    assert NotANumber().of_line(line).startswith("printed ")


@pytest.mark.parametrize(
    "line",
    [
        "", "loss 2.3", "INFO: start", "info", "no nan found", "checking for nan", "logging_nan_inf_filter=True",
        "nan_to_num(x, nan=0.0)", "skipped nan values", "no nan", "nan: 0", "{'nan': 0, 'inf': 0}", "nans 0",
        "loading nan/model.py", "nan-safe softmax on", "without nan or inf", "banana", "loss 1.2 infinite loop",
        "see nan.py", "NPU_AUTOPATCH_SKIP=nano",
    ],
)  # fmt: skip
def test_a_nan_in_prose_does_not(line: str) -> None:
    assert NotANumber().of_line(line) == ""


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("{'loss': 2.5, 'grad_norm': 3.0}\n{'loss': '2.25'}\n", [2.5, 2.25]),
        ("step 1 loss 2.5\nstep 2 train_loss=1e-3.\n", [2.5, 1e-3]),
        ("Loss: -2.5 | loss is 3\r 4% loss=.5]", [-2.5, 3.0, 0.5]),
        ("loss tensor(2.5, grad_fn=<X>) loss=inf", [2.5, float("inf")]),
        ("loss_scale 1024, lossless 3, loss of 3, loss 3x", []),
    ],
)
def test_numbers_after_the_word_are_read(tmp_path, text: str, numbers: list[float]) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "log").write_text(text)
    assert Numbers("loss", 0.01)._numbers(tmp_path / "log") == numbers


@pytest.mark.parametrize(
    ("printed", "failure"),
    [
        ("loss 2.0 loss 1.0", ""),
        ("loss 2.01 loss 1.0", ""),
        ("loss 2.0 loss 1.1", "loss 1.1, not 1 (number 2, 9.1e-02 off)"),
        ("loss 2.0 loss nan", "loss nan, not 1 (number 2, inf off)"),
        ("loss 2.0", "printed 1 times loss, not 2"),
    ],
)
def test_losses_are_compared_one_by_one(tmp_path, printed: str, failure: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "log").write_text(printed)
    assert Numbers("loss", 0.01, [2.0, 1.0]).of_output(tmp_path / "log") == failure
