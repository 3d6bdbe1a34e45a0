"""A page in headless Chromium: what a reader sees and does, and what the page asked for."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

MISSING = "the page is tested in a browser: apt-get install chromium chromium-driver"
REQUEST = "Network.requestWillBeSent"
ELSEWHERE = "data:text/plain,elsewhere"
SHOWN = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility());"
READ = 'return arguments[0].map((e) => e.innerText.replaceAll("\\u00a0", " "));'
FIND_CHAIN = """
return [...document.querySelectorAll(".mode:not([hidden]) .chain")].find((chain) =>
  chain.closest(".block").querySelector(".path").innerText === arguments[0]
    && chain.querySelector(".name").innerText === arguments[1]);
"""
READ_IMAGE = """
const [url, done] = arguments;
const image = new Image();
image.onload = () => {
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  const counts = new Map();
  for (let at = 0; at < data.length; at += 4) {
    const colour = (data[at] << 16) + (data[at + 1] << 8) + data[at + 2];
    counts.set(colour, (counts.get(colour) || 0) + 1);
  }
  done([image.width, image.height, [...counts]]);
};
image.src = url;
"""


def start() -> Chrome:
    """A browser that keeps a log of its console and of all it asks for."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        raise FileNotFoundError(MISSING)
    options = ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options, Service(driver))


class Page:
    """`file`, opened in a window `width` pixels wide."""

    def __init__(self, browser: Chrome, file: Path, width: int = 1280, height: int = 900, scheme: str = "light"):
        self.browser, self.address = browser, file.as_uri()
        self.measure(width, height)
        self.media("", scheme)
        self.asked_for()
        browser.get(self.address)

    def measure(self, width: int, height: int = 900) -> None:
        """Make the window that large."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def media(self, kind: str, scheme: str) -> None:
        """``print`` or as on screen, ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})

    def asked_for(self) -> list[str]:
        """Leave the page: the addresses of all its requests, told so where its own policy stopped them.

        The log is late at times; what comes last in it is the request for the place that is gone to.
        """
        self.browser.get(ELSEWHERE)
        events: list[dict[str, Any]] = []

        def complete(browser: Chrome) -> bool:
            events.extend(json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
            return any(event["params"]["request"]["url"] == ELSEWHERE for event in events if event["method"] == REQUEST)

        WebDriverWait(self.browser, 20).until(complete)
        stopped = {e["params"]["requestId"] for e in events if e["params"].get("blockedReason") == "csp"}
        return [
            ("stopped: " if request["requestId"] in stopped else "") + request["request"]["url"]
            for request in (event["params"] for event in events if event["method"] == REQUEST)
            if request["request"]["url"] != ELSEWHERE
        ]

    def run(self, script: str, *arguments: Any) -> Any:
        """What `script` returns."""
        return self.browser.execute_script(script, *arguments)

    def shown(self, selector: str) -> list[WebElement]:
        """The elements that a reader sees."""
        elements: list[WebElement] = self.run(SHOWN, selector)
        return elements

    def choose(self, mode: str) -> None:
        """Click the tab of `mode`."""
        next(tab for tab in self.shown("[role=tab]") if tab.text == mode).click()

    def texts(self, selector: str) -> list[str]:
        """What a reader reads in the elements that are shown."""
        texts: list[str] = self.run(READ, self.shown(selector))
        return texts

    def chain(self, path: str, name: str) -> WebElement:
        """The chain `name` of the block at `path`, in the mode that is shown."""
        chain: WebElement = self.run(FIND_CHAIN, path, name)
        return chain

    def screenshot(self, file: Path) -> tuple[int, int, dict[tuple[int, int, int], int]]:
        """Of the window, into `file`; its width and height, and how many pixels have which colour."""
        content = self.browser.get_screenshot_as_base64()
        file.write_bytes(base64.b64decode(content))
        # the page's own policy would not let the picture in
        self.browser.get("about:blank")
        width, height, counts = self.browser.execute_async_script(READ_IMAGE, "data:image/png;base64," + content)
        self.browser.get(self.address)
        return width, height, {(c >> 16, c >> 8 & 255, c & 255): count for c, count in counts}
