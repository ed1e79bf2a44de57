"""Schedules of small programs with toy costs, as exact text."""

from __future__ import annotations

import pytest

from crossfade.errors import MemoryLimitError, RewriteError
from crossfade.graph.memory import memory_curve
from crossfade.schedule.lean import lean_order
from crossfade.schedule.plan import (
    AT_ONCE,
    BUSY,
    HIDDEN,
    MEMORY,
    NOTHING_LEFT,
    Schedule,
    _best,
    _Candidate,
    apply_schedule,
    plan_schedule,
)
from crossfade.schedule.predict import Prediction, peak_of
from crossfade.schedule.problem import scheduling_problem
from tests.schedule.scheduled_programs import (
    CHAIN,
    COALESCED,
    DDP,
    DDP_SECONDS,
    MUTATION,
    NOTHING_TO_HIDE,
    QUEUED,
    RANDOM,
    SHARED_LINK,
    SHARED_LINK_SECONDS,
    TP,
    TP_SECONDS,
    TWO_GROUPS,
    URGENT,
    WASTEFUL,
    ZERO3,
    ZERO3_SECONDS,
)
from tests.schedule.toy_costs import costs_of, program_of, scheduled

GATHERS = ["g1", "g2", "g3", "h2", "h1"]


def reasons(schedule: Schedule) -> dict[str, str]:
    return {outlook.name: outlook.reason for outlook in schedule.collectives}


def seconds(schedule: Schedule) -> tuple[float, float]:
    return schedule.seconds_before, schedule.seconds


def test_O1_ddp_starts_the_first_gradient_before_the_chain_goes_on() -> None:
    schedule, body = scheduled(DDP, DDP_SECONDS)
    assert body == "a1 a2 g2 s2 d1 g1 s1 r2 u2 r1 u1"
    assert seconds(schedule) == (18, 14)
    assert reasons(schedule) == {"s2": HIDDEN, "s1": NOTHING_LEFT}


def test_O1_ddp_whose_link_is_slow_updates_what_has_arrived() -> None:
    schedule, body = scheduled(DDP, {**DDP_SECONDS, "s1": 9, "s2": 9})
    assert body == "a1 a2 g2 s2 d1 g1 s1 r2 u2 r1 u1"
    assert seconds(schedule) == (30, 25)
    assert reasons(schedule) == {"s2": NOTHING_LEFT, "s1": BUSY}


def test_O1_zero3_gathers_one_layer_ahead_and_no_more() -> None:
    schedule, body = scheduled(ZERO3, ZERO3_SECONDS)
    assert body == "g1 g2 w1 a1 g3 w2 a2 h2 w3 a3 h1 v2 b2 v1 b1"
    assert seconds(schedule) == (25, 21)
    assert reasons(schedule) == {"g1": AT_ONCE, **dict.fromkeys(GATHERS[1:], HIDDEN)}


def test_O1_a_slow_link_is_never_idle_and_still_gathers_no_more_than_one_ahead() -> None:
    schedule, body = scheduled(ZERO3, {**ZERO3_SECONDS, **dict.fromkeys(GATHERS, 6)})
    assert body == "g1 g2 w1 a1 g3 w2 a2 h2 w3 a3 h1 v2 b2 v1 b1"
    assert seconds(schedule) == (50, 5 * 6 + 4)


def test_O1_a_gather_queues_behind_one_that_may_arrive_a_little_sooner_than_predicted() -> None:
    _, body = scheduled(ZERO3, {**ZERO3_SECONDS, **dict.fromkeys(GATHERS, 5)})
    assert body.startswith("g1 g2 g3 w1 a1")


def gathered_layers(number: int) -> tuple[str, dict[str, float]]:
    """Layers one after another, each with a parameter that travels longer than the layer computes."""
    lines = [f'p{i}: f32[64] = parameter("p{i}")' for i in range(number)] + ['a: f32[128] = input("a")']
    for i in range(number):
        before = f"a{i - 1}" if i else "a"
        lines += [
            f'g{i}: f32[128] = c10d.all_gather_into_tensor(p{i}, 2, "dp")',
            f"w{i}: f32[128] = c10d.wait_tensor(g{i})",
            f"a{i}: f32[128] = aten.mul.Tensor({before}, w{i})",
        ]
    lines.append(f'return output("a", a{number - 1})')
    return "\n".join(lines), {name: cost for i in range(number) for name, cost in ((f"g{i}", 2.0), (f"a{i}", 1.0))}


