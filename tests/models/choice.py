"""Which real models run in every test run, and which only in `make models`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

OFTEN = frozenset({"llama", "gpt2", "phi3", "falcon", "mixtral", "gpt_oss", "bert", "t5", "vit"})
"""One architecture of each kind."""


def some(cases: Iterable[Any], often: Collection[str] = OFTEN) -> list[Any]:
    """Parameters of a test whose first, or only, value is an architecture's name; most marked for `make models`."""
    chosen = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if values[0] in often else (pytest.mark.models,)
        chosen.append(pytest.param(*values, marks=marks))
    return chosen
