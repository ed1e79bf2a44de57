"""Which names code reads: what it writes first, in any case, is no part of it."""

from __future__ import annotations

from typing import Any

import pytest

from crossfade.capture.code_names import names_in


def written_first(self: Any) -> Any:
    self.last = 1
    return self.last + self.scale


def written_sometimes(self: Any, warm: bool) -> Any:
    if warm:
        self.last = 1
    return self.last


def written_elsewhere(self: Any, other: Any) -> Any:
    self.last = 1
    return other.last


def written_then_replaced(self: Any, other: Any) -> Any:
    self.last = 1
    self = other
    return self.last


def written_where_it_may_fail(self: Any) -> Any:
    try:
        self.last = self.scale
    except ValueError:
        self.failed = True
    return self.last


def inside(self: Any) -> Any:
    return [lambda: self.scale for _ in range(2)]


def made_up(self: Any) -> Any:
    return getattr(self, "sc" + "ale")


@pytest.mark.parametrize(
    ("function", "attributes", "computed"),
    [
        (written_first, {"scale"}, False),
        (written_sometimes, {"last"}, False),
        (written_elsewhere, {"last"}, False),
        (written_then_replaced, {"last"}, False),
        (written_where_it_may_fail, {"last", "scale"}, False),
        (inside, {"scale"}, False),
        (made_up, {"scale"}, True),
    ],
)
def test_attributes_that_are_read(function: Any, attributes: set[str], computed: bool) -> None:
    found = names_in(function.__code__)
    assert {name for name in found.attributes if name in ("last", "scale")} == attributes
    assert found.computed is computed
