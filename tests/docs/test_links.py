"""Every relative link and anchor of the documentation leads somewhere, and what it names exists."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import crossfade

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code, in which brackets are not links."""
    return CODE.sub("", FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs both make them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in plain}


def links(page: Path) -> list[tuple[str, str]]:
    """A page's relative links: file, or nothing for the page itself, and anchor."""
    found = [target for target in LINK.findall(prose(page)) if "://" not in target]
    return [(target.partition("#")[0], target.partition("#")[2]) for target in found]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)} links to {file}, which is not there"
        if anchor:
            assert anchor in anchors(target), (
                f"{name_of(page)} links to #{anchor}, which {name_of(target)} does not have"
            )


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_pages_of_the_site_link_within_it(page: Path) -> None:
    outside = [file for file, _ in links(page) if file and not (page.parent / file).resolve().is_relative_to(DOCS)]
    assert outside == [], "write these as `code`: the site has only what is in docs/"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_and_tables_stand_apart(page: Path) -> None:
    """GitHub starts a list or a table right below a paragraph, the site only below an empty line."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        starts = re.match(r"(- |1\. |\|)", line) and not re.match(r"\s*(- |\d+\. |\|)|\s{2}|$|#", before)
        assert not starts, f"{name_of(page)}: an empty line is missing above {line!r}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text()) <= 8000


def blocks() -> list[tuple[str, str]]:
    pages = [page for page in PAGES if "decisions" not in page.parts]
    return [
        (f"{name_of(page)}:{number}", block)
        for page in pages
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    ]


@pytest.mark.parametrize("block", [pytest.param(block, id=place) for place, block in blocks()])
def test_examples_name_what_exists(block: str) -> None:
    """They are shortened (`...`, `build_model()`), so they are not run; the examples in examples/ are."""
    compile(block, "example", "exec")
    for line in re.findall(r"^from crossfade\S* import .+$", block, re.MULTILINE):
        exec(line, {})
    for name in re.findall(r"\bcf\.(\w+)", block):
        assert name in crossfade.__all__ or hasattr(crossfade, name)


def test_capabilities_name_tests_and_passes_that_exist() -> None:
    from crossfade.compile.catalogue import known_passes

    page = (DOCS / "capabilities.md").read_text()
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    named = set(re.findall(r"`(test_\w+\.py)`", page))
    assert named and named <= files
    passes = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page))
    assert passes and passes <= set(known_passes())


def test_capabilities_explain_every_id_in_the_name_of_a_test() -> None:
    page = (DOCS / "capabilities.md").read_text()
    rows = set(re.findall(r"^\| ([A-Z]\d+) \|", page, re.MULTILINE))
    used = {
        found
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"^def test_([A-Z]\d+)_", path.read_text(), re.MULTILINE)
    }
    assert used <= rows


@pytest.mark.parametrize("page", ["where_to_change.md", "capabilities.md"])
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:\w+/)+[\w*]*(?:\.py)?)`", (DOCS / page).read_text())
    assert named
    assert [name for name in named if not list((ROOT / "crossfade").glob(name.removeprefix("crossfade/") or "*"))] == []


def test_architecture_has_every_room() -> None:
    page = (DOCS / "architecture.md").read_text()
    rooms = {path.name for path in (ROOT / "crossfade").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert [room for room in sorted(rooms) if f"| `{room}/` |" not in page] == []