def test_O1_of_many_gathers_on_a_slow_link_a_thirty_second_is_queued_in_case_a_rank_is_late() -> None:
    schedule, body = scheduled(*gathered_layers(96))
    assert body.startswith("g0 g1 g2 g3 g4 w0 a0 g5 w1 a1 g6 w2 a2")  # behind the one that travels, three and no more
    assert schedule.seconds == 96 * 2 + 1


def test_O1_no_gather_is_queued_before_one_that_is_needed_sooner_and_about_to_be_packed() -> None:
    text, costs = gathered_layers(96)
    packed = text.replace('g1: f32[128] = c10d.all_gather_into_tensor(p1, 2, "dp")', "")
    packed = packed.replace(
        "g0:", 'n1: f32[64] = aten.neg(p1)\ng1: f32[128] = c10d.all_gather_into_tensor(n1, 2, "dp")\ng0:'
    )
    _, body = scheduled(packed.replace("\n\n", "\n"), {**costs, "n1": 0.5})
    assert body.startswith("g0 n1 g1 g2 g3 g4")


def test_O2_a_limit_that_forgoes_the_stock_but_no_time_is_not_blamed() -> None:
    enough, _ = scheduled(*gathered_layers(96), memory_limit=2048)
    assert (enough.seconds, enough.peak) == (96 * 2 + 1, 2048)
    assert MEMORY not in reasons(enough).values()
    less, _ = scheduled(*gathered_layers(96), memory_limit=1536)
    assert less.seconds > enough.seconds
    assert list(reasons(less).values()).count(MEMORY) == 94


def test_O2_a_memory_limit_keeps_gathers_back() -> None:
    schedule, body = scheduled(ZERO3, ZERO3_SECONDS, memory_limit=2047)
    assert body == "g1 g2 w1 a1 w2 a2 g3 w3 a3 h2 v2 b2 h1 v1 b1"
    assert (seconds(schedule), schedule.peak) == ((25, 24), 1536)
    assert reasons(schedule) == {"g1": AT_ONCE, "g2": HIDDEN, **dict.fromkeys(GATHERS[2:], MEMORY)}


def test_O2_a_limit_too_small_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(MemoryLimitError, match="raise the limit to at least 1536") as refused:
        scheduled(ZERO3, ZERO3_SECONDS, memory_limit=1535)
    assert refused.value.least == 1536
    schedule, _ = scheduled(ZERO3, ZERO3_SECONDS, memory_limit=1536)
    assert schedule.peak == 1536


def test_O1_a_gather_that_is_needed_soon_goes_before_a_scatter_that_is_not() -> None:
    schedule, body = scheduled(SHARED_LINK, SHARED_LINK_SECONDS)
    assert body == "h2 h1 v2 b2 r2 e v1 b1 r1 d2 u2 d1 u1"
    assert seconds(schedule) == (20, 13)
    assert reasons(schedule) == {"h2": AT_ONCE, "h1": HIDDEN, "r2": HIDDEN, "r1": NOTHING_LEFT}


UPDATED = """
x: f32[4] = input("x")
a: f32[4] = aten.neg(x)
s1: f32[2] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
r1: f32[2] = c10d.wait_tensor(s1)
u1: f32[2] = aten.exp(r1)
b: f32[4] = aten.sin(a)
s2: f32[2] = c10d.reduce_scatter_tensor(b, "sum", 2, "dp")
r2: f32[2] = c10d.wait_tensor(s2)
c: f32[4] = aten.cos(b)
g1: f32[4] = c10d.all_gather_into_tensor(u1, 2, "dp")
w1: f32[4] = c10d.wait_tensor(g1)
return output("w1", w1), output("r2", r2), output("c", c)
"""


def test_O1_what_is_gathered_for_the_results_is_gathered_before_others_need_the_link() -> None:
    """Of updates like zero1's, the first: when it can be, not when it still just could if nothing else travelled."""
    travel, computation = {"s1": 1, "g1": 3, "s2": 6}, {"a": 1, "u1": 1, "b": 5, "c": 6}
    schedule, body = scheduled(UPDATED, travel | computation)
    assert body == "a s1 r1 u1 g1 b s2 c r2 w1"
    assert seconds(schedule) == (23, 14)


