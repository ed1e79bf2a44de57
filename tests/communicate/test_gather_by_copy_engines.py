"""Gathers that matmuls hide go by copy engines; each of the others says why not."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from crossfade.communicate.gather_by_copy_engines import GatherByCopyEngines
from crossfade.compile import pipeline
from crossfade.compile.catalogue import default_passes
from crossfade.compile.training_phases import TRAINING
from crossfade.cost.machine import Machine
from crossfade.cost.network import Network, Wire
from crossfade.cost.presets import preset
from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render

GROUPS = {"dp": 2, "tp": 2}
SMALL = GatherByCopyEngines(least_mb=1e-6)
GATHER = 'c10d.all_gather_into_tensor(w, 2, "dp")'
CARRIED = "s: replaced: copy engines carry it, and leave the processors to the matmuls beside it"
USUAL = """
x: f32[4, 4] = input("x")
w: f32[4, 4] = parameter("w")
s: f32[8, 4] = {gather}
mm: f32[4, 4] = aten.mm(x, x)
g: f32[8, 4] = c10d.wait_tensor(s)
return output("y", mm), output("g", g)
""".strip()


def done(text: str, with_pass: GatherByCopyEngines = SMALL, machine: Machine | None = None) -> Program:
    context = {} if machine is None else {"machine": machine}
    return run_passes(parse(textwrap.dedent(text), groups=GROUPS), [with_pass], context=context)


def verdicts(text: str, with_pass: GatherByCopyEngines = SMALL, machine: Machine | None = None) -> list[str]:
    return [str(verdict) for verdict in done(text, with_pass, machine).history[0].verdicts]


def test_a_hidden_gather_is_carried_under_its_name_and_no_other_line_changes():
    before = USUAL.format(gather=GATHER)
    after = done(before)
    assert render(after) == USUAL.format(gather='crossfade.all_gather_by_copy_engines(w, 2, "dp")')
    assert [str(verdict) for verdict in after.history[0].verdicts] == [CARRIED]
    assert after.history[0].counts == {"replaced": 1, "left": 0}
    again = run_passes(after, [SMALL])
    assert [verdict.reason for verdict in again.history[-1].verdicts] == ["copy engines carry it already"]
    assert not again.history[-1].changed


CASES = {
    "of another group": (
        USUAL.format(gather='c10d.all_gather_into_tensor(w, 2, "tp")'),
        ["s: left alone: its group is not named as one with symmetric memory"],
    ),
    "into memory that is given": (
        """
        x: f32[4, 4] = input("x")
        w: f32[4, 4] = parameter("w")
        e: f32[8, 4] = aten.empty.memory_format([8, 4], dtype=f32, device=device("cpu"))
        s: f32[8, 4] = c10d.all_gather_into_tensor_out(w, 2, "dp", out=e)
        mm: f32[4, 4] = aten.mm(x, x)
        g: f32[8, 4] = c10d.wait_tensor(s)
        return output("y", mm), output("g", g)
        """,
        ["s: left alone: only a gather of one tensor into memory of its own goes by copy engines"],
    ),
    "of several tensors": (
        """
        x: f32[4, 4] = input("x")
        s: (f32[8, 4], f32[8, 4]) = c10d.all_gather_into_tensor_coalesced([x, x], 2, "dp")
        a: f32[8, 4] = s[0]
        b: f32[8, 4] = s[1]
        mm: f32[4, 4] = aten.mm(x, x)
        v: f32[8, 4] = c10d.wait_tensor(a)
        w: f32[8, 4] = c10d.wait_tensor(b)
        return output("y", mm), output("v", v), output("w", w)
        """,
        ["s: left alone: only a gather of one tensor into memory of its own goes by copy engines"],
    ),
    "of a size that is a symbol": (
        """
        x: f32[4, 4] = input("x")
        w: f32[s0, 4] = input("w")
        s: f32[2*s0, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
        mm: f32[4, 4] = aten.mm(x, x)
        g: f32[2*s0, 4] = c10d.wait_tensor(s)
        return output("y", mm), output("g", g)
        """,
        ["s: left alone: its size is not known before it runs, nor how much symmetric memory it takes"],
    ),
    "with nothing but small operators beside it": (
        USUAL.format(gather=GATHER).replace("aten.mm(x, x)", "aten.mul.Tensor(x, x)"),
        ["s: left alone: no matmul runs beside it: a plain gather is quicker"],
    ),
    "with a matmul before it and one behind it only": (
        """
        x: f32[4, 4] = input("x")
        a: f32[4, 4] = aten.mm(x, x)
        s: f32[8, 4] = c10d.all_gather_into_tensor(a, 2, "dp")
        g: f32[8, 4] = c10d.wait_tensor(s)
        y: f32[8, 4] = aten.mm(g, x)
        return output("y", y)
        """,
        ["s: left alone: no matmul runs beside it: a plain gather is quicker"],
    ),
    "beside a collective of another group that was started before": (
        """
        x: f32[4, 4] = input("x")
        w: f32[4, 4] = parameter("w")
        r: f32[4, 4] = c10d.all_reduce(x, "sum", "tp")
        s: f32[8, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
        q: f32[4, 4] = c10d.wait_tensor(r)
        mm: f32[4, 4] = aten.mm(x, q)
        g: f32[8, 4] = c10d.wait_tensor(s)
        return output("y", mm), output("g", g)
        """,
        ["s: left alone: collectives of other groups travel beside it, over the same links"],
    ),
    "after one of another group, and beside one of its own": (
        """
        x: f32[4, 4] = input("x")
        w: f32[4, 4] = parameter("w")
        r: f32[4, 4] = c10d.all_reduce(x, "sum", "tp")
        q: f32[4, 4] = c10d.wait_tensor(r)
        s: f32[8, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
        t: f32[2, 4] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        mm: f32[4, 4] = aten.mm(x, q)
        u: f32[2, 4] = c10d.wait_tensor(t)
        g: f32[8, 4] = c10d.wait_tensor(s)
        return output("y", mm), output("g", g), output("u", u)
        """,
        [CARRIED],
    ),
    "along a group whose products use symmetric memory": (
        """
        x: f32[4, 4] = input("x")
        w: f32[4, 4] = parameter("w")
        s: f32[8, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
        mm: f32[4, 4] = aten.mm(x, x)
        g: f32[8, 4] = c10d.wait_tensor(s)
        p = crossfade.gather_matmul(x, [w], [None], [], ["ab,bc->ac"], 0, 2, "symmetric", 1, False, "dp")
        y: f32[8, 4] = p[0]
        return output("y", y), output("m", mm), output("g", g)
        """,
        ["s: left alone: products along its group use the same symmetric memory"],
    ),
    "along a group whose products travel in pieces": (
        """
        x: f32[4, 4] = input("x")
        w: f32[4, 4] = parameter("w")
        s: f32[8, 4] = c10d.all_gather_into_tensor(w, 2, "dp")
        mm: f32[4, 4] = aten.mm(x, x)
        g: f32[8, 4] = c10d.wait_tensor(s)
        p = crossfade.gather_matmul(x, [w], [None], [], ["ab,bc->ac"], 0, 2, "ring", 1, False, "dp")
        y: f32[8, 4] = p[0]
        return output("y", y), output("m", mm), output("g", g)
        """,
        [CARRIED],
    ),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_a_gather(text: str, expected: list[str]):
    assert verdicts(text) == expected


def test_a_gather_of_few_bytes_stays():
    text = USUAL.format(gather=GATHER)
    said = "s: left alone: it is too small to make all ranks wait twice: 0.00 MB of each rank"
    assert verdicts(text, GatherByCopyEngines()) == [said]
    exactly = 64 / 2**20
    assert verdicts(text, GatherByCopyEngines(least_mb=exactly)) == [CARRIED]
    assert verdicts(text, GatherByCopyEngines(least_mb=exactly * 1.01)) == [said]


@pytest.mark.parametrize(
    ("per_node", "expected"),
    [(2, CARRIED), (1, "s: left alone: its group spans nodes: 2 ranks, 1 in a node")],
)
def test_a_group_that_spans_nodes(per_node: int, expected: str):
    wire = Wire(1e-6, 1e11)
    machine = replace(preset("h100-nvlink-node"), network=Network(per_node, wire, wire))
    assert verdicts(USUAL.format(gather=GATHER), machine=machine) == [expected]


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(PassError, match="expected a number more than 0"):
        GatherByCopyEngines(least_mb=0)


def test_it_runs_on_request_only():
    assert GatherByCopyEngines.name not in default_passes()
    assert TRAINING.before_pass("pack-in-place", SMALL).changes() == [f"{SMALL.spelling} before pack-in-place"]
    asked = [*pipeline.optimization({"dp": "nccl"}), SMALL]
    after = run_passes(parse(USUAL.format(gather=GATHER), groups=GROUPS), asked)
    assert [found.by_copy_engines for found in collectives.find(after.graph)] == [True]
