"""Pipelines are changed by name, inside passes that hold others too, and refuse names that are not there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from crossfade.errors import PassError
from crossfade.graph.passes import Numerics, Pass, PassResult, run_passes
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.program import Program
from crossfade.graph.text import parse


@dataclass(frozen=True)
class Simple(Pass):
    """Does nothing."""

    numerics = Numerics.BITWISE
    size: int = 1

    def run(self, program: Program) -> PassResult:
        return PassResult(False)


@dataclass(frozen=True)
class One(Simple):
    """The first."""

    name = "pass-one"
    provides = frozenset({"one"})


@dataclass(frozen=True)
class Two(Simple):
    """The second."""

    name = "pass-two"
    requires = frozenset({"one"})


@dataclass(frozen=True)
class Three(Simple):
    """The third."""

    name = "pass-three"


@dataclass(frozen=True)
class Several(Simple):
    """Holds others."""

    name = "several-passes"
    passes: tuple[Pass, ...] = (Two(), Three())


PIPELINE = Pipeline([One(), Several()])


def test_a_pipeline_is_a_sequence():
    assert list(PIPELINE) == [One(), Several()] and len(PIPELINE) == 2
    assert PIPELINE[0] == One() and PIPELINE[1:] == Pipeline([Several()])
    more = [Three()]
    assert PIPELINE + more == Pipeline([One(), Several(), Three()])
    assert more + PIPELINE == Pipeline([Three(), One(), Several()])
    assert hash(PIPELINE) == hash(Pipeline([One(), Several()]))
    assert PIPELINE.names() == ["pass-one", "several-passes", "pass-two", "pass-three"]


def test_it_prints_one_pass_a_line():
    pipeline = Pipeline([One(size=3), Several(passes=(Two(2),))])
    assert repr(pipeline) == "pass-one(size=3)\nseveral-passes(passes=('pass-two(size=2)',))"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (PIPELINE.without("pass-one"), [Several()]),
        (PIPELINE.without(One, "pass-two"), [Several(passes=(Three(),))]),
        (PIPELINE.without("pass-two", "pass-three"), [One()]),
        (PIPELINE.without("several-passes"), [One()]),
        (Pipeline([One(), Three(), One(2)]).without("pass-one"), [Three()]),
        (PIPELINE.without(), [One(), Several()]),
        (PIPELINE.before("pass-one", Three(7), Three(8)), [Three(7), Three(8), One(), Several()]),
        (PIPELINE.before("pass-three", One(7)), [One(), Several(passes=(Two(), One(7), Three()))]),
        (PIPELINE.after("pass-one", Three(7), Three(8)), [One(), Three(7), Three(8), Several()]),
        (PIPELINE.after("pass-three", One(7)), [One(), Several(passes=(Two(), Three(), One(7)))]),
        (PIPELINE.replace("pass-one", One(9)), [One(9), Several()]),
        (PIPELINE.replace(Two, Two(9)), [One(), Several(passes=(Two(9), Three()))]),
        (Pipeline([Several(passes=())]).without(), [Several(passes=())]),
    ],
)
def test_changes_make_another_pipeline(changed: Pipeline, expected: list[Pass]):
    assert list(changed) == expected
    assert list(PIPELINE) == [One(), Several()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: PIPELINE.without("pass-tow"),
            "the pass 'pass-tow': expected one of: pass-one, several-passes, pass-two, pass-three. "
            "Remedy: did you mean pass-two or pass-one or pass-three.",
        ),
        (
            lambda: PIPELINE.replace("zzz", One()),
            "the pass 'zzz': expected one of: pass-one, several-passes, pass-two, pass-three. "
            "Remedy: use one of these names.",
        ),
        (lambda: Pipeline().before(One, Two()), "the pass 'pass-one': expected one of: none. Remedy: "),
        (
            lambda: Pipeline([One(), One(2)]).before("pass-one", Three()),
            "the pass 'pass-one' at 2 places: expected one place to add passes at. "
            "Remedy: name a pass that occurs once, or build the pipeline from a list.",
        ),
        (lambda: Pipeline([Two(), Several()]).after(Two, Three()), "the pass 'pass-two' at 2 places"),
    ],
)
def test_refusals(change, message: str):
    with pytest.raises(PassError) as caught:
        change()
    assert str(caught.value).startswith(message)


def test_requirements_are_checked_when_it_runs():
    program = parse('x: f32[2] = input("x")\nreturn output("x", x)')
    pipeline = Pipeline([Two()])
    with pytest.raises(PassError, match="where one does not hold yet"):
        run_passes(program, pipeline)
    assert len(run_passes(program, pipeline.before(Two, One())).history) == 2
