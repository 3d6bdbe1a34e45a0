"""What a reader can do: open a chain, change the mode, leave only one state; with a mouse or without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from npu_autopatch.analysis.result import CANDIDATE, NOT_POSSIBLE, STATES
from tests.page.browser import Page
from tests.page.example import LOSS, ROUTER, example

HOLLOW = """
const seen = (e) => e.checkVisibility();
return [...document.querySelectorAll(".block, .part")]
  .filter((outer) => seen(outer) && ![...outer.querySelectorAll(".chain")].some(seen)).length;
"""


def _pressed(page: Page, key: str, until: Callable[[WebElement], bool]) -> WebElement:
    """The element with the focus, after as many strokes as it takes."""
    for _ in range(100):
        page.browser.switch_to.active_element.send_keys(key)
        focused = page.browser.switch_to.active_element
        if until(focused):
            return focused
    raise AssertionError(f"{key!r} does not get there")


def _filter(page: Page, state: str) -> WebElement:
    return page.browser.find_element(By.CSS_SELECTOR, f'.mode:not([hidden]) .filter[data-state="{state}"]')


def test_a_click_on_a_chain_shows_its_reason_its_source_and_what_ran(opened: Callable[..., Page]) -> None:
    page = opened(example())
    chain = page.chain("mlp.experts", "experts")
    assert page.shown(".reasons") == []
    chain.find_element(By.CSS_SELECTOR, "summary").click()
    (reasons,) = page.shown(".reasons")
    assert "two grouped products and a fused gate." in reasons.text
    assert "aclnnGroupedMatmulV4" in reasons.find_element(By.CSS_SELECTOR, ".source").text
    ops = [row.text for row in reasons.find_elements(By.CSS_SELECTOR, ".ops tbody tr")]
    assert set(ops) == {
        "aten::mm 256 0",
        "aten::slice 256 0",
        "npu::npu_grouped_matmul 0 2",
        "aten::silu 1 0",
        "aten::mul 1 0",
        "npu::npu_swiglu 0 1",
    }
    assert [site.text for site in reasons.find_elements(By.CSS_SELECTOR, ".sites li")] == ["qwen3_moe.Qwen3MoeExperts"]
    facts = reasons.find_element(By.CSS_SELECTOR, ".facts").text.split("\n")
    assert facts == ["experts", "128", "per token", "8", "activation", "silu", "weights", "stacked"]
    assert "24,672 → 144 launches" in reasons.find_element(By.CSS_SELECTOR, ".sums").text
    chain.find_element(By.CSS_SELECTOR, "summary").click()
    assert page.shown(".reasons") == []


def test_a_candidate_shows_its_op_and_what_to_prepare_check_and_try(opened: Callable[..., Page]) -> None:
    page = opened(example())
    page.chain("mlp.gate", "router").find_element(By.CSS_SELECTOR, "summary").click()
    (candidate,) = page.shown(".reasons .candidate")
    assert candidate.text.split("\n") == [
        f"Candidate {ROUTER.op}",
        *("Prepare", ROUTER.prepare),
        *("Check", ROUTER.check),
        *("Experiment", ROUTER.experiment),
        *("Source", ROUTER.source),
    ]


def test_the_tabs_switch_the_mode(opened: Callable[..., Page]) -> None:
    analysis = example()
    page = opened(analysis)
    for mode in (*analysis.modes, analysis.modes[0]):
        page.choose(mode.name)
        (panel,) = page.shown(".mode")
        assert panel.get_attribute("data-mode") == mode.name
        assert page.shown(".input")[0].text == mode.input
        assert [tab.text for tab in page.shown("[aria-selected=true]")] == [mode.name]


def test_the_filter_leaves_only_chains_of_its_state_and_gives_all_back(opened: Callable[..., Page]) -> None:
    analysis = example()
    page = opened(analysis)
    for mode in analysis.modes:
        page.choose(mode.name)
        everything = len(page.texts(".chain"))
        for state in STATES:
            expected = [c.name for part in mode.parts for c in part.chains if c.judgement.state == state]
            _filter(page, state).click()
            assert sorted(page.texts(".chain .name")) == sorted(expected)
            assert set(page.texts(".chain .state")) == {state for _ in expected[:1]}
            assert page.run(HOLLOW) == 0
            _filter(page, state).click()
            assert len(page.texts(".chain")) == everything


def test_the_filter_stays_when_the_mode_changes_and_says_where_nothing_is_left(opened: Callable[..., Page]) -> None:
    page = opened(example())
    page.choose("training")
    _filter(page, NOT_POSSIBLE).click()
    assert len(page.shown(".chain")) == 2 and page.shown(".empty") == []
    page.choose("prefill")
    assert page.shown(".chain") == []
    assert [text.text for text in page.shown(".empty")] == ["No chain of this state in prefill."]
    assert _filter(page, NOT_POSSIBLE).get_attribute("aria-pressed") == "true"


def test_the_filter_opens_a_closed_part_that_has_such_a_chain(opened: Callable[..., Page]) -> None:
    page = opened(example())
    for summary in page.shown(".part > summary"):
        summary.click()
    assert page.shown(".chain") == []
    _filter(page, CANDIDATE).click()
    assert len(page.shown(".chain")) == 2


def test_the_keyboard_alone_changes_the_mode_filters_and_opens_a_chain(opened: Callable[..., Page]) -> None:
    page = opened(example())
    _pressed(page, Keys.TAB, lambda focused: focused.text == "prefill")
    _pressed(page, Keys.ARROW_LEFT, lambda focused: focused.text == "training")
    assert page.shown(".mode")[0].get_attribute("data-mode") == "training"
    _pressed(page, Keys.TAB, lambda focused: focused.get_attribute("data-state") == CANDIDATE).send_keys(Keys.ENTER)
    assert len(page.shown(".chain")) == 1
    summary = _pressed(page, Keys.TAB, lambda focused: focused.text.startswith("loss"))
    assert summary.value_of_css_property("outline-style") == "solid"
    assert summary.value_of_css_property("outline-width") == "2px"
    summary.send_keys(Keys.ENTER)
    assert LOSS.experiment in page.shown(".reasons")[0].text
    summary.send_keys(Keys.SPACE)
    assert page.shown(".reasons") == []


def test_all_reasons_open_and_close_at_once(opened: Callable[..., Page]) -> None:
    page = opened(example())
    (button,) = page.shown(".unfold")
    button.click()
    assert len(page.texts(".reasons")) == len(page.texts(".chain")) > 15
    assert button.text == "Close all reasons"
    button.click()
    assert page.shown(".reasons") == []


@pytest.mark.parametrize("role", ["button", "summary"])
def test_all_that_is_clicked_can_have_the_focus(opened: Callable[..., Page], role: str) -> None:
    page = opened(example())
    unreachable = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.tabIndex < 0).length"
    tabs = 2 if role == "button" else 0  # of a row of tabs, one; the arrows go on from there
    assert page.run(unreachable, role) == tabs
