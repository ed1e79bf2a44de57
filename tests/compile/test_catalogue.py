"""Every pass spells its options so that they parse back: on the command line, in reports, as a cache key."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest

from crossfade.compile.catalogue import known_passes, pass_from_spelling
from crossfade.compile.pipeline import communication, optimization, simplification
from crossfade.compile.training_phases import TRAINING
from crossfade.cost.presets import preset
from crossfade.graph.passes import Pass, option_fields
from crossfade.schedule.overlap_communication import OverlapCommunication

PASSES = sorted(known_passes().items())


def other_value(kind: Any, default: Any) -> Any:
    """A value of an option's type that is not its default; the default itself where only a function would do."""
    if isinstance(default, bool):
        return not default
    known = [word for part in get_args(kind) for word in (part, *get_args(part))]
    words = [word for word in known if isinstance(word, str) and word != default]
    if words:
        return words[0]
    match default:
        case str():
            return f"{default} and more"
        case float():
            return 3.0 if math.isinf(default) else math.inf
        case int():
            return default + 1
        case tuple() if default and isinstance(default[0], Pass):
            return default[:1]
        case tuple():
            return (*default, "w.0") if "str" in str(kind) and "tuple[tuple" not in str(kind) else (("tp", 1),)
    return 7 if "int" in str(kind) else ("w",)


@pytest.mark.parametrize(("name", "kind"), PASSES, ids=[name for name, _ in PASSES])
def test_spellings_parse_back(name: str, kind: type[Pass]) -> None:
    types = get_type_hints(kind)
    assert pass_from_spelling(kind().spelling) == kind()
    for option in option_fields(kind):
        changed = kind(**{option.name: _fitting(name, option.name, other_value(types[option.name], option.default))})
        assert pass_from_spelling(changed.spelling) == changed, changed.spelling


def _fitting(name: str, option: str, value: Any) -> Any:
    """What the pass itself does not refuse."""
    known = {"form": "ring", "chunks": 4, "forms": (("tp", ("ring",)),), "mode": "concat", "along": (("tp", 0.5, 4.0),)}
    known |= {"pieces": (3,)}
    return known.get(option, value)


def test_what_the_runner_knows_is_no_option() -> None:
    planned = OverlapCommunication(preset("h200-nvlink-node"), measured={"aten.mm": 1.0})
    assert planned.spelling == "overlap-communication"
    assert pass_from_spelling("overlap-communication(memory_limit=9)") == OverlapCommunication(memory_limit=9)


def test_whole_pipelines_parse_back() -> None:
    for pipeline in (
        simplification(matmuls=True),
        communication(),
        optimization({"dp": "gloo"}, preset("loopback-gloo")),
    ):
        assert [pass_from_spelling(spelling) for spelling in repr(pipeline).splitlines()] == list(pipeline)
    assert len(TRAINING.names()) == len(set(TRAINING.names()))
