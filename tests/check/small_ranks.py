"""Small programs of ranks, written in a shorthand: what they start and wait for, in order."""

from __future__ import annotations

import pytest

from crossfade.graph import collectives
from crossfade.graph.program import Program
from crossfade.graph.sources import parse_with_sources

CALLS = {
    "reduce": 'c10d.all_reduce(x{size}, "{op}", "{group}")',
    "gather": 'c10d.all_gather_into_tensor(x{size}, 2, "{group}")',
    "scatter": 'c10d.reduce_scatter_tensor(x{size}, "{op}", 2, "{group}")',
    "broadcast": 'c10d.broadcast(x{size}, {op}, "{group}")',
    "exchange": 'c10d.all_to_all_single(x{size}, {op}, "{group}")',
    "send": 'c10d.isend(x{size}, {op}, "{group}")',
    "recv": 'c10d.irecv(x{size}, {op}, "{group}")',
}


def program(*events: str) -> Program:
    """A program of events like `reduce a dp sum 4` (start `a` on group dp, reduced by sum, of 4 elements) or `wait a`.

    Names that are never waited for are not: such programs are checked, not run.
    """
    sends = any(word in event for event in events for word in ("send ", "recv ", "p2p"))
    if sends and not collectives.HAS_MESSAGES:
        pytest.skip("this torch has no operators for messages")
    return parse_with_sources(text(*events))


def text(*events: str) -> str:
    """The program's text; each line says as its source where it stands among the events."""
    sizes = sorted({event.split()[-1] for event in events if not event.startswith(("wait", "raw"))})
    lines = [f'x{size}: f32[{size}] = input("x{size}")' for size in sizes]
    for number, event in enumerate(events, 1):
        lines.append(f"{_line(event)}  # m.py:{number}")
    return "\n".join([*lines, "return"])


def _line(event: str) -> str:
    kind, name, *rest = event.split()
    if kind == "raw":
        return event.removeprefix("raw ")
    if kind == "wait":
        return f"{name}_done = c10d.wait_tensor({name})"
    group, *middle, size = rest
    op = " ".join(middle)
    return f"{name} = " + CALLS[kind].format(size=size, op=op, group=group)
