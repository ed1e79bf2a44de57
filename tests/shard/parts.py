"""What the tests of parameters in parts share."""

from __future__ import annotations

import textwrap

from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify


def after(text: str, *passes: Pass) -> tuple[list[str], Program]:
    """The lines of a program after some passes, and the program."""
    program = parse(textwrap.dedent(text), groups={"dp": 2, "dp_replicate": 2})
    program.facts |= frozenset().union(*(step.requires for step in passes))
    done = run_passes(program, list(passes))
    verify(done, recompute=True)
    return render(done).splitlines(), done


def lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip().splitlines()
