"""The line that says how far a compilation is: on the first rank only, after a while, gone at the end."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from crossfade import Ranks, compile_step
from crossfade.compile import progress
from crossfade.compile.progress import Progress, is_wanted


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_said_of_what_is_soon_done() -> None:
    stream = Terminal()
    with Progress(stream, patience=30.0) as shown:
        shown.phase("capture")
    assert stream.getvalue() == ""


def test_the_phase_and_the_time_are_shown_and_cleared_also_after_an_error() -> None:
    stream = Terminal()
    with pytest.raises(ZeroDivisionError), Progress(stream, what="preparing", patience=0.0, every=0.01) as shown:
        for name in ("capture", "schedule"):
            shown.phase(name)
            time.sleep(0.3)
        1 / 0  # noqa: B018
    text = stream.getvalue()
    assert "crossfade: preparing: capture, 0 s" in text and "preparing: schedule, " in text
    assert text.endswith("\r\x1b[K") and "\n" not in text


def test_only_the_first_rank_on_a_terminal_wants_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSFADE_PROGRESS", raising=False)
    assert is_wanted(0, Terminal()) and not is_wanted(1, Terminal()) and not is_wanted(0, io.StringIO())
    monkeypatch.setenv("CROSSFADE_PROGRESS", "1")
    assert is_wanted(0, io.StringIO()) and not is_wanted(1, io.StringIO())
    monkeypatch.setenv("CROSSFADE_PROGRESS", "0")
    assert not is_wanted(0, Terminal())


def test_of_two_ranks_one_shows_its_phases(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(said_while_compiling)
    assert "crossfade: preparing a step of Linear" in first and first.endswith("\r\x1b[K")
    assert second == ""


def said_while_compiling() -> str:
    """What a rank writes to stderr while it compiles, if it does not wait."""
    stream, before = io.StringIO(), (sys.stderr, progress.PATIENCE)
    os.environ["CROSSFADE_PROGRESS"] = "1"
    sys.stderr, progress.PATIENCE = stream, 0.0
    try:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), {"dp": 2})
        step.prepare(torch.ones(4, 2), torch.ones(4, 1))
        step.close()
    finally:
        sys.stderr, progress.PATIENCE = before
        del os.environ["CROSSFADE_PROGRESS"]
    return stream.getvalue()
