"""Pages that are written by a command are what it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import page
from crossfade.compile import catalogue
from crossfade.graph.passes import Numerics, Pass

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


@dataclass(frozen=True)
class Renamed(Pass):
    """Do something.

    Before:
        x: f32[2] = input("x")

    After:
        y: f32[2] = input("x")

    Not in a default pipeline: for tests
    alone.
    """

    name = "renamed-in-tests"
    numerics = Numerics.BITWISE


def test_what_a_docstring_says_below_its_example_stands_above_it() -> None:
    assert catalogue._as_markdown(Renamed) == (
        "\n## renamed-in-tests\n\n*bitwise, not by default*\n\n"
        "Do something.\n\nNot in a default pipeline: for tests\nalone.\n\n"
        '```\nBefore:\n    x: f32[2] = input("x")\n\nAfter:\n    y: f32[2] = input("x")\n```\n'
    )
    assert catalogue.when_it_runs(Renamed) == "not by default: for tests alone."


def test_the_page_of_benchmarks_is_current() -> None:
    assert page.PAGE.read_text() == page.page(), "run: python -m benchmarks.page"


def test_the_readme_has_the_saved_figures() -> None:
    assert page.readme_table() in (ROOT / "README.md").read_text()