def test_O1_tensor_parallel_sums_travel_under_the_weights_gradients() -> None:
    schedule, body = scheduled(TP, TP_SECONDS)
    assert body == "d2 s2 gw2 f2 d1 s1 gw1 f1"
    assert seconds(schedule) == (12, 8)
    assert reasons(schedule) == {"s2": HIDDEN, "s1": HIDDEN}


def test_O1_two_groups_travel_together() -> None:
    schedule, body = scheduled(TWO_GROUPS, {"s": 3, "t": 3, "a": 2, "b": 1, "c": 1})
    assert body == "s t a ws wt b c"
    assert seconds(schedule) == (10, 5)


def test_O1_random_numbers_are_drawn_in_their_order() -> None:
    schedule, body = scheduled(RANDOM, {"s": 3, "a": 1, "r1": 1, "r2": 1, "r3": 1, "e": 2})
    assert body == "r1 s e w a r2 r3"
    assert seconds(schedule) == (9, 7)


def test_O1_what_is_written_is_read_after() -> None:
    schedule, body = scheduled(MUTATION, {"s": 3, "add_": 1, "read": 1, "other": 2})
    assert body == "s other w add_ read"
    assert seconds(schedule) == (7, 5)


def test_O1_a_collective_that_needs_another_starts_as_soon_as_that_has_arrived() -> None:
    schedule, body = scheduled(CHAIN, {"s": 1, "t": 1, "y": 1, "a": 1, "b": 1, "c": 1})
    assert body == "s a ws v t b wt y c"
    assert seconds(schedule) == (6, 4)


def test_O1_nothing_to_hide_under_changes_nothing() -> None:
    schedule, body = scheduled(NOTHING_TO_HIDE, {"s": 3, "a": 1, "b": 1})
    assert body == "a s w b"
    assert (schedule.chosen, seconds(schedule)) == ("as it stands", (5, 5))
    assert reasons(schedule) == {"s": AT_ONCE}


def test_O1_coalesced_collectives_move_as_one() -> None:
    schedule, body = scheduled(COALESCED, {"both": 3, "a": 1, "b": 1, "y": 1, "c": 2})
    assert body == "a b both one two c w1 w2 y"
    assert seconds(schedule) == (8, 6)


def test_O1_what_is_urgent_goes_first_on_the_link() -> None:
    costs = {"s1": 5, "s2": 5, "s3": 1, "g1": 1, "g2": 1, "n": 1, "c": 8, "u1": 1, "u2": 1}
    schedule, body = scheduled(URGENT, costs)
    assert body == "n s3 g1 s1 g2 s2 w3 c w1 u1 w2 u2"
    assert seconds(schedule) == (24, 13)


def test_O1_what_queues_for_a_link_lets_the_urgent_pass() -> None:
    schedule, body = scheduled(QUEUED, {"g0": 1, "g1": 1, "n": 1, "s0": 6, "s1": 6, "s2": 1, "c": 8})
    assert body == "g0 s0 g1 n s2 s1 w2 c w0 w1"
    assert schedule.seconds == 16


def test_O2_the_order_of_least_memory_gathers_late_waits_at_once_and_frees_first() -> None:
    program = program_of(WASTEFUL)
    problem = scheduling_problem(program, costs_of(program, {"g": 1, "r": 1}))
    order = lean_order(problem)
    assert [problem.nodes[index].name for index in order] == ["a", "r", "d", "b", "z", "g", "w", "y"]
    assert (peak_of(problem, problem.movable), peak_of(problem, order)) == (1152, 648)


def test_O1_less_memory_is_no_reason_to_be_slower_than_before() -> None:
    def candidate(seconds: float, peak: int) -> _Candidate:
        return _Candidate("", (), Prediction(seconds, 0.0, peak, {}))

    before, fast, lean, slow = candidate(1.0, 100), candidate(0.995, 200), candidate(0.999, 90), candidate(1.004, 10)
    assert _best([before, fast, lean, slow], None) is lean
    assert _best([before, fast, slow], None) is before
    assert _best([before, fast, slow], 20) is slow


