"""Every pass is what it says: its docstring's program before becomes the one after, and its declaration is complete."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import textwrap

import pytest

import crossfade
from crossfade.compile.catalogue import known_passes
from crossfade.graph.passes import Numerics, Pass, run_passes
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.schedule.arrange_nodes import ArrangeNodes
from crossfade.schedule.offload_values import OffloadValues
from crossfade.schedule.recompute_values import RecomputeValues
from crossfade.shard.batch_dims import BATCH_DIMS
from crossfade.shard.loss_parts import COUNT, NLL_BACKWARD

for found in pkgutil.walk_packages(crossfade.__path__, "crossfade."):
    if not found.name.endswith("_triton"):
        importlib.import_module(found.name)

PASSES = list(known_passes().values())
WITHOUT_EXAMPLE: set[str] = set()
"""Passes whose example would be too long to read. Keep this short."""

GIVEN: dict[str, Pass] = {
    "arrange-nodes": ArrangeNodes(("x..s", "exp", "d..neg", "output")),
    "offload-values": OffloadValues(("exp@neg@sum_1",)),
    "recompute-values": RecomputeValues(("exp@mul",)),
}
"""Passes that do nothing unless they are told what."""

IN_PLACE = {"update-in-place", "pack-in-place"}
"""Their results write memory: metadata says what was there before, so it is not recomputed."""


def section(text: str, title: str) -> str:
    """The program below a heading of a docstring."""
    body = text.split(f"{title}:\n", 1)[1]
    lines = []
    for line in body.splitlines():
        if line.strip() and not line.startswith(" " * 4):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


def example(one: type[Pass]) -> tuple[str, str]:
    text = textwrap.dedent("    " + (one.__doc__ or ""))
    return section(text, "Before"), section(text, "After")


def test_all_passes_are_seen():
    assert len(PASSES) >= 12
    assert {one.name for one in PASSES} >= WITHOUT_EXAMPLE


@pytest.mark.parametrize("one", [p for p in PASSES if p.name not in WITHOUT_EXAMPLE], ids=lambda one: one.name)
def test_example_is_what_the_pass_does(one: type[Pass]):
    before, after = example(one)
    groups = {next((axis for axis in ("tp", "ep") if f'"{axis}"' in before + after), "dp"): 2}
    program = parse(before, groups=groups)
    assert render(program) == before
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = (0,)
        if node.target in NLL_BACKWARD:
            node.meta[COUNT] = (0, 1)
    program.facts |= one.requires
    done = run_passes(program, [GIVEN.get(one.name) or one()])
    assert render(done) == after
    assert after != before
    verify(done, recompute=one.name not in IN_PLACE)
    assert done.history[0].changed
    again = parse(after, groups=groups)
    assert render(again) == after


@pytest.mark.parametrize("one", PASSES, ids=lambda one: one.name)
def test_declaration_is_complete(one: type[Pass]):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", one.name)
    assert [other for other in PASSES if other.name == one.name] == [one]
    assert isinstance(one.__dict__["numerics"], Numerics)
    assert dataclasses.is_dataclass(one)
    assert "__dataclass_params__" in one.__dict__ and one.__dict__["__dataclass_params__"].frozen
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(one))
    assert one() == one() and hash(one()) == hash(one())
    assert one().spelling == one.name
    assert one.__module__.rsplit(".", 1)[1] == one.name.replace("-", "_"), "one pass, one file of its name"
