"""What a user expects, in each of its forms, and forms that cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Outcome, Verdict
from crossfade.report.expect import DEFAULT, Expect, Like

FORMS = {
    "exposed<=5ms bucketed:gradients no-gather:weights": Expect(
        exposed_ms=5, bucketed="gradients", no_gather="weights"
    ),
    "collectives<=12 sent<=1.5MB no-left:sink-waits no-left:raise-launches rules bitwise no-remedies": Expect(
        collectives=12,
        megabytes=1.5,
        no_left=("sink-waits", "raise-launches"),
        rules=True,
        bitwise=True,
        no_remedies=True,
    ),
    "'no:sink-waits/left*/its result is needed*/model.py*'": Expect(
        no=(Like("sink-waits", "left*", "its result is needed*", "model.py*"),)
    ),
}


@pytest.mark.parametrize("text", FORMS)
def test_every_form_means_the_same(text: str) -> None:
    expect = FORMS[text]
    assert str(expect) == text.replace("/*'", "'")
    assert Expect.of(text) == Expect.of(expect) == expect
    fields = {name: value for name, value in vars(expect).items() if value not in (None, (), False)}
    fields |= {"no": [str(like) for like in expect.no]} if expect.no else {}
    assert Expect.of(json.loads(json.dumps(fields))) == expect
    assert Expect.of(True) is DEFAULT and Expect.of(None) is None


@pytest.mark.parametrize(
    "given", ["exposed<=5", "exposed<=1.2.3ms", "bucketed", "nothing", "no:a/b/c/d/e", "'open", {"exposed": 5}, 7,
              {"exposed_ms": -1}, {"no": {"reson": "x"}}, {"exposed_ms": "5"}]
)  # fmt: skip
def test_what_cannot_be_read_is_refused(given: Any) -> None:
    with pytest.raises(CrossfadeError, match="strict"):
        Expect.of(given)


@pytest.mark.parametrize(
    ("like", "matches"),
    [("*", True), ("sink-*/moved", True), ("sink-waits/left*", False), ("*/*/needed*", True), ("*/*/*/m.py*", False)],
)
def test_verdicts_match_by_every_part(like: str, matches: bool) -> None:
    verdict = Verdict("w", Outcome.MOVED, "needed later", source="model.py:7")
    assert Like.of(like).matches("sink-waits", verdict) is matches
