"""Buckets of the modules that the user names, in the user's names; a name that nothing has is refused."""

from __future__ import annotations

import pytest

from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.named_modules import NamedModules
from crossfade.compile.catalogue import pass_from_spelling
from crossfade.errors import PassError
from crossfade.graph.collectives import find
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse

NAMES = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "norm", "head", "extra", "more"]


def gathered() -> Program:
    """A gather of each weight, as FSDP has them."""
    lines = ['x: f32[4, 4] = input("x")']
    lines += [f'p{i}: f32[2, 4] = parameter("{name}.weight")' for i, name in enumerate(NAMES)]
    for i in range(len(NAMES)):
        lines.append(f'g{i}: f32[4, 4] = c10d.all_gather_into_tensor(p{i}, 2, "dp")')
        lines.append(f"w{i}: f32[4, 4] = c10d.wait_tensor(g{i})")
    last = "x"
    for i in range(len(NAMES)):
        lines.append(f"m{i}: f32[4, 4] = aten.mm({last}, w{i})")
        last = f"m{i}"
    return parse("\n".join([*lines, f'return output("y", {last})']), groups={"dp": 2})


@pytest.mark.parametrize(
    ("grouping", "buckets"),
    [
        ("any", [("g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7")]),
        (("layers.*", ("norm", "head")), [("g0", "g1"), ("g2", "g3"), ("g4", "g5"), ("g6", "g7")]),
        (("layers",), [("g0", "g1", "g2", "g3"), ("g4", "g5", "g6", "g7")]),
        (("layers.1", "layers.*"), [("g0", "g1"), ("g2", "g3"), ("g4", "g5", "g6", "g7")]),
        ((("layers.*.up", "head"),), [("g0", "g2", "g5"), ("g1", "g3", "g4", "g6", "g7")]),
    ],
)
def test_buckets(grouping, buckets) -> None:
    plan = BucketAllGathers(grouping=grouping, keeps_overlap=False).plan(gathered())
    assert sorted(bucket.members for bucket in plan.buckets) == sorted(buckets)


def test_what_is_alone_in_its_module_is_told_so() -> None:
    done = run_passes(gathered(), [BucketAllGathers(grouping=("norm", "layers", ("extra", "more", "head")))])
    told = {verdict.subject: verdict.reason for verdict in done.history[0].verdicts if verdict.outcome is Outcome.LEFT}
    assert told == {"g4": "it is the only one of its group, dtype and reduction that serves its module"}


@pytest.mark.parametrize("name", ["layer.*", "layers.*.gate", "lay"])
def test_a_module_that_is_not_there_is_refused(name: str) -> None:
    message = (
        rf"grouping names the module '{name}'.*Expected modules of the program, such as .*Remedy: correct the name"
    )
    with pytest.raises(PassError, match="(?i)" + message.replace(".*'", r"\.\*'").replace("layer.", r"layer\.")):
        BucketAllGathers(grouping=(name,)).plan(gathered())


def test_what_a_gradient_is_made_for_says_its_module() -> None:
    text = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    wa: f32[4] = c10d.wait_tensor(a)
    b: f32[4] = c10d.all_reduce(y, "sum", "dp")
    wb: f32[4] = c10d.wait_tensor(b)
    return output("a", wa), output("b", wb)
    """.replace("    ", "")
    program = parse(text, groups={"dp": 2})
    assert len(BucketAllReduces().plan(program).buckets) == 1
    for collective, name in zip(find(program.graph), ["up.weight", "down.weight"], strict=True):
        collective.node.meta["made_for"] = name
    assert BucketAllReduces(grouping=("up", "down")).plan(program).buckets == ()


def test_the_option_is_spelled_and_read_back() -> None:
    chosen = BucketAllReduces(grouping=("layers.*", ("norm", "head")))
    assert chosen.spelling == "bucket-all-reduces(grouping=('layers.*',('norm','head')))"
    assert pass_from_spelling(chosen.spelling) == chosen


def test_stars_stand_for_one_part() -> None:
    named = NamedModules(("a.*.c",))
    assert named.holding("a.b.c.weight") is not None
    assert named.holding("a.b.b.c.weight") is None and named.holding("a.b.cd") is None
