"""The page in a real browser: drawn, zoomed, folded, searched, on a narrow screen, in the dark, with hostile names."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.graph.passes import Outcome, PassRecord, Verdict
from crossfade.report.page import render_comparison
from crossfade.report.report import Report, Table
from tests.browser import Browser
from tests.report.small_reports import record
from tests.report.small_timelines import MEASURED, PREDICTED, long_report
from tests.several import best_of_several

VIEW = "[+document.getElementById('lanes').dataset.from, +document.getElementById('lanes').dataset.to]"
FOUND = "document.getElementById('found').textContent"


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_report().to_html(tmp_path_factory.mktemp("page") / "long.html")


@best_of_several
def test_a_step_of_24_layers_loads_in_two_seconds(browser: Browser, long_page: Path) -> None:
    start = time.monotonic()
    browser.open(long_page)
    assert time.monotonic() - start < 2.0
    assert browser.complaints() == []
    assert long_page.stat().st_size < 3_000_000
    assert browser.ask("performance.getEntriesByType('resource').length") == 0


def test_lanes_show_what_ran_when(browser: Browser, tmp_path: Path) -> None:
    """Three seconds: mm computes for one, stands still for one, add computes for one."""
    browser.open(Report("r", predicted=PREDICTED, measured=MEASURED).to_html(tmp_path / "page.html"))
    lane = "document.querySelector('canvas[aria-label=\"measured computation\"]')"
    pixels = (
        f"[1/6, 3/6, 5/6].map(x => [...{lane}.getContext('2d')"
        f".getImageData(Math.round({lane}.width * x), 24, 1, 1).data].slice(0, 3).join())"
    )
    rgb = (
        "(name => { const made = document.createElement('i'); made.style.color = `var(--${name})`;"
        "document.body.append(made); const found = getComputedStyle(made).color.match(/\\d+/g).join();"
        "made.remove(); return found; })"
    )
    computed, exposed = browser.ask(f"['computed', 'exposed'].map({rgb})")
    assert browser.ask(pixels) == [computed, exposed, computed]


def test_the_timeline_zooms_and_pans(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    (start, end), (left, right) = browser.changes(VIEW, browser.find("#zoom-in").click)
    assert start == 0
    assert right - left == pytest.approx((end - start) / 2)
    assert (left + right) / 2 == pytest.approx((start + end) / 2)

    drag = (
        "(() => { const lane = document.querySelector('canvas.computation'), box = lane.getBoundingClientRect();"
        "const at = (type, x) => lane.dispatchEvent(new PointerEvent(type,"
        "{bubbles: true, pointerId: 1, clientX: box.left + x, clientY: box.top + 5}));"
        "at('pointerdown', 100); at('pointermove', 100 + box.width / 4); at('pointerup', 100 + box.width / 4); })()"
    )
    _, moved = browser.changes(VIEW, lambda: browser.ask(drag))
    assert moved[0] == pytest.approx(left - (right - left) / 4)
    assert moved[1] - moved[0] == pytest.approx(right - left)

    wheel = (
        "document.querySelector('canvas.computation').dispatchEvent(new WheelEvent('wheel', {bubbles: true,"
        "cancelable: true, ctrlKey: true, deltaY: -50, clientX: 600}))"
    )
    before, after = browser.changes(VIEW, lambda: browser.ask(wheel))
    assert after[1] - after[0] < before[1] - before[0]
    browser.find("#lanes").send_keys("0")
    browser.until(f"{VIEW}[1] - {VIEW}[0] === {end}")


def test_repeated_layers_are_folded_until_asked_for(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    height = "document.querySelector('canvas.modules').clientHeight"
    folded, open_ = browser.changes(height, browser.find("#fold").click)
    assert open_ == 2 * folded
    assert browser.find("#fold").get_attribute("aria-pressed") == "false"
    point = (
        "(() => { const lane = document.querySelector('canvas.modules'), box = lane.getBoundingClientRect();"
        "lane.dispatchEvent(new PointerEvent('pointermove',"
        "{bubbles: true, clientX: box.left + 40, clientY: box.top + 24}));"
        "return document.getElementById('tip').textContent; })()"
    )
    assert browser.ask(point).startswith("blocks.* \u00d7 24forward \u00b7 ")


def test_search_counts_and_goes_from_match_to_match(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    box = browser.find("#find")
    box.send_keys("all_reduce_5")
    assert browser.ask(FOUND) == "22 found"  # 5 and 50 to 59, on two ranks
    box.clear()
    box.send_keys("backward attention blocks.7.")
    assert browser.ask(FOUND) == "200 found"  # every second of 200 nodes, on two ranks
    before, after = browser.changes(VIEW, lambda: box.send_keys("\n"))
    assert after[1] - after[0] < (before[1] - before[0]) / 20
    assert browser.ask(FOUND).startswith("1 of 200: backward_7_")


def test_verdicts_unfold_for_a_search(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    shown = "[...document.querySelectorAll('details.group')].filter(group => !group.hidden).length"
    output = "document.querySelector('#filters output').textContent"
    assert (browser.ask(shown), browser.ask(output)) == (20, "900 verdicts")
    browser.find("#filters input").send_keys("all_reduce_77 ")
    browser.until(f"{output} === '11 of 900 verdicts'")
    assert (
        browser.ask("document.querySelectorAll('details.group[open]').length") == browser.ask(shown) == 10
    )  # 777 has 77's reason
    browser.find("#filters button").click()
    assert browser.find("#filters button").get_attribute("aria-pressed") == "true"


def test_a_diff_is_unpacked_when_it_is_opened(browser: Browser, tmp_path: Path) -> None:
    changed = record(changed=True, before="a = 1\nb = 2", after="a = 1\nb < 3")
    browser.open(Report("r", records=(changed,)).to_html(tmp_path / "page.html"))
    browser.find("#pass-1 summary").click()
    browser.until("document.querySelectorAll('.diff code span').length === 4")
    lines = browser.ask("[...document.querySelectorAll('.diff span')].map(span => [span.className, span.textContent])")
    assert lines == [["hunk", "@@ -1,2 +1,2 @@"], ["same", "a = 1"], ["removed", "b = 2"], ["added", "b < 3"]]
    assert browser.complaints() == []


def test_a_narrow_dark_screen_shows_it_all(browser: Browser, long_page: Path) -> None:
    browser.open(long_page)
    light = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.open(long_page, width=400, dark=True)
    assert browser.ask("document.documentElement.scrollWidth") == 400
    assert browser.ask("getComputedStyle(document.body).backgroundColor") != light
    wide = (
        "[...document.querySelectorAll('main .panel, .answer')].filter(box => box.getBoundingClientRect().right > 400)"
    )
    assert browser.ask(f"{wide}.length") == 0
    assert browser.complaints() == []


EVIL = "<img src=x onerror=window.harm=1><script>window.harm=1</script>\"'&</script>"


def evil_report() -> Report:
    verdict = Verdict(EVIL, Outcome.LEFT, EVIL, source=EVIL, remedy=EVIL, detail=EVIL)
    bad = PassRecord(EVIL, EVIL, EVIL, 0.1, True, {EVIL: 1}, (verdict,), 1, 1, before=EVIL, after=EVIL + "2")
    reduce = Travelled(EVIL, EVIL, EVIL, 1, 0.0, 0.0, 1.0, 0.5, 0.5)
    timeline = Timeline((Computed(EVIL, 0.0, 0.5),), (reduce,), 1.0, EVIL)
    counts, table = {EVIL: (1, 1)}, Table(EVIL, [EVIL], [[EVIL]], EVIL)
    report = Report(EVIL, (bad,), counts, counts, 1, 1, {EVIL: EVIL}, (table,), EVIL, None, timeline)
    return replace(report, modules={EVIL: EVIL}, alive=[(EVIL, 8)], memory=[(EVIL, 8)])


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    browser.open(evil_report().to_html(tmp_path / "page.html"))
    browser.ask("document.querySelectorAll('details').forEach(details => details.open = true)")
    browser.until("document.querySelectorAll('.diff code span').length === 3")
    point = (
        "(() => { const lane = document.querySelector('canvas.computation'), box = lane.getBoundingClientRect();"
        "lane.dispatchEvent(new PointerEvent('pointermove',"
        "{bubbles: true, clientX: box.left + 40, clientY: box.top + 9}));"
        "return document.getElementById('tip').querySelector('b').textContent; })()"
    )
    assert browser.ask(point) == EVIL
    browser.find("#find").send_keys("img")
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("window.harm === undefined")
    assert browser.complaints() == []


def test_a_comparison_opens(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "diff.html"
    path.write_text(render_comparison(evil_report().compared_with(Report("r", measured=MEASURED, program="b"))))
    browser.open(path)
    browser.find("details[data-text] summary").click()
    browser.until("document.querySelectorAll('.diff code span').length > 0")
    assert browser.ask("window.harm === undefined")
    assert browser.complaints() == []
