"""One browser for all tests of a worker; no page may ask for anything, or complain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from npu_autopatch.analysis.page import page
from npu_autopatch.analysis.result import Analysis
from tests.page.browser import Page, start


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """It is ended whatever happens."""
    chrome = start()
    yield chrome
    chrome.quit()


@pytest.fixture
def opened(browser: Chrome, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open the page of one analysis; at the end it has asked for itself alone, and the console is empty."""
    pages: list[Page] = []
    browser.get_log("browser")

    def open_page(analysis: Analysis, **window: Any) -> Page:
        file = tmp_path / "analysis.html"
        file.write_text(page(analysis), encoding="utf-8")
        pages.append(Page(browser, file, **window))
        return pages[-1]

    yield open_page
    (opened_page,) = pages
    looked_at = ("about:blank", "data:image/png")  # by a screenshot
    assert {url for url in opened_page.asked_for() if not url.startswith(looked_at)} == {opened_page.address}
    assert browser.get_log("browser") == []
