"""`optimize`: what is wrong with the graph given is said of it, and results share memory as they did."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.compile.pipeline import optimization, optimize
from crossfade.cost.presets import preset
from crossfade.errors import PassError, VerifyError
from crossfade.graph.passes import Numerics, Pass, PassResult, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.schedule.overlap_communication import OverlapCommunication

BUCKETS = (BucketAllGathers, BucketReduceScatters, BucketAllReduces)
GROUPS = {"dp": 2}
GIVEN = """
    x: f32[4] = input("x")
    n: f32[4] = aten.neg(x)
    s: f32[8] = c10d.all_gather_into_tensor(n, 2, "dp")
    w: f32[8] = c10d.wait_tensor(s)
    e: f32[8] = aten.exp(w)
    return output("e", e)
"""
SOURCE = 'File "/home/me/train.py", line 12, in step'


def module_of() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    module = parse(GIVEN, groups=GROUPS).module()
    named = {node.name: node for node in module.graph.nodes}
    for node in named.values():
        node.meta["stack_trace"] = SOURCE
    return module, named


def drop_the_wait(module: fx.GraphModule, node: dict[str, fx.Node]) -> None:
    node["e"].args = (node["x"],)
    module.graph.erase_node(node["w"])


def read_before_the_wait(module: fx.GraphModule, node: dict[str, fx.Node]) -> None:
    node["e"].args = (node["s"],)
    node["w"].prepend(node["e"])


def write_what_is_read(module: fx.GraphModule, node: dict[str, fx.Node]) -> None:
    with module.graph.inserting_before(node["w"]):
        write = module.graph.call_function(torch.ops.aten.add_.Tensor, (node["n"], 1))
    write.meta = dict(node["n"].meta)


def forget_metadata(module: fx.GraphModule, node: dict[str, fx.Node]) -> None:
    del node["n"].meta["val"]


def use_before_definition(module: fx.GraphModule, node: dict[str, fx.Node]) -> None:
    node["n"].prepend(node["s"])


def communicate_elsewhere(module: fx.GraphModule, node: dict[str, fx.Node]) -> None:
    node["s"].args = (*node["s"].args[:2], "tp")


BROKEN: dict[Callable[..., None], str] = {
    drop_the_wait: 's = c10d.all_gather_into_tensor(n, 2, "dp") [train.py:12] is never waited for',
    read_before_the_wait: "e = aten.exp(s) [train.py:12] reads s before its wait",
    write_what_is_read: "add__tensor = aten.add_.Tensor(n, 1) [train.py:12] writes n before the wait of s",
    forget_metadata: "n = aten.neg(x) [train.py:12] has no metadata",
    use_before_definition: "a malformed graph (Argument 'n' of Node 's' was used before it has been defined!",
    communicate_elsewhere: "s = c10d.all_gather_into_tensor(n, 2, \"tp\") [train.py:12] is on group 'tp'",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda one: one.__name__)
@pytest.mark.parametrize("passes", [None, [], [SinkWaits()]], ids=["default", "none", "sink-waits"])
def test_what_is_wrong_with_the_graph_given_is_blamed_on_no_pass(breaks: Callable[..., None], passes: Any) -> None:
    module, node = module_of()
    breaks(module, node)
    with pytest.raises(VerifyError) as caught:
        optimize(module, passes=passes, groups=GROUPS)
    assert caught.value.found.startswith(f"in the graph given: {BROKEN[breaks]}")
    assert caught.value.remedy


def test_a_runner_of_passes_blames_the_program_given_too() -> None:
    program = parse(GIVEN, groups=GROUPS)
    drop_the_wait(program.module(), {node.name: node for node in program.graph.nodes})
    with pytest.raises(VerifyError, match=r"in the graph given: s = .* is never waited for"):
        run_passes(program, [SinkWaits()])


class DropWaits(Pass):
    """Breaks what it is given."""

    name = "drop-waits"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        drop_the_wait(program.module(), {node.name: node for node in program.graph.nodes})
        return PassResult(True)


def test_a_pass_that_breaks_a_good_program_is_still_to_blame() -> None:
    with pytest.raises(PassError, match=r"pass drop-waits which left a broken program at node s: VerifyError: s ="):
        optimize(parse(GIVEN, groups=GROUPS).module(), passes=[SinkWaits(), DropWaits()])


# Who shares memory with whom among inputs and results: a caller who writes into one of them would tell.

SHARING = {
    "a view beside its base, of what is merged": """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "{group}")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[4] = c10d.all_reduce(x, "sum", "{group}")
        u: f32[4] = c10d.wait_tensor(t)
        v: f32[2, 2] = aten.view(u, [2, 2])
        h: f32[2] = aten.slice.Tensor(u, 0, 2, 4)
        return output("w", w), output("u", u), output("v", v), output("h", h), output("u again", u)
    """,
    "views beside their bases, in one bucket": """
        x: f32[4] = input("x")
        y: f32[6] = input("y")
        s: f32[4] = c10d.all_reduce(x, "sum", "{group}")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[6] = c10d.all_reduce(y, "sum", "{group}")
        u: f32[6] = c10d.wait_tensor(t)
        parts: (f32[3], f32[3]) = aten.split.Tensor(u, 3)
        a: f32[3] = parts[0]
        b: f32[3] = parts[1]
        ten: f32[3] = aten.mul_.Tensor(b, 10)
        return output("w", w), output("u", u), output("a", a), output("ten", ten), output("w again", w)
    """,
    "only views, in one bucket": """
        x: f32[4] = input("x")
        y: f32[6] = input("y")
        s: f32[4] = c10d.all_reduce(x, "sum", "{group}")
        w: f32[4] = c10d.wait_tensor(s)
        t: f32[6] = c10d.all_reduce(y, "sum", "{group}")
        u: f32[6] = c10d.wait_tensor(t)
        a: f32[2, 3] = aten.view(u, [2, 3])
        b: f32[3, 2] = aten.permute(a, [1, 0])
        c: f32[2, 2] = aten.view(w, [2, 2])
        return output("a", a), output("b", b), output("c", c)
    """,
    "gathered and scattered": """
        x: f32[4] = input("x")
        y: f32[6] = input("y")
        s: f32[8] = c10d.all_gather_into_tensor(x, 2, "{group}")
        w: f32[8] = c10d.wait_tensor(s)
        t: f32[12] = c10d.all_gather_into_tensor(y, 2, "{group}")
        u: f32[12] = c10d.wait_tensor(t)
        p: f32[2] = c10d.reduce_scatter_tensor(x, "sum", 2, "{group}")
        wp: f32[2] = c10d.wait_tensor(p)
        q: f32[3] = c10d.reduce_scatter_tensor(y, "sum", 2, "{group}")
        wq: f32[3] = c10d.wait_tensor(q)
        vu: f32[3, 4] = aten.view(u, [3, 4])
        vq: f32[3, 1] = aten.unsqueeze(wq, 1)
        return output("w", w), output("u", u), output("vu", vu), output("p", wp), output("q", wq), output("vq", vq)
    """,
    "inputs among the results": """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        v: f32[2, 2] = aten.view(x, [2, 2])
        c: f32[4] = aten.clone(x)
        d: f32[4] = aten.detach(x)
        s: f32[4] = c10d.all_reduce(y, "sum", "{group}")
        w: f32[4] = c10d.wait_tensor(s)
        e: f32[4] = aten.alias(w)
        return output("x", x), output("v", v), output("c", c), output("d", d), output("w", w), output("e", e)
    """,
    "reduced in place": """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        s: f32[4] = c10d.all_reduce_(x, "sum", "{group}")
        w: f32[4] = c10d.wait_tensor(s)
        c: f32[4] = aten.clone(y)
        t: f32[4] = c10d.all_reduce_(c, "sum", "{group}")
        u: f32[4] = c10d.wait_tensor(t)
        return output("x", x), output("w", w), output("c", c), output("u", u)
    """,
}


def written_one_by_one(module: fx.GraphModule, rank: int) -> list[Any]:
    """What all inputs and results are once a caller has written into each result in turn."""
    given = [torch.arange(4.0) + rank, torch.arange(6.0) - rank]
    sizes = [node.meta["val"].shape[0] for node in module.graph.find_nodes(op="placeholder")]
    inputs = [value[:size].clone() for value, size in zip(given, sizes, strict=False)]
    results = module(*inputs)
    seen = [value.tolist() for value in results]
    for number, result in enumerate(results):
        result.mul_(2).add_(number)
        seen += [value.tolist() for value in (*inputs, *results)]
    return seen


def what_sharing_differs(name: str) -> list[str]:
    """On each rank: the pipelines after which writes into results are seen elsewhere than before."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    module = parse(SHARING[name].format(group=group), groups={group: 2}).module()
    expected = written_one_by_one(module, rank)
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "nothing lowered": {"backends": {}},
        "coalesced": {"passes": [one(mode="coalesced") for one in BUCKETS]},
        "overlapped": {"passes": [*optimization({}), OverlapCommunication(preset("ethernet-1gbit"))]},
    }
    done = {way: optimize(module, groups={group: 2}, **options).module for way, options in ways.items()}
    return [way for way, one in done.items() if written_one_by_one(one, rank) != expected]


@pytest.mark.ranks
@pytest.mark.parametrize("name", SHARING)
def test_results_share_memory_as_they_did(ranks: Any, name: str) -> None:
    assert ranks(2).run(what_sharing_differs, name) == [[], []]


def planned_for_a_machine() -> list[tuple[int, int]]:
    """Groups and all-reduces after planning for a machine: of a graph whose all-reduce does not say how many ranks."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    text = f"""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "{group}")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(w)
        return output("n", n)
    """
    module = parse(textwrap.dedent(text), groups={group: 2}).module()
    report = optimize(module, machine=preset("ethernet-1gbit")).report
    return [(report.collectives_after["all_reduce"][0], dist.get_world_size())]


@pytest.mark.ranks
def test_groups_of_this_process_have_their_size_also_for_a_machine(ranks: Any) -> None:
    assert ranks(2).run(planned_for_a_machine) == [[(1, 2)], [(1, 2)]]
