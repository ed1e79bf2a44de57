"""Pages that are written by a command are what it writes."""

from __future__ import annotations

from pathlib import Path

from benchmarks import page
from crossfade.compile import catalogue

ROOT = Path(__file__).parents[2]


def test_the_pages_of_passes_are_current() -> None:
    folder = ROOT / "docs" / "passes"
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == catalogue.pages(), "run: crossfade passes --markdown docs/passes"


def test_every_pass_is_on_one_page() -> None:
    index, *stages = catalogue.pages().values()
    for name in catalogue.known_passes():
        assert index.count(f"[{name}](") == 1
        assert sum(f"\n## {name}\n" in text for text in stages) == 1


def test_a_docstring_may_go_on_below_its_example() -> None:
    text = catalogue._as_markdown(catalogue.known_passes()["sink-waits"])
    assert text.index("*bitwise, runs by default*") < text.index("```\nBefore:\n    ") < text.index("\nAfter:\n    ")


def test_the_page_of_benchmarks_is_current() -> None:
    assert page.PAGE.read_text() == page.page(), "run: python -m benchmarks.page"


def test_the_readme_has_the_saved_figures() -> None:
    assert page.readme_table() in (ROOT / "README.md").read_text()
