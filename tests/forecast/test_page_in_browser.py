"""The page of forecasts in a real browser: curves and bars to hover, on a narrow screen, in the dark, hostile names."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfade.cost.presets import preset
from crossfade.forecast.page import write_page
from crossfade.forecast.simulate import Forecaster, Setting
from crossfade.forecast.sweeps import Sweep, sweep
from crossfade.forecast.ways import way_named
from tests.browser import Browser
from tests.forecast.models import tokens, tower

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">"
TIP = "document.getElementById('tip').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    forecaster = Forecaster(tower(4, 64), tokens(), name=HOSTILE)
    settings = [(Setting({"dp": 8}, way_named(way)), preset("h100-cluster")) for way in ("ddp", "fsdp")]
    points = sweep(forecaster, settings, Sweep.read("gpus=8..64"))
    alone = [forecaster.forecast(*each) for each in settings]
    return write_page(tmp_path_factory.mktemp("page") / "forecast.html", alone, points, "gpus")


def hovered(browser: Browser, selector: str) -> str:
    """What the page says of an element when a pointer is over it."""
    browser.ask(f"document.querySelector({selector!r}).dispatchEvent(new PointerEvent('pointerenter'))")
    return str(browser.ask(TIP))


def test_each_curve_has_a_point_a_value_and_says_what_it_is(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.complaints() == []
    assert browser.ask("document.querySelectorAll('#chart polyline').length") == 2
    assert browser.ask("document.querySelectorAll('#chart circle').length") == 2 * 4
    said = hovered(browser, "#chart circle")
    assert "ddp on h100-cluster\ngpus 8: " in said and "bound by " in said and ", then " in said
    before, after = browser.changes(
        "document.querySelector('#chart polyline').getAttribute('points')",
        lambda: browser.ask("(s => { s.value = 'step, ms'; s.dispatchEvent(new Event('change')) })(figure)"),
    )
    assert before != after


def test_bounds_are_bars_beside_the_step(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = browser.ask("[...document.querySelectorAll('svg[aria-label=bounds]')].map(s => s.textContent)")
    assert len(shown) == 2
    assert all(name in text for text in shown for name in ("products", "memory", "links", "launches", "the step, "))
    said = hovered(browser, "svg[aria-label=bounds] rect")
    assert " ms alone, " in said and "next bound: " in said
    bars = "[...document.querySelectorAll('svg[aria-label=bounds] rect')]"
    widths = browser.ask(f"{bars}.slice(0, 4).map(bar => +bar.getAttribute('width'))")
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_narrow_and_dark_screens(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, width=400, height=800, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth") <= 400
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(22, 25, 29)" if dark else "rgb(255, 255, 255)")


def test_a_name_is_only_text(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.ask("document.title") == f"Forecast: {HOSTILE}"
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert HOSTILE in browser.ask("document.querySelector('h1').textContent")
