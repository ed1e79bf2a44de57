"""A rule that holds for some sizes only is declined, and leaves no condition behind."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.private import guards_of
from crossfade.graph.program import from_graph_module
from crossfade.graph.rewrite import Match, Rule, apply_rules


def test_a_rule_that_asks_for_a_size_is_declined():
    def asks(x: torch.Tensor) -> torch.Tensor:
        return x.abs() if x.shape[0] > 4 else x.relu()

    def replaced(match: Match) -> object:
        return match.splice(asks, match["x"])

    program = from_graph_module(make_fx(lambda x: x.neg(), tracing_mode="symbolic")(torch.ones(5, 3)))
    before = guards_of(program.fake_mode)
    done = apply_rules(program, [Rule("asks", "aten.neg(x)", replaced)])
    assert [reason for _, _, reason in done.declined] == ["it would hold for some sizes only"]
    assert not done.counts and guards_of(program.fake_mode) == before


def test_views_at_the_end_of_a_symbolic_dim_are_not_taken_for_static():
    """Their shape is static, their strides and their place in memory are not."""

    def last(x: torch.Tensor) -> torch.Tensor:
        return x[:, -1].neg()

    program = from_graph_module(make_fx(last, tracing_mode="symbolic")(torch.ones(3, 5)))
    done = apply_rules(program, [Rule("neg", "aten.neg(x)", lambda match: match.splice(torch.mul, match["x"], -1))])
    assert done.counts == {"neg": 1}
