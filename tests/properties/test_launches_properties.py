"""Ranks launch alike: the same collectives with computation or inputs in another order become the same launches."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import fx

from crossfade.compile.pipeline import optimization, optimize
from crossfade.graph import collectives
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import fingerprint, run_passes
from crossfade.graph.program import Program, from_graph_module
from tests.properties.exchange_programs import Choices, Sampler, sampled_passes

GROUPS = {"all": 2, "tp": 2, "dp": 2}
POSITIONS = dict.fromkeys(GROUPS, 0)
MERGING = ("merge-duplicate-collectives", "add-before-reducing", "scatter-sliced-reductions")
BUCKETING = ("bucket-all-gathers", "bucket-reduce-scatters", "bucket-all-reduces")


def with_computation_shuffled(program: Program, random: Random) -> Program:
    """Another topological order: what communicates, or waits, stays in its own order."""
    shuffled = program.copy()
    order = Order(shuffled.graph)
    fixed = [n for n in order.nodes if collectives.group_of(n) is not None or collectives.is_wait(n)]
    last = dict(zip(fixed[1:], fixed, strict=False))
    placed: dict[fx.Node, None] = dict.fromkeys(node for node in order.nodes if node.op == "placeholder")
    while len(placed) < len(order.nodes) - 1:
        ready = [
            node
            for node in order.nodes
            if node not in placed
            and node.op != "output"
            and all(before in placed for before in order.predecessors(node))
            and last.get(node, node) in (node, *placed)
        ]
        placed[random.choice(ready)] = None
    reorder(shuffled.graph, [*placed, order.nodes[-1]])
    return shuffled


def launches(program: Program) -> list[str]:
    return [f"{one.kind} {one.reduce_op} {one.bytes} {one.group}" for one in collectives.find(program.graph)]


@pytest.mark.parametrize("names", [MERGING, BUCKETING, MERGING + BUCKETING], ids=["merging", "bucketing", "both"])
@given(numbers=st.lists(st.integers(0, 999), min_size=24, max_size=120), seed=st.integers(0, 2**16))
def test_where_computation_stands_decides_no_launch(names: tuple[str, ...], numbers: list[int], seed: int) -> None:
    choices = Choices(numbers)
    passes = [one for one in sampled_passes(choices, GROUPS, POSITIONS) if one.name in names]
    program = Sampler(choices, dict(list(GROUPS.items())[: 1 + choices.below(3)]), POSITIONS).program()
    other = with_computation_shuffled(program, Random(seed))
    here, there = (run_passes(one, passes, keep_text=False) for one in (program, other))
    assert launches(here) == launches(there)


def with_inputs_shuffled(program: Program, random: Random) -> fx.GraphModule:
    """The same graph, each input anywhere above the next one and its own first use."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    below = graph.output_node()
    for node in reversed(graph.find_nodes(op="placeholder")):
        nodes = list(graph.nodes)
        ends = min(nodes.index(one) for one in (below, *node.users))
        nodes[random.randint(nodes.index(node) + 1, ends)].prepend(node)
        below = node
    return fx.GraphModule({}, graph)


@settings(max_examples=settings().max_examples // 10, phases=[Phase.explicit, Phase.generate])
@given(numbers=st.lists(st.integers(0, 999), min_size=24, max_size=120), seed=st.integers(0, 2**16))
def test_where_inputs_stand_decides_nothing(numbers: list[int], seed: int) -> None:
    choices = Choices(numbers)
    passes = [*sampled_passes(choices, GROUPS, POSITIONS), *optimization()]
    program = Sampler(choices, GROUPS, POSITIONS).program()
    module = with_inputs_shuffled(program, Random(seed))
    done = [optimize(one, passes=passes, groups=GROUPS).module for one in (program.module(), module)]
    here, there = (fingerprint(from_graph_module(one, groups=GROUPS)) for one in done)
    assert here == there
