"""Schedules of ranks, proved compatible or refuted with exact words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

import crossfade as cf
from crossfade.check.compatible import check_schedules
from crossfade.check.findings import FindingKind
from crossfade.errors import CrossfadeError, MeshError
from crossfade.graph.events import Events, Wait
from crossfade.graph.launches import Launch, TensorType
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.text import parse
from tests.check.small_ranks import program
from tests.growth import grows_linearly

PAIR = {"dp": (0, 1), "tp": (0, 1), "pp": (0, 1)}
DONE = ("reduce a dp sum 4", "wait a")
SWAPPED = ("reduce a dp sum 4", "wait a", "reduce b tp sum 4", "wait b")
TWO = ("reduce a dp sum 4", "reduce b tp sum 4", "wait a", "wait b")
BATCH = 'raw b = c10d.batch_p2p_ops(["isend", "irecv"], [{peer}, {peer}], [0, 0], [x4, x4], "pp")'
BOTH = ("reduce a pp sum 4", "wait a", BATCH, "raw got = b[1]", "wait got")


def with_peer(peer: int, *events: str) -> list[str]:
    return [event.replace("{peer}", str(peer)) for event in events]


# events of rank 0, of rank 1, what is said after the first line; nothing if they fit
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "alike": (DONE, DONE, ""),
    "kinds": (
        DONE,
        ("gather a dp 4", "wait a"),
        "mismatch: different collectives in the 1st collective of dp: "
        "rank 0 starts all_reduce(sum) of f32[4] on dp (node a [m.py:1]); "
        "rank 1 starts all_gather of f32[4] on dp (node a [m.py:1])",
    ),
    "reductions": (
        DONE,
        ("reduce a dp max 4", "wait a"),
        "mismatch: different reductions in the 1st collective of dp: "
        "rank 0 starts all_reduce(sum) of f32[4] on dp (node a [m.py:1]); "
        "rank 1 starts all_reduce(max) of f32[4] on dp (node a [m.py:1])",
    ),
    "sizes": (
        (*DONE, "reduce b dp sum 4", "wait b"),
        (*DONE, "reduce b dp sum 8", "wait b"),
        "mismatch: different sizes in the 2nd collective of dp: "
        "rank 0 starts all_reduce(sum) of f32[4] on dp (node b [m.py:3]); "
        "rank 1 starts all_reduce(sum) of f32[8] on dp (node b [m.py:3])",
    ),
    "dtypes": (
        DONE,
        ('raw x: bf16[4] = input("x")', 'raw a = c10d.all_reduce(x, "sum", "dp")', "wait a"),
        "mismatch: different dtypes in the 1st collective of dp: "
        "rank 0 starts all_reduce(sum) of f32[4] on dp (node a [m.py:1]); "
        "rank 1 starts all_reduce(sum) of bf16[4] on dp (node a [m.py:2])",
    ),
    "roots": (
        ("broadcast a dp 0 4", "wait a"),
        ("broadcast a dp 1 4", "wait a"),
        "mismatch: different roots in the 1st collective of dp: "
        "rank 0 starts broadcast(root 0) of f32[4] on dp (node a [m.py:1]); "
        "rank 1 starts broadcast(root 1) of f32[4] on dp (node a [m.py:1])",
    ),
    "root outside": (
        ("broadcast a dp 2 4", "wait a"),
        ("broadcast a dp 2 4", "wait a"),
        "mismatch: root 2 in a group of 2 ranks: rank 0 starts broadcast(root 2) of f32[4] on dp (node a [m.py:1])",
    ),
    "uneven splits that fit": (
        ("exchange a dp [1, 2], [1, 3] 4", "wait a"),
        ("exchange a dp [3, 1], [2, 1] 3", "wait a"),
        "",
    ),
    "uneven splits": (
        ("exchange a dp [1, 3], [1, 3] 4", "wait a"),
        ("exchange a dp [2, 2], [3, 1] 4", "wait a"),
        "mismatch: different splits (rank 0 sends 3 to rank 1, which expects 2) in the 1st collective of dp: "
        "rank 0 starts all_to_all([1, 3] to, [1, 3] from each rank) of f32[4] on dp (node a [m.py:1]); "
        "rank 1 starts all_to_all([3, 1] to, [2, 2] from each rank) of f32[4] on dp (node a [m.py:1])",
    ),
    "splits that do not add up": (
        ("exchange a dp [1, 2], [1, 2] 4", "wait a"),
        ("exchange a dp [2, 1], [2, 1] 3", "wait a"),
        "mismatch: splits that add up to 3 of 4 rows: "
        "rank 0 starts all_to_all([1, 2] to, [1, 2] from each rank) of f32[4] on dp (node a [m.py:1])",
    ),
    "one rank ends": (
        (*DONE, "reduce b dp sum 8", "wait b"),
        DONE,
        "number: different numbers of collectives: rank 0 starts a 2nd collective, "
        "all_reduce(sum) of f32[8] on dp (node b [m.py:3]); rank 1 ends after 1 on dp",
    ),
    "one rank ends, though nobody waits": (
        ("reduce a dp sum 4", "reduce b dp sum 4"),
        ("reduce a dp sum 4",),
        "number: different numbers of collectives: rank 0 starts a 2nd collective, "
        "all_reduce(sum) of f32[4] on dp (node b [m.py:2]); rank 1 ends after 1 on dp",
    ),
    "groups in opposite orders": (
        SWAPPED,
        SWAPPED[2:] + SWAPPED[:2],
        "deadlock: ranks 0 and 1 wait for each other: "
        "rank 0 waits for all_reduce(sum) of f32[4] on dp, which rank 1 starts only later, at node a [m.py:3] "
        "(node a_done [m.py:2]); "
        "rank 1 waits for all_reduce(sum) of f32[4] on tp, which rank 0 starts only later, at node b [m.py:3] "
        "(node b_done [m.py:2])",
    ),
    "groups launched in opposite orders": (
        TWO,
        (TWO[1], TWO[0], *TWO[2:]),
        "may deadlock on NCCL: ranks 0 and 1 start communication in opposite orders, and a device may run it one "
        "after the other: "
        "rank 0 starts all_reduce(sum) of f32[4] on dp, which rank 1 starts only later, at node a [m.py:2] "
        "(node a [m.py:1]); "
        "rank 1 starts all_reduce(sum) of f32[4] on tp, which rank 0 starts only later, at node b [m.py:2] "
        "(node b [m.py:1])",
    ),
    "a message": (("send a pp 1, 0 4", "wait a"), ("recv a pp 0, 0 4", "wait a"), ""),
    "a message of another size": (
        ("send a pp 1, 0 4", "wait a"),
        ("recv a pp 0, 0 8", "wait a"),
        "mismatch: different sizes in the 1st message of pp: "
        "rank 0 starts a send of f32[4] to rank 1 of pp (node a [m.py:1]); "
        "rank 1 starts a receive of f32[8] from rank 0 of pp (node a [m.py:1])",
    ),
    "a message that nobody receives": (
        ("send a pp 1, 0 4", "wait a"),
        (),
        "number: a message without its other end: rank 0 starts a send of f32[4] to rank 1 of pp (node a [m.py:1]); "
        "rank 1 ends without the receive that it needs",
    ),
    "messages by tag": (
        ("send a pp 1, 0 4", "send b pp 1, 1 4", "wait a", "wait b"),
        ("recv b pp 0, 1 4", "recv a pp 0, 0 4", "wait a", "wait b"),
        "mismatch: different tags (which NCCL ignores) in the 1st message of pp: "
        "rank 0 starts a send of f32[4] to rank 1 of pp (node a [m.py:1]); "
        "rank 1 starts a receive of f32[4] from rank 0 with tag 1 of pp (node b [m.py:1])",
    ),
    "both receive first": (
        ("recv a pp 1, 0 4", "wait a", "send b pp 1, 0 4", "wait b"),
        ("recv a pp 0, 0 4", "wait a", "send b pp 0, 0 4", "wait b"),
        "deadlock: ranks 0 and 1 wait for each other: rank 0 waits for a receive of f32[4] from rank 1 of pp, "
        "whose other end rank 1 starts only later, at node b [m.py:3] (node a_done [m.py:2]); "
        "rank 1 waits for a receive of f32[4] from rank 0 of pp, whose other end rank 0 starts only later, "
        "at node b [m.py:3] (node a_done [m.py:2])",
    ),
    "both send and receive in one batch": (with_peer(1, *BOTH), with_peer(0, *BOTH), ""),
    "a message to nobody": (
        ("send a pp 2, 0 4", "wait a"),
        (),
        "mismatch: a message with rank 2 of a group of 2: "
        "rank 0 starts a send of f32[4] to rank 2 of pp (node a [m.py:1])",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_ranks(name: str) -> None:
    first, second, said = PAIRS[name]
    found = cf.check_compatible([program(*first), program(*second)], PAIR)
    assert str(found).partition("\n")[2].strip() == said
    assert found.ok == bool(found) == (not said)


def test_what_was_proved_is_said() -> None:
    ranks = [program(*SWAPPED)] * 4
    assert str(cf.check_compatible(ranks, {"dp": 2, "tp": 2})) == (
        "4 collectives of 4 groups on 4 ranks: every wait is met."
    )


def test_on_gloo_launches_in_opposite_orders_are_met() -> None:
    ranks = [program(*TWO), program(TWO[1], TWO[0], *TWO[2:])]
    assert cf.check_compatible(ranks, PAIR, backend="gloo").ok
    assert cf.check_compatible(ranks, PAIR, backend="nccl").findings[0].problem is FindingKind.NCCL


def test_the_shortest_circle_is_told() -> None:
    """Four ranks wait in a circle of four, two of them for each other too."""
    circle = [
        ("reduce a ab sum 4", "wait a", "reduce d da sum 4", "wait d"),
        ("reduce b bc sum 4", "wait b", "reduce a ab sum 4", "wait a"),
        ("reduce c cd sum 4", "wait c", "reduce b bc sum 4", "wait b"),
        ("reduce d da sum 4", "wait d", "reduce c cd sum 4", "wait c"),
    ]
    mesh = {"ab": (0, 1), "bc": (1, 2), "cd": (2, 3), "da": (0, 3)}
    found = cf.check_compatible([program(*events) for events in circle], mesh)
    assert found.findings[0].what == "ranks 0, 1, 2 and 3 wait for each other"
    wider = {**mesh, "cd": (1, 2, 3)}
    circle[1] = (*circle[1], "reduce c cd sum 4", "wait c")
    found = cf.check_compatible([program(*events) for events in circle], wider)
    assert [place.rank for place in found.findings[0].places] == [1, 2]


def test_a_rank_that_is_not_a_member_and_members_that_differ() -> None:
    ranks = [program(*DONE)] * 3
    assert cf.check_compatible(ranks, {"dp": (0, 1)}).findings[0].what == "rank 2 is not in dp, which has ranks 0, 1"
    views = [{"dp": (0, 1)}, {"dp": (0, 1, 2)}, {"dp": (0, 1, 2)}]
    found = cf.check_compatible(ranks, views).findings[0]
    assert found.problem is FindingKind.MEMBERS
    assert found.what == "dp has ranks 0, 1 on rank 0, and ranks 0, 1, 2 on rank 1"


def test_the_operator_says_another_group_size() -> None:
    found = cf.check_compatible(program("gather a dp 4", "wait a"), {"dp": 4})
    assert found.findings[0].what == "a group of 4 ranks, where the operator says 2"


def test_one_program_for_all_ranks() -> None:
    """What ranks do alike fits, except what names ranks: those are walked one by one."""
    assert cf.check_compatible(program(*SWAPPED), {"dp": 2, "tp": 4}).collectives == 4 + 2
    uneven = cf.check_compatible(program("exchange a dp [1, 3], [1, 3] 4", "wait a"), {"dp": 2})
    assert "rank 0 sends 3 to rank 1, which expects 1" in str(uneven)
    assert not cf.check_compatible(program("send a pp 1, 0 4", "wait a"), {"pp": 2}).ok
    assert cf.check_compatible(program("exchange a dp [2, 2], [2, 2] 4", "wait a"), {"dp": 2}).ok


def nested(yes: str, no: str) -> Program:
    """A program that calls one of two graphs, depending on data."""

    def branch(call: str) -> fx.GraphModule:
        return parse(f'x: f32[4] = input("x")\n{call}\nreturn output("0", y)').module()

    graph = fx.Graph()
    x, which = graph.placeholder("x"), graph.placeholder("which")
    x.meta["val"], which.meta["val"] = torch.empty(4, device="meta"), torch.empty((), dtype=torch.bool, device="meta")
    first, second = graph.get_attr("yes"), graph.get_attr("no")
    call = graph.call_function(torch.ops.higher_order.cond, (which, first, second, (x,)))
    call.meta["val"] = (x.meta["val"],)
    graph.output((call,))
    inputs = Input(InputKind.INPUT, "x"), Input(InputKind.INPUT, "which")
    outputs = (Output(OutputKind.OUTPUT, "y"),)
    return Program(graph, inputs, outputs, groups={"dp": 2}, constants={"yes": branch(yes), "no": branch(no)})


def test_what_depends_on_data_cannot_be_proved() -> None:
    reduced = 's = c10d.all_reduce(x, "sum", "dp")\ny = c10d.wait_tensor(s)'
    found = cf.check_compatible(nested(reduced, "y = aten.relu(x)"), {"dp": 2})
    assert not found.ok
    assert found.findings[0].problem is FindingKind.UNPROVED
    assert found.findings[0].what == "which of its branches communicates depends on data"
    renamed = 'other = c10d.all_reduce(x, "sum", "dp")\ny = c10d.wait_tensor(other)'
    assert cf.check_compatible(nested(reduced, renamed), {"dp": 2}).collectives == 1
    assert cf.check_compatible(nested("y = aten.neg(x)", "y = aten.relu(x)"), {"dp": 2}).ok


def test_meshes_that_do_not_fit_are_refused() -> None:
    ranks = [program(*DONE)] * 3
    with pytest.raises(MeshError, match="3 programs and a mesh of 2 ranks"):
        cf.check_compatible(ranks, {"dp": 2})
    with pytest.raises(MeshError, match="the group 'dp' in rank 0's program"):
        cf.check_compatible(ranks, {"tp": 3})
    with pytest.raises(MeshError, match="one program for all ranks"):
        cf.check_compatible(program(*SWAPPED))
    with pytest.raises(CrossfadeError, match="backend='mpi'"):
        cf.check_compatible(ranks, backend="mpi")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mesh", [{"dp": "x"}, {"dp": 0}, {"dp": (0, "a")}, {"dp": (-1, 0)}, {"dp": (0, 0)}, {"dp": True}, {"dp": None},
             {"dp": [()]}, [1, 2], "dp=2", {"dp": 2, "tp": (0, 1)}, {"dp": 2, "tp": ("dp", "pp")}]
)  # fmt: skip
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(MeshError, match=r"mesh|made of"):
        cf.check_compatible([program(*DONE)] * 2, mesh)


def test_what_is_no_program_is_refused() -> None:
    for given in ([], [None], ["x"]):
        with pytest.raises(CrossfadeError, match="to check"):
            cf.check_compatible(given, {"dp": 2})  # type: ignore[arg-type]


def test_graphs_loops_and_device_meshes() -> None:
    """FX graphs are programs too; a map communicates as often as it has rows; a DeviceMesh is its axes."""
    assert cf.check_compatible(program(*DONE).module(), {"dp": 2}).collectives == 1
    mapped = parse(MAPPED)
    assert cf.check_compatible(mapped, {"dp": 2}).collectives == 4
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"), mesh=torch.arange(4).reshape(2, 2))
    assert cf.check_compatible(program(*SWAPPED), mesh).collectives == 4


MAPPED = """
    def body():
        row: f32[3] = input("row")
        s: f32[3] = c10d.all_reduce(row, "sum", "dp")
        w: f32[3] = c10d.wait_tensor(s)
        return output("0", w)
    rows: f32[4, 3] = input("rows")
    body: graph = constant("body")
    map_impl: (f32[4, 3],) = higher_order.map_impl(body, [rows], [])
    y: f32[4, 3] = map_impl[0]
    return output("y", y)
