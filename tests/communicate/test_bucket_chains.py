"""Where every collective depends on the one before, the short way to no plan says what the long way says."""

from __future__ import annotations

import itertools

import pytest

from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_plan import plan_buckets, plan_chain
from crossfade.communicate.buckets import BucketPass
from crossfade.graph.order import Order
from crossfade.graph.program import Program
from crossfade.graph.text import parse

CALLS = {
    BucketAllReduces: 'c10d.all_reduce({}, "sum", "dp")',
    BucketAllGathers: 'c10d.all_gather_into_tensor({}, 2, "dp")',
}


def chain(
    kind: type[BucketPass], *, links: int = 4, shared: int | None = None, then: str = "y = aten.exp({})"
) -> Program:
    """Collectives in a row; the one numbered `shared` reads the input instead, so that it is no link of the chain."""
    lines, last = ['x: f32[4] = input("x")'], "x"
    for i in range(links):
        source = "x" if i == shared else last
        lines += [
            f"n{i} = aten.neg({source})",
            f"s{i} = {CALLS[kind].format(f'n{i}')}",
            f"w{i} = c10d.wait_tensor(s{i})",
        ]
        last = f"w{i}"
    text = "\n".join([*lines, then.format(last), 'return output("y", y)'])
    return parse(text, groups={"dp": 2, "tp": 2})


@pytest.mark.parametrize(("kind", "links", "cap"), [*itertools.product(CALLS, (1, 2, 4), (1.0, 40 / 2**20))])
@pytest.mark.parametrize("then", ["y = aten.exp({})", 'z = c10d.all_reduce({}, "max", "tp")\ny = c10d.wait_tensor(z)'])
def test_the_same_verdicts(kind: type[BucketPass], links: int, cap: float, then: str) -> None:
    if "all_reduce" in then and kind is BucketAllReduces:
        then = then.replace('all_reduce({}, "max"', 'reduce_scatter_tensor({}, "sum", 2')
    program = chain(kind, links=links, then=then)
    chosen = kind(cap_mb=cap)
    policy = chosen._policy(program)
    short = plan_chain(program.graph, chosen.kind, policy)
    assert short is not None and short.buckets == ()
    assert short == plan_buckets(Order(program.graph), chosen.kind, policy)[0]
    assert short == chosen.plan(program)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("shared", [1, 2, 3])
def test_what_is_no_chain_is_planned(kind: type[BucketPass], shared: int) -> None:
    program = chain(kind, shared=shared)
    assert plan_chain(program.graph, kind.kind, kind()._policy(program)) is None
