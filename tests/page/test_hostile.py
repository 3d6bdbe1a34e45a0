"""Whatever a model or its author calls things, they are text."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from npu_autopatch.analysis.page import page as document
from npu_autopatch.analysis.result import Analysis
from tests.page.browser import Page
from tests.page.example import example

BREAKING = '</script><!--<b id="planted">"\'&amp;<script>alert(1)</script> ${x} $title '
TEXTS = """
const walker = document.createTreeWalker(document.getElementById("page"), NodeFilter.SHOW_TEXT);
const texts = [];
while (walker.nextNode()) texts.push(walker.currentNode.data);
return texts;
"""


def hostile(content: Any, key: str = "") -> Any:
    """All texts but states broken markup of 200 characters, those that differed still different."""
    if isinstance(content, dict):
        return {hostile(name) if key == "facts" else name: hostile(value, name) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [hostile(item, key) for item in content]
    if isinstance(content, str) and content and key != "state":
        return (BREAKING + content).ljust(200, "x")[:200]
    return content


def _texts(content: Any, key: str = "") -> list[str]:
    if isinstance(content, dict):
        names = list(content) if key in ("facts", "versions", "ops_before", "ops_after") else []
        return names + [text for name, value in content.items() for text in _texts(value, name)]
    if isinstance(content, list):
        return [text for item in content for text in _texts(item, key)]
    return [content] if isinstance(content, str) and content else []


def test_hostile_names_are_shown_as_text(opened: Callable[..., Page]) -> None:
    content = hostile(dataclasses.asdict(example()))
    page = opened(Analysis.of(content))
    assert set(_texts(content)) <= set(page.run(TEXTS))
    assert page.run('return document.querySelectorAll("#page b, #page script").length') == 0
    assert page.run("return document.scripts.length") == 3
    # a browser makes one space of several in a title
    assert page.browser.title.split() == [*content["model"].split(), "-", "npu-autopatch", "analyze"]


def test_nothing_overflows_with_hostile_names(opened: Callable[..., Page]) -> None:
    page = opened(Analysis.of(hostile(dataclasses.asdict(example()))), width=360)
    page.shown(".unfold")[0].click()
    assert page.run("return document.documentElement.scrollWidth") == 360


def test_a_name_that_utf_8_cannot_hold_can_be_written(opened: Callable[..., Page]) -> None:
    page = opened(dataclasses.replace(example(), model="/models/caf\udce9-größe-模型"))
    heading = page.run('return document.querySelector("h1").textContent.toWellFormed()')
    assert heading == "/models/caf\ufffd-größe-模型" and page.browser.title.startswith(heading)


def test_a_fact_that_json_cannot_hold_is_an_error_where_it_is_written() -> None:
    analysis = json.loads(example().to_json())
    analysis["modes"][0]["parts"][0]["chains"][0]["facts"]["eps"] = math.nan
    with pytest.raises(ValueError, match="JSON"):
        document(Analysis.of(analysis))


def test_what_a_foreign_hand_adds_to_the_page_neither_runs_nor_loads(browser: Chrome, tmp_path: Path) -> None:
    added = "<script>window.ran = true</script><img src='http://127.0.0.1:9/x.png' onerror='window.ran = true'>"
    file = tmp_path / "added.html"
    file.write_text(document(example()).replace("</body>", added + "</body>"))
    page = Page(browser, file)
    assert page.run("return [window.ran, document.images.length]") == [None, 1]
    assert page.asked_for() == [file.as_uri(), "stopped: http://127.0.0.1:9/x.png"]
    assert len(browser.get_log("browser")) >= 2


def test_a_request_would_be_seen(browser: Chrome, tmp_path: Path) -> None:
    file = tmp_path / "loading.html"
    file.write_text("<img src='http://127.0.0.1:9/x.png'>")
    assert Page(browser, file).asked_for() == [file.as_uri(), "http://127.0.0.1:9/x.png"]
    browser.get_log("browser")


def test_the_page_is_made_without_torch_and_transformers() -> None:
    code = (
        "import sys, npu_autopatch.analysis.page\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'wrapt', 'rich'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
