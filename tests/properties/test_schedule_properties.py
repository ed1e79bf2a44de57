"""Schedules of sampled programs: legal, never predicted slower, within the limit, the same everywhere, equal bits."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.cost.timeline import Costs, simulate
from crossfade.errors import MemoryLimitError
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.memory import memory_curve
from crossfade.graph.order import Order
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.verify import verify
from crossfade.schedule.plan import Schedule, apply_schedule, plan_schedule
from tests.properties.exchange_job import groups_of
from tests.properties.exchange_programs import Choices, Sampler, inputs_for
from tests.properties.sampled_programs import Machine, Sampled, sampled_programs

SEEDS = st.integers(0, 2**16)
FEWER = settings(max_examples=settings().max_examples // 2)


def sampled_costs(program: Program, seed: int) -> Costs:
    """Whole seconds of any node but inputs, now and then none; computation is slowed down by some groups.

    They go by the nodes' names, so that they stay with them wherever they stand.
    """
    random = Random(seed)
    called = (node for node in program.graph.nodes if node.op == "call_function")
    nodes = sorted(called, key=lambda node: node.name)
    travel = {node: float(random.randint(1, 9)) for node in nodes if collectives.is_collective(node)}
    compute = {node: float(random.randint(1, 6)) for node in nodes if random.random() < 0.6}
    return Costs(compute, travel, {group: random.choice([0.0, 0.5]) for group in program.groups})


def scheduled_copy(program: Program, seed: int, limit: int | None = None) -> tuple[Program, Schedule]:
    schedule = plan_schedule(program, sampled_costs(program, seed), limit)
    done = program.copy()
    assert apply_schedule(done, schedule) == (schedule.order != tuple(node.name for node in program.graph.nodes))
    verify(done)
    return done, schedule


@given(sampled_programs(), SEEDS)
def test_O1_schedules_are_legal_and_compute_the_same(sampled: Sampled, seed: int) -> None:
    program = sampled.program
    _, schedule = scheduled_copy(program, seed)
    order = Order(program.graph)
    by_name = {node.name: node for node in order.nodes}
    nodes = [by_name[name] for name in schedule.order]
    place = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        assert all(place[one] < place[node] for one in order.predecessors(node, within_group=False))
    before, after = (Machine().run(program, one)[0] for one in (order.nodes, nodes))
    assert before == after


@given(sampled_programs(), SEEDS)
def test_O1_schedules_are_predicted_truly_and_no_slower(sampled: Sampled, seed: int) -> None:
    program = sampled.program
    done, schedule = scheduled_copy(program, seed)
    before, after = (simulate(one, sampled_costs(one, seed)) for one in (program, done))
    assert (before.seconds, after.seconds) == pytest.approx((schedule.seconds_before, schedule.seconds))
    assert schedule.seconds <= schedule.seconds_before
    exposed = {one.name: one.exposed for one in after.communication}
    assert {one.name: one.exposed for one in schedule.collectives} == pytest.approx(exposed)
    assert memory_curve(program).peak == schedule.peak_before
    assert memory_curve(done).peak == schedule.peak


@FEWER
@given(sampled_programs(), SEEDS, st.floats(0, 1))
def test_O2_peaks_stay_within_the_limit_or_the_least_is_told(sampled: Sampled, seed: int, share: float) -> None:
    program = sampled.program
    limit = int(share * memory_curve(program).peak)
    try:
        done, _ = scheduled_copy(program, seed, limit)
    except MemoryLimitError as error:
        least = error.least
        assert least > limit
        done, _ = scheduled_copy(program, seed, least)
        with pytest.raises(MemoryLimitError):
            scheduled_copy(program, seed, least - 1)
        limit = least
    assert memory_curve(done).peak <= limit


@FEWER
@given(sampled_programs(), SEEDS)
def test_O1_the_same_program_and_costs_give_the_same_schedule(sampled: Sampled, seed: int) -> None:
    program, copy = sampled.program, sampled.program.copy()
    first, second = (plan_schedule(one, sampled_costs(one, seed)) for one in (program, copy))
    assert first == second


def sample(seed: int, groups: dict[str, int], positions: dict[str, int]) -> Program:
    """A program with collectives on some of the groups, described by fake tensors as torch computes them."""
    random = Random(seed)
    choices = Choices([random.randrange(1000) for _ in range(random.randint(24, 120))])
    return Sampler(choices, dict(list(groups.items())[: 1 + choices.below(3)]), positions).program()


def differences_on_a_rank(first: int, programs: int) -> tuple[list[list[str]], list[str]]:
    """On each rank: what each sampled program launches once it is scheduled, and which results differ from before."""
    sizes, positions, names = groups_of(2)
    launched, different = [], []
    for seed in range(first, first + programs):
        program = run_passes(sample(seed, sizes, positions), [LowerAllGathers(tuple(sizes))])
        done, _ = scheduled_copy(program, seed)
        launched.append([f"{one.kind} {one.group} {one.bytes}" for one in collectives.find(done.graph)])
        theirs = inputs_for(program, dist.get_rank())
        before, after = (Executable(one, names)([value.clone() for value in theirs]) for one in (program, done))
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            different.append(f"{program}\n\nbecame\n\n{done}")
    return launched, different


@pytest.mark.ranks
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_O1_on_two_ranks_equal_bits_and_equal_launches(ranks: Any, first: int) -> None:
    (here, different), (there, also_different) = ranks(2).run(differences_on_a_rank, first, 25)
    assert here == there
    assert not different and not also_different, (different + also_different)[0]


class Memory:
    """Runs a program's nodes one by one on real tensors and frees each value after its last use."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.values: dict[fx.Node, Any] = dict(zip(program.placeholders, inputs_for(program, 0), strict=True))
        self.theirs = self.storages()
        self.in_flight: dict[fx.Node, list[torch.Tensor]] = {}
        self.kept = set(program.output_node.all_input_nodes)

    def run(self) -> tuple[list[int], list[int]]:
        during, after = [], []
        for place, node in enumerate(self.nodes):
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
                self.values[node] = self.call(node, args, kwargs)
            during.append(self.live())
            self.free(place)
            after.append(self.live())
        return during, after

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A collective gives tensors of the right size, and keeps what it reads until it is waited for."""
        if collectives.is_wait(node):
            return args[0]
        one = collectives.view(node)
        if one is None:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if one.in_place:
            return args[0]
        if one.coalesced:
            self.in_flight[node] = [value.clone(memory_format=torch.contiguous_format) for value in args[0]]
            return list(self.in_flight[node])
        if one.kind is not collectives.Kind.ALL_REDUCE:
            self.in_flight[node] = [args[0]]
        return torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)

    def free(self, place: int) -> None:
        gone = set(self.nodes[: place + 1])
        for node in list(self.values):
            if node.op != "placeholder" and node not in self.kept and all(user in gone for user in node.users):
                del self.values[node]
        for start in list(self.in_flight):
            if all(wait in gone for wait in collectives.view(start).waits):  # type: ignore[union-attr]
                del self.in_flight[start]

    def storages(self) -> dict[int, int]:
        values = [*self.values.values(), *getattr(self, "in_flight", {}).values()]
        tensors = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
        return {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}

    def live(self) -> int:
        return sum(size for place, size in self.storages().items() if place not in self.theirs)


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_O2_memory_curves_are_those_of_real_tensors(first: int) -> None:
    sizes = {"dp": 2, "tp": 2, "all": 2}
    for seed in range(first, first + 100):
        program = sample(seed, sizes, dict.fromkeys(sizes, 0))
        curve = memory_curve(program)
        during, after = Memory(program).run()
        assert (list(curve.during), list(curve.after)) == (during, after), str(program)
