"""What the page shows is what the analysis says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from npu_autopatch.analysis.result import NO_OP, PREFILL, STATES, Analysis, Chain, Cost, Judgement, Mode, Part
from tests.page.browser import Page
from tests.page.example import example

# For each mode: part, block, chain, state in words, and the numbers of its row.
TREE = """
return Object.fromEntries([...document.querySelectorAll(".mode")].map((mode) => [
  mode.dataset.mode,
  [...mode.querySelectorAll(".chain")].map((chain) => [
    chain.closest(".part").querySelector("strong").textContent,
    chain.closest(".block").querySelector(".path").textContent,
    chain.querySelector(".name").textContent,
    chain.querySelector("summary .state").textContent,
    ...[...chain.querySelectorAll("summary data")].map((number) => Number(number.value)),
  ]),
]));
"""
NUMBERS = "return [...document.querySelectorAll(arguments[0])].map((number) => Number(number.value));"
WIDTHS = """
return [...arguments[0].querySelectorAll(arguments[1])].map((bar) =>
  [...bar.children].reduce((sum, segment) => sum + segment.getBoundingClientRect().width, 0)
    / bar.getBoundingClientRect().width);
"""
IN_BYTES = {
    0: "0 B",
    999: "999 B",
    1000: "1.00 kB",
    999_499: "999 kB",
    999_500: "1.00 MB",
    16_777_216: "16.8 MB",
    48_700_000_000: "48.7 GB",
    3 * 10**15: "3.00 PB",
}


def _numbers(before: Cost, after: Cost) -> list[int]:
    return [before.launches, after.launches, before.bytes, after.bytes]


def _rows(mode: Mode) -> Iterator[list[Any]]:
    """Blocks in the order in which they first come."""
    for part in mode.parts:
        for block in dict.fromkeys(chain.block for chain in part.chains):
            for chain in part.chains:
                if chain.block == block:
                    path = block or "own code"
                    numbers = _numbers(chain.before, chain.after)
                    yield [part.name, path, chain.name, chain.judgement.state, *numbers]


def _costing(*sizes: int) -> Analysis:
    """A chain of each of these sizes in bytes, unchanged."""
    costs = [Cost(1, size) for size in sizes]
    chains = tuple(Chain("norm", "", cost, cost, Judgement(NO_OP, "None.")) for cost in costs)
    return Analysis("m", "", {}, (Mode(PREFILL, "", (Part("layer 0", "", 1, chains),)),))


def test_every_chain_is_in_the_tree_with_its_state_and_its_cost(opened: Callable[..., Page]) -> None:
    analysis = example()
    tree = opened(analysis).run(TREE)
    assert tree == {mode.name: list(_rows(mode)) for mode in analysis.modes}
    assert {row[3] for rows in tree.values() for row in rows} == set(STATES)


def test_the_totals_are_those_of_the_analysis(opened: Callable[..., Page]) -> None:
    analysis = example()
    page = opened(analysis)
    for at, mode in enumerate(analysis.modes):
        assert page.run(NUMBERS, f"#mode-{at} .total data") == _numbers(mode.before, mode.after)
        page.choose(mode.name)
        launches, moved = page.texts(".total figcaption p")
        assert launches.startswith(f"{mode.before.launches:,} → {mode.after.launches:,}")
        assert moved.startswith(f"{mode.before.bytes / 1e9:.3g}") and moved.count(" GB") == 2


def test_a_part_shows_the_cost_of_all_its_layers_and_of_each(opened: Callable[..., Page]) -> None:
    analysis = example()
    page = opened(analysis)
    for at, mode in enumerate(analysis.modes):
        for index, part in enumerate(mode.parts, start=2):
            row = f"#mode-{at} .part:nth-child({index}) > summary"
            whole = _numbers(part.before * part.count, part.after * part.count)
            assert page.run(NUMBERS, f"{row} .numbers data") == whole
            each = page.run(NUMBERS, f"{row} .each data")
            assert each == (_numbers(part.before, part.after) if part.count > 1 else [])
    assert page.shown(".alike")[0].text == "48 alike"


def test_the_legend_counts_the_chains_and_the_share_of_the_launches_of_each_state(opened: Callable[..., Page]) -> None:
    analysis = example()
    page = opened(analysis)
    for mode in analysis.modes:
        page.choose(mode.name)
        told = {}
        for text in page.texts(".filter"):
            state, _, count = text.split("\n")
            told[state] = count
        assert list(told) == list(STATES)
        for state, text in told.items():
            chains = sum(chain.judgement.state == state for part in mode.parts for chain in part.chains)
            share = 100 * mode.states[state] / mode.before.launches
            percent = "<1" if 0 < share < 1 else f"{share:.0f}"
            assert text == f"{chains} {'chain' if chains == 1 else 'chains'}, {percent} % of launches"


def test_bars_are_as_long_as_the_numbers_say(opened: Callable[..., Page]) -> None:
    mode = example().modes[0]
    page = opened(example())
    (layer, _) = mode.parts
    experts = next(chain for chain in layer.chains if chain.name == "experts")
    row = page.chain("mlp.experts", "experts")
    assert page.run(WIDTHS, row, ".bytes .bar") == pytest.approx(
        [1, experts.after.bytes / experts.before.bytes], abs=0.01
    )
    part, total = page.shown(".part > summary")[0], page.shown(".total.bytes")[0]
    shares = [layer.before.bytes * layer.count / mode.before.bytes, layer.after.bytes * layer.count / mode.before.bytes]
    assert page.run(WIDTHS, part, ".bytes .bar") == pytest.approx(shares, abs=0.01)
    assert page.run(WIDTHS, total, ".bar") == pytest.approx([1, mode.after.bytes / mode.before.bytes], abs=0.01)


def test_bytes_are_in_decimal_units_of_three_digits(opened: Callable[..., Page]) -> None:
    page = opened(_costing(*IN_BYTES))
    for when in ("before", "after"):
        assert page.texts(f".chain .bytes data.{when}") == list(IN_BYTES.values())
    titles = page.run('return [...document.querySelectorAll(".chain .bytes data.after")].map((number) => number.title)')
    assert titles == [f"{count:,} bytes" for count in IN_BYTES]


def test_the_model_what_was_counted_the_versions_and_the_notes_are_there(opened: Callable[..., Page]) -> None:
    analysis = example()
    page = opened(analysis)
    (heading, notes) = (page.shown("header")[0].text, page.shown(".notes")[0].text)
    assert page.browser.title == "Qwen/Qwen3-30B-A3B - npu-autopatch analyze"
    for text in (analysis.model, analysis.counted, *analysis.versions, *analysis.versions.values()):
        assert text in heading
    for note in analysis.notes:
        assert note in notes


def test_a_program_finds_the_whole_analysis_in_the_page(opened: Callable[..., Page]) -> None:
    analysis = example()
    content = opened(analysis).run('return document.getElementById("analysis").textContent')
    assert json.loads(Analysis.of(json.loads(content)).to_json()) == json.loads(analysis.to_json())
