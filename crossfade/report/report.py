"""Report: what became of each collective, for the terminal, for machines (JSON) and for people (HTML)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

from crossfade.errors import CrossfadeError
from crossfade.files.plain import read_text
from crossfade.report.compare import Comparison
from crossfade.report.data import PassVerdict, ReportData, Table, VerdictGroup
from crossfade.report.json_text import dump, load
from crossfade.report.page import render_page
from crossfade.report.terminal import show
from crossfade.report.trace import dump_trace

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PassVerdict", "Report", "Table", "VerdictGroup"]


class Report(ReportData):
    """A report's data, and the ways to print, save and read it."""

    def show(self, console: Console | None = None, *, all: bool = False) -> None:
        """Print what counts on the terminal, on at most 25 lines; with `all`, every table.

        >>> from rich.console import Console
        >>> Report("step", facts={"mesh": "dp=2"}).show(Console(width=70))
        ──────────────────────────────── step ────────────────────────────────
        collectives  0 (0 B) became 0 (0 B)
        step         not timed: step.profile(batch) measures it, a machine
                     predicts it
        """
        show(self, console, all=all)

    def to_json(self, path: str | Path | None = None) -> str:
        """The whole report as JSON, also written to `path` if one is given; `from_json` reads it back.

        >>> report = Report("step", facts={"mesh": "dp=2"})
        >>> Report.from_json(report.to_json()) == report
        True
        """
        text = dump(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Self:
        """A report from JSON text, or from the file at a `Path`.

        >>> Report.from_json('{"format": 0}')
        Traceback (most recent call last):
        crossfade.errors.CrossfadeError: text is JSON of report format 0: expected format 1...
        """
        if isinstance(source, Path):
            return load(cls, read_text(source, CrossfadeError, "give a file that Report.to_json wrote"), str(source))
        return load(cls, source)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained page and return where it is.

        >>> import tempfile
        >>> page = Report("step").to_html(tempfile.mkdtemp() + "/report.html")
        >>> "<title>step" in page.read_text()
        True
        """
        target = Path(path)
        target.write_text(render_page(self), encoding="utf-8", errors="xmlcharrefreplace")
        return target

    def compared_with(self, after: ReportData) -> Comparison:
        """What differs between this report and a later one, or one of another machine; see `Comparison`.

        >>> Report("step").compared_with(Report("step")).tables
        ()
        """
        return Comparison(self, after)

    def to_trace(self, path: str | Path) -> Path:
        """Write the timelines as a trace that Perfetto and chrome://tracing open, and return where it is.

        >>> Report("step").to_trace("trace.json")
        Traceback (most recent call last):
        crossfade.errors.CrossfadeError: the report has no timeline...
        """
        target = Path(path)
        target.write_text(dump_trace(self), encoding="utf-8")
        return target
