"""A pass, its report, and ways to see it, for the tests of reports."""

from __future__ import annotations

import base64
import io
import json
import re
import zlib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassRecord, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.report.report import Report

TWO_REDUCES = """
a: f32[4] = input("a")
b: f32[8] = input("b")
used: f32[4] = c10d.all_reduce(a, "sum", "dp")
unused: f32[8] = c10d.all_reduce(b, "sum", "dp")
done: f32[4] = c10d.wait_tensor(used)
return output("y", done)
"""


@dataclass(frozen=True)
class RemoveUnusedCollectives(Pass):
    """Removes the collectives that nothing waits for, and says of the others why they stay."""

    name: ClassVar[str] = "remove-unused-collectives"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        verdicts = []
        for collective in collectives.find(program.graph):
            if collective.waits:
                verdicts.append(Verdict.of(collective.node, Outcome.LEFT, "its result is used", bytes=collective.bytes))
            else:
                verdicts.append(
                    Verdict.of(collective.node, Outcome.REMOVED, "nothing waits for it", bytes=collective.bytes)
                )
                program.graph.erase_node(collective.node)
        removed = sum(verdict.outcome is Outcome.REMOVED for verdict in verdicts)
        return PassResult(removed > 0, {"removed": removed}, tuple(verdicts))


def record(
    *verdicts: Verdict, name: str = "some-pass", changed: bool = False, looking: float = 0.0, **texts: str
) -> PassRecord:
    return PassRecord(name, name, "bitwise", 0.001, changed, {}, verdicts, 3, 3, looking=looking, **texts)


def shown(report: Report, width: int = 100, *, all: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(console, all=all)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def packed_texts(html: str) -> dict[str, Any]:
    """What the page's script unpacks, by its element's name."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', html)
    return {name: json.loads(zlib.decompress(base64.b64decode(text))) for name, text in found}


def written(report: Report, folder: Path) -> str:
    return report.to_html(folder / "report.html").read_text(encoding="utf-8")


class Outline(HTMLParser):
    """The tags of a page in order, those left open, and its text."""

    VOID = frozenset({"meta", "input", "link", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)
