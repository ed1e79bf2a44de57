"""`crossfade check` on files: exit codes, sources, JSON, spellings of groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfade.commands.cli import app
from crossfade.graph.program import MADE_FOR
from crossfade.graph.sources import parse_with_sources, render_with_sources
from tests.check.small_ranks import text

REDUCED = ("reduce a dp sum 4", "wait a")


def check(folder: Path, texts: list[str], *options: str) -> tuple[int, str]:
    paths = [folder / f"rank{rank}.txt" for rank in range(len(texts))]
    for path, content in zip(paths, texts, strict=True):
        path.write_text(content)
    done = CliRunner().invoke(app, ["check", *map(str, paths), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_what_fits_is_said_and_exits_with_0(tmp_path: Path) -> None:
    said = 0, "1 collective of 1 group on 2 ranks: every wait is met.\n"
    assert check(tmp_path, [text(*REDUCED)] * 2) == said
    assert check(tmp_path, [text(*REDUCED)], "--mesh", "dp=2") == said
    assert check(tmp_path, [text(*REDUCED)] * 2, "--group", "dp=0,1") == said


def test_the_counter_example_has_the_source_or_else_the_line_of_the_file(tmp_path: Path) -> None:
    other = text("reduce a dp max 4", "wait a").replace("  # m.py:1", "")
    code, said = check(tmp_path, [text(*REDUCED), other])
    assert code == 1
    assert "rank 0 starts all_reduce(sum) of f32[4] on dp (node a [m.py:1])" in said
    assert "rank 1 starts all_reduce(max) of f32[4] on dp (node a [rank1.txt:2])" in said


def test_the_result_as_json(tmp_path: Path) -> None:
    code, said = check(tmp_path, [text(*REDUCED), text("reduce a dp max 4", "wait a")], "--json")
    found = json.loads(said)
    assert (code, found["ok"], found["findings"][0]["problem"]) == (1, False, "mismatch")
    assert found["findings"][0]["places"][1]["source"] == "m.py:1"


@pytest.mark.parametrize("name", ["loss.py:3", 'a "quoted" # name', "layers.0.weight"])
def test_sources_are_written_and_read_back(name: str) -> None:
    program = parse_with_sources(text(*REDUCED))
    for node in program.graph.nodes:
        node.meta[MADE_FOR] = name
    again = parse_with_sources(render_with_sources(program), "unused.txt")
    assert {node.meta.get(MADE_FOR) for node in again.graph.nodes if node.op != "output"} == {name}