def scatters(travel: float) -> tuple[str, dict[str, float]]:
    """A chain of gradients, each scattered, all updated at the end."""
    lines = ['x: f32[64] = input("x")']
    for layer in range(4):
        lines.append(f"g{layer}: f32[64] = aten.exp({f'g{layer - 1}' if layer else 'x'})")
        lines.append(f'r{layer}: f32[32] = c10d.reduce_scatter_tensor(g{layer}, "sum", 2, "dp")')
    lines += [f"d{layer}: f32[32] = c10d.wait_tensor(r{layer})" for layer in range(4)]
    lines += [f"u{layer}: f32[32] = aten.neg(d{layer})" for layer in range(4)]
    lines.append("return " + ", ".join(f'output("{layer}", u{layer})' for layer in range(4)))
    costs = {f"{kind}{layer}": cost for layer in range(4) for kind, cost in {"g": 4, "r": travel, "u": 1}.items()}
    return "\n".join(lines), costs


def test_O2_a_scatter_is_waited_for_when_it_has_arrived_since_it_holds_what_it_sends() -> None:
    schedule, body = scheduled(*scatters(travel=1))
    assert body == "g0 r0 g1 d0 r1 g2 d1 r2 g3 d2 r3 u0 u1 d3 u2 u3"
    assert (schedule.peak_before, schedule.peak) == (4 * 256 + 4 * 128, 2 * 256 + 3 * 128)


def test_O2_under_a_limit_scatters_are_waited_for_before_they_have_arrived() -> None:
    free, _ = scheduled(*scatters(travel=8))
    bound, body = scheduled(*scatters(travel=8), memory_limit=1200)
    assert body == "g0 r0 g1 r1 g2 r2 d0 g3 d1 r3 u0 u1 d2 u2 d3 u3"
    assert (free.peak, bound.peak) == (1536, 1152)
    assert (free.seconds, bound.seconds) == (37, 37)
    assert reasons(bound) == {"r0": HIDDEN, "r1": MEMORY, "r2": BUSY, "r3": BUSY}


def test_a_schedule_prints() -> None:
    schedule, _ = scheduled(TP, {name: 1e-3 * value for name, value in TP_SECONDS.items()})
    assert str(schedule) == (
        "longest way first: 12.000 ms -> 8.000 ms, peak 1,024 -> 1,024 bytes\n"
        "s2: travels 2.000 ms, exposed 0.000 ms: it travels under computation\n"
        "s1: travels 2.000 ms, exposed 0.000 ms: it travels under computation\n"
        "w1 w2 x d2 s2 gw2 f2 d1 s1 gw1 f1 output"
    )


def test_planning_is_pure_and_always_the_same() -> None:
    program = program_of(DDP)
    before = str(program)
    first = plan_schedule(program, costs_of(program, DDP_SECONDS))
    again = program_of(DDP)
    assert plan_schedule(again, costs_of(again, DDP_SECONDS)) == first
    assert str(program) == before
    assert hash(first) == hash(plan_schedule(program, costs_of(program, DDP_SECONDS)))


def test_the_peak_is_what_the_memory_curve_says() -> None:
    program = program_of(ZERO3)
    costs = costs_of(program, ZERO3_SECONDS)
    schedule = plan_schedule(program, costs)
    assert memory_curve(program).peak == schedule.peak_before
    assert apply_schedule(program, schedule)
    assert memory_curve(program).peak == schedule.peak
    assert not apply_schedule(program, schedule)


def test_a_schedule_of_another_program_is_refused() -> None:
    program, other = program_of(DDP), program_of(TP)
    schedule = plan_schedule(program, costs_of(program, DDP_SECONDS))
    with pytest.raises(RewriteError, match="the schedule has 15 nodes, the program 12 and no a1"):
        apply_schedule(other, schedule)


@pytest.mark.parametrize("between", ["aten.neg(x)", 'symm_mem.one_shot_all_reduce(x, "sum", "dp")'])
def test_nothing_passes_what_communicates_in_a_way_we_do_not_know(between: str) -> None:
    """Of sends and the like, ranks may have different ones: the order of their group stays."""
    text = f"""
        x: f32[64] = input("x")
        s: f32[64] = c10d.all_reduce(x, "sum", "dp")
        w: f32[64] = c10d.wait_tensor(s)
        b: f32[64] = {between}
        t: f32[64] = c10d.all_reduce(x, "max", "dp")
        v: f32[64] = c10d.wait_tensor(t)
        n: f32[64] = aten.neg(v)
        return output("w", w), output("b", b), output("n", n)
    """
    _, body = scheduled(text, {"s": 4, "t": 4, "b": 1, "n": 4})
    assert body == ("t s b v n w" if "aten" in between else "s b t v n w")
