"""A real Chromium without a window, for the tests of pages; those are skipped where there is none."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OFFLINE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
"""Started as root, and talking to nobody."""


class Browser:
    """Opens pages and asks them questions."""

    def __init__(self) -> None:
        webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install -e '.[browser]'")
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        driver = shutil.which("chromedriver")
        if chromium is None or driver is None:
            pytest.skip("no Chromium with its driver: Debian has them as chromium and chromium-driver")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = webdriver.ChromeOptions()
        for argument in (*OFFLINE, f"--user-data-dir={self._profile.name}"):
            options.add_argument(argument)
        options.binary_location = chromium
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))

    def open(self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Show a page, and wait until its timeline is drawn if it has one."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.complaints()
        self.driver.get(page.as_uri())
        self.until("!document.getElementById('lanes') || document.getElementById('lanes').dataset.ready === 'yes'")

    def ask(self, expression: str) -> Any:
        """The value of an expression of the page's."""
        return self.driver.execute_script(f"return {expression}")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def changes(self, expression: str, act: Callable[[], object]) -> tuple[Any, Any]:
        """An expression's value before and after something that changes it."""
        before = self.ask(expression)
        act()
        deadline = time.monotonic() + 10.0
        while (after := self.ask(expression)) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        return before, after

    def find(self, selector: str) -> Any:
        """An element by its CSS selector."""
        return self.driver.find_element("css selector", selector)

    def complaints(self) -> list[str]:
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()
        self._profile.cleanup()