"""


@pytest.mark.parametrize("batched", [False, True])
def test_a_ring_of_messages_needs_a_batch_on_nccl(batched: bool) -> None:
    batch = 'raw b = c10d.batch_p2p_ops(["isend", "irecv"], [{}, {}], [0, 0], [x4, x4], "pp")'

    def rank(number: int) -> Program:
        after, before = (number + 1) % 3, (number + 2) % 3
        if batched:
            return program('raw x4: f32[4] = input("x4")', batch.format(after, before), "raw g = b[1]", "wait g")
        return program(f"send a pp {after}, 0 4", f"recv b pp {before}, 0 4", "wait a", "wait b")

    ring = [rank(number) for number in range(3)]
    assert cf.check_compatible(ring, {"pp": 3}, backend="gloo").messages == 3
    found = cf.check_compatible(ring, {"pp": 3})
    assert [finding.problem for finding in found.findings] == ([] if batched else [FindingKind.NCCL])


def test_a_rank_that_sends_to_itself_waits_for_itself() -> None:
    found = cf.check_compatible([program("send a pp 0, 0 4", "wait a", "recv b pp 0, 0 4", "wait b")], {"pp": 1})
    assert found.findings[0].what == "rank 0 waits for itself"


def test_a_matmul_in_pieces_is_one_collective_and_its_wait() -> None:
    def rank(chunks: int) -> Program:
        return parse(f"""
            x: f32[4, 8] = input("x")
            w: f32[8, 4] = input("w")
            y = crossfade.gather_matmul(x, [w], [None], [], ["mk,kn->mn"], 0, 2, "chunked", {chunks}, False, "tp")
            z: f32[8, 4] = y[0]
            return output("z", z)
        """)

    assert cf.check_compatible([rank(2), rank(2)], PAIR).collectives == 1
    found = cf.check_compatible([rank(2), rank(4)], PAIR)
    assert found.findings[0].what == "different settings in the 1st collective of tp"


def long_program(collectives: int, *, swapped: int = -1) -> Program:
    """So many collectives, started in pairs of two groups before either is waited for; one pair swapped."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    for pair in range(collectives // 2):
        groups = ("tp", "dp") if pair == swapped else ("dp", "tp")
        starts = [graph.call_function(reduce, (x, "sum", group)) for group in groups]
        for start in starts:
            start.meta["val"] = x.meta["val"]
            graph.call_function(wait, (start,)).meta["val"] = x.meta["val"]
    graph.output(())
    return Program(graph, (Input(InputKind.INPUT, "x"),), (), groups={"dp": 2, "tp": 2})


def test_the_work_grows_with_the_number_of_collectives() -> None:
    def work(size: int) -> Any:
        ranks = [long_program(size), long_program(size)]
        return lambda: cf.check_compatible(ranks, PAIR)

    grows_linearly(work, 150)


def many_events(collectives: int, *, swapped: int = -1) -> Events:
    """Like `long_program`, read already."""
    found = Events()
    launches = {group: Launch(group, "", "all_reduce", group, (TensorType("f32", (4,)),), "sum") for group in PAIR}
    for pair in range(collectives // 2):
        order = ("tp", "dp") if pair == swapped else ("dp", "tp")
        found.events += [Wait("wait", "", found.start(launches[group])) for group in order]
    return found


def test_many_collectives_are_checked_and_a_late_counter_example_is_found() -> None:
    same, other = many_events(100_000), many_events(100_000, swapped=40_000)
    assert check_schedules([same, many_events(100_000)], [PAIR, PAIR]).collectives == 100_000
    found = check_schedules([same, other], [PAIR, PAIR])
    assert found.findings[0].problem is FindingKind.NCCL
    assert [place.node for place in found.findings[0].places] == ["dp", "tp"]
