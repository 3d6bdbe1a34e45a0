"""What a machine can tell of the looks: nothing overflows or overlaps, texts can be read, colours are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_autopatch.analysis.result import MODES, STATES
from tests.page.browser import Page
from tests.page.example import example

OUTSIDE = """
return [...document.querySelectorAll("#page *")]
  .filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > window.innerWidth + .5)
  .map((e) => `${e.tagName}.${e.getAttribute("class")}`);
"""
# texts of one row that lie on each other
OVERLAPPING = """
const found = [];
for (const row of document.querySelectorAll(".mode:not([hidden]) :is(.row, .total, .filter, .versions)")) {
  const walker = document.createTreeWalker(row, NodeFilter.SHOW_TEXT), boxes = [];
  while (walker.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    for (const box of range.getClientRects()) boxes.push([walker.currentNode, box]);
  }
  for (const [one, a] of boxes) for (const [other, b] of boxes) {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (one !== other && across > 1 && down > 4) found.push([one.data, other.data]);
  }
}
return found;
"""
# the colours of all texts that are shown, each with what lies behind it, drawn to know them as red, green and blue
COLOURS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const drawn = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const pairs = new Map();
const walker = document.createTreeWalker(document.getElementById("page"), NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!element.checkVisibility()) continue;
  let behind = element;
  while (behind && !drawn(getComputedStyle(behind).backgroundColor)[3]) behind = behind.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(behind || document.documentElement).backgroundColor];
  pairs.set(pair.join(), [...pair.map((colour) => drawn(colour).slice(0, 3)), walker.currentNode.data]);
}
return [...pairs.values()];
"""
STATE_COLOURS = """
return [...document.querySelectorAll(".mode:not([hidden]) .filter .state")].map((e) => getComputedStyle(e).color);
"""


def _luminance(colour: list[int]) -> float:
    """As WCAG 2.2 defines it."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: list[int], other: list[int]) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_overflows_or_overlaps(opened: Callable[..., Page], mode: str) -> None:
    page = opened(example())
    page.choose(mode)
    page.shown(".unfold")[0].click()
    for width in (360, 390, 600, 720, 721, 960, 961, 1120, 1121, 1280, 1600):
        page.measure(width)
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert page.run(OUTSIDE) == [], width
        assert page.run(OVERLAPPING) == [], width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_aa_asks_for(opened: Callable[..., Page], scheme: str) -> None:
    page = opened(example(), scheme=scheme)
    page.shown(".unfold")[0].click()
    page.choose("training")
    page.shown(".filter")[0].click()
    pairs = page.run(COLOURS)
    assert len(pairs) > 8
    assert [(text, colour, behind) for colour, behind, text in pairs if _contrast(colour, behind) < 4.5] == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_a_screenshot_shows_all_five_states(
    opened: Callable[..., Page], tmp_path: Path, width: int, scheme: str
) -> None:
    page = opened(example(), width=width, scheme=scheme)
    page.choose("training")
    states = [tuple(map(int, re.findall(r"\d+", colour)))[:3] for colour in page.run(STATE_COLOURS)]
    assert len(set(states)) == len(STATES)
    shown_width, height, pixels = page.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert (shown_width, height) == (width, 900)
    ground = max(pixels, key=pixels.__getitem__)
    assert _luminance([*ground]) < 0.02 if scheme == "dark" else _luminance([*ground]) > 0.9
    assert pixels[ground] < 0.97 * width * height
    assert [state for state, colour in zip(STATES, states, strict=True) if pixels.get(colour, 0) < 40] == []


def test_states_differ_without_colour(opened: Callable[..., Page]) -> None:
    page = opened(example())
    marks = "return [...document.querySelectorAll('#mode-0 .filter use')].map((use) => use.getAttribute('href'))"
    hrefs = page.run(marks)
    assert len(set(hrefs)) == len(STATES)
    shapes = page.run("return arguments[0].map((href) => document.querySelector(href).innerHTML)", hrefs)
    assert len(set(shapes)) == len(STATES)


def test_paper_is_light_and_shows_what_is_open(opened: Callable[..., Page]) -> None:
    page = opened(example(), scheme="dark")
    page.shown(".chain > summary")[0].click()
    page.media("print", "dark")
    colour, behind = page.run(COLOURS)[0][:2]
    assert _luminance(behind) > 0.9 and _contrast(colour, behind) > 4.5
    assert len(page.shown(".reasons")) == 1 and page.shown(".unfold") == []
