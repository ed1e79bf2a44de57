"""What plain overlap hides, by hand: independence, shared computation, the nearest first; and that it grows little."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
from torch import fx

from crossfade.cost import hidden
from crossfade.cost.hidden import Overlap, hidden_by_overlap
from crossfade.cost.timeline import Costs, Within
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.growth import grows_linearly


def find(
    lines: str, compute: dict[str, float], travel: dict[str, float], within: dict[str, Within] | None = None
) -> dict[str, float]:
    program = parse(textwrap.dedent(lines), groups={"dp": 2})
    node = {node.name: node for node in program.graph.nodes}
    inside = {node[name]: inside for name, inside in (within or {}).items()}
    costs = Costs({node[k]: v for k, v in compute.items()}, {node[k]: v for k, v in travel.items()}, {}, inside)
    return {node.name: seconds for node, seconds in hidden_by_overlap(program, costs).items()}


ONE = """
    x: f32[4] = input("x")
    above: f32[4] = aten.neg(x)
    side: f32[4] = aten.exp(x)
    start: f32[4] = c10d.all_reduce(above, "sum", "dp")
    done: f32[4] = c10d.wait_tensor(start)
    below: f32[4] = aten.sin(done)
    later: f32[4] = aten.cos(side)
    both: f32[4] = aten.add.Tensor(below, later)
    return output("both", both)
    """


@pytest.mark.parametrize(("travel", "expected"), [(10.0, 5.0), (4.0, 4.0), (5.0, 5.0), (0.0, 0.0)])
def test_only_what_is_neither_above_nor_below_covers(travel: float, expected: float) -> None:
    compute = {"above": 100.0, "side": 2.0, "below": 100.0, "later": 3.0, "both": 100.0}
    assert find(ONE, compute, {"start": travel}) == {"start": expected}


TWO = """
    x: f32[4] = input("x")
    far: f32[4] = aten.exp(x)
    a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    near: f32[4] = aten.neg(x)
    aw: f32[4] = c10d.wait_tensor(a)
    b: f32[4] = c10d.all_reduce(far, "sum", "dp")
    bw: f32[4] = c10d.wait_tensor(b)
    return output("a", aw), output("b", bw), output("near", near), output("far", far)
    """


def test_no_second_of_a_node_covers_two_collectives() -> None:
    assert find(TWO, {"near": 3.0}, {"a": 2.0, "b": 2.0}) == {"a": 2.0, "b": 1.0}


def test_the_nearest_computation_is_taken_first() -> None:
    # far is above b, so it can cover a only; a takes near, which is nearer, and leaves b what it does not need
    assert find(TWO, {"far": 5.0, "near": 3.0}, {"a": 2.0, "b": 2.0}) == {"a": 2.0, "b": 1.0}
    assert find(TWO, {"far": 5.0, "near": 3.0}, {"a": 8.0, "b": 2.0}) == {"a": 8.0, "b": 0.0}


def test_what_is_taken_covers_nothing_and_what_it_was_taken_for_needs_no_cover() -> None:
    program = parse(textwrap.dedent(TWO), groups={"dp": 2})
    node = {node.name: node for node in program.graph.nodes}
    costs = Costs({node["far"]: 5.0, node["near"]: 3.0}, {node["a"]: 2.0, node["b"]: 2.5}, {})
    for taken, expected in (((), 2.5), (("far",), 2.5), (("near",), 0.0)):
        overlap = Overlap(program, costs)
        assert overlap.hidden(node["a"]) == 2.0  # of near
        overlap.take(node["a"], (node[name] for name in taken))
        overlap.take(node["a"], ())  # gives nothing back twice
        assert overlap.hidden(node["b"]) == expected
    kept = Overlap(program, costs)
    assert [kept.hidden(node["b"]), kept.hidden(node["a"])] == [1.0, 2.0]
    kept.take(node["a"], ())  # not the last to be served: what b was given stays b's
    assert kept.hidden(node["b"]) == 1.0


def test_launches_cover_nothing_and_a_fused_node_only_while_it_computes() -> None:
    inside = {"near": Within("all_gather", "tp", 1, 1.0, exposed=2.0)}
    assert find(TWO, {"near": 3.0, "a": 7.0, "b": 7.0}, {"a": 2.0, "b": 2.0}, inside) == {"a": 1.0, "b": 0.0}


def test_writes_to_memory_bind_like_data() -> None:
    text = """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        done: f32[4] = c10d.wait_tensor(start)
        copied: f32[4] = aten.copy_(y, done)
        reads: f32[4] = aten.neg(y)
        return output("reads", reads)
        """
    assert find(text, {"reads": 3.0}, {"start": 2.0}) == {"start": 0.0}


def test_collectives_of_one_group_do_not_bind_each_others_computation() -> None:
    text = """
        x: f32[4] = input("x")
        a: f32[4] = c10d.all_reduce(x, "sum", "dp")
        aw: f32[4] = c10d.wait_tensor(a)
        after: f32[4] = aten.neg(aw)
        b: f32[4] = c10d.all_reduce(x, "sum", "dp")
        bw: f32[4] = c10d.wait_tensor(b)
        return output("a", after), output("b", bw)
        """
    assert find(text, {"after": 3.0}, {"a": 2.0, "b": 2.0}) == {"a": 0.0, "b": 2.0}


def test_no_collectives_no_answer() -> None:
    assert find(ONE, {"side": 1.0}, {}) == {}


def chains(collectives: int, length: int) -> tuple[Program, Costs]:
    """As many collectives as chains of computation, each followed by its chain."""
    lines = ['x: f32[4] = input("x")']
    for index in range(collectives):
        lines += [
            f's{index}: f32[4] = c10d.all_reduce(x, "sum", "dp")',
            f"w{index}: f32[4] = c10d.wait_tensor(s{index})",
        ]
        for step in range(length):
            source = f"w{index}" if step == 0 else f"c{index}_{step - 1}"
            lines.append(f"c{index}_{step}: f32[4] = aten.neg({source})")
    last = [f'output("o{index}", c{index}_{length - 1})' for index in range(collectives)]
    program = parse("\n".join([*lines, f"return {', '.join(last)}"]), groups={"dp": 2})
    computing = [node for node in program.graph.nodes if node.name.startswith("c")]
    starts = [node for node in program.graph.nodes if node.name.startswith("s")]
    return program, Costs(dict.fromkeys(computing, 1.0), dict.fromkeys(starts, 3.25), {})


def plainly(program: Program, costs: Costs) -> dict[fx.Node, float]:
    """The same by the book: everything reachable, node by node."""
    nodes = list(program.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    left = {node: seconds for node, seconds in costs.compute.items() if node not in costs.travel}
    found = {}
    for start in (node for node in nodes if node in costs.travel):
        related = {start}
        for nodes_in_order, links in (
            (nodes, fx.Node.all_input_nodes.fget),
            (nodes[::-1], lambda node: list(node.users)),
        ):
            reached = {start}
            for node in nodes_in_order:
                if reached & set(links(node)):
                    reached.add(node)
            related |= reached
        away = {node: position[node] - position[start] for node in left}
        wanted = costs.travel[start]
        for node in sorted(left, key=lambda node: (abs(away[node]), away[node] < 0)):
            if node not in related:
                taken = min(wanted, left[node])
                left[node] -= taken
                wanted -= taken
        found[start] = costs.travel[start] - wanted
    return found


@pytest.mark.parametrize("reach", [1, 4, 256])
@pytest.mark.parametrize("at_a_time", [1, 3, 1024])
def test_the_same_by_the_book_however_far_it_looks_and_however_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch, reach: int, at_a_time: int
) -> None:
    monkeypatch.setattr(hidden, "_FIRST_REACH", reach)
    monkeypatch.setattr(hidden, "_AT_A_TIME", at_a_time)
    program, costs = chains(7, 3)
    found = hidden_by_overlap(program, costs)
    assert found == plainly(program, costs)
    assert len(set(found.values())) > 1  # the last ones find too little


def test_work_grows_with_the_program() -> None:
    def asked(size: int) -> Callable[[], object]:
        program, costs = chains(size, 20)
        return lambda: hidden_by_overlap(program, costs)

    grows_linearly(asked, 40)
