"""Forecasts as one HTML page: what a step is made of, and curves to hover over; nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from crossfade.forecast.forecast import Forecast
from crossfade.forecast.sweeps import Point, row

_TEMPLATE = Path(__file__).parent / "page.html"
_MOST_SPANS = 4000


def write_page(path: Path, forecasts: Sequence[Forecast], points: Sequence[Point] = (), over: str = "") -> Path:
    """Write the page; a folder gets an index.html."""
    path = path / "index.html" if path.suffix != ".html" else path
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = {
        "forecasts": [{"text": str(each), **each.to_dict(), "timeline": timeline(each)} for each in forecasts],
        "points": [row(point) for point in points],
        "over": over,
    }
    data = json.dumps(shown).replace("</", "<\\/")
    title = html.escape(", ".join(dict.fromkeys(each.model for each in forecasts)) or "forecast")
    path.write_text(_TEMPLATE.read_text().replace("{{title}}", title).replace("{{data}}", data))
    return path


def timeline(found: Forecast) -> list[tuple[str, str, float, float]]:
    """Spans as lane, name, start and end in seconds; neighbours on the computing lane are put together."""
    spans: list[tuple[str, str, float, float]] = []
    total = found.timeline.seconds or 1.0
    for each in found.timeline.computation:
        if spans and each.start - spans[-1][3] < 1e-3 * total / 10 and spans[-1][3] - spans[-1][2] < total / 400:
            spans[-1] = ("compute", spans[-1][1], spans[-1][2], each.finish)
        else:
            spans.append(("compute", each.name, each.start, each.finish))
    spans += [(t.group, f"{t.kind} {t.bytes:,} bytes", t.start, t.finish) for t in found.timeline.communication]
    return spans[:_MOST_SPANS]
