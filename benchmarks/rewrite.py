"""Pattern matchers compared: ours, torch.fx's subgraph rewriter and Inductor's, on the same graphs in one run.

    python -m benchmarks.rewrite

Each matcher is given the same two rules, `t(t(x)) -> x` and `neg(neg(x)) -> x`, on graphs where one node in ten starts
a match, and on graphs of the same size without any of their ops. Seconds are medians of three.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.rewrite import Rule, apply_rules

_aten = torch.ops.aten
_RULES = ("aten.t(aten.t(x))", _aten.t.default), ("aten.neg(aten.neg(x))", _aten.neg.default)


def graph_module(nodes: int, *, matching: bool) -> fx.GraphModule:
    """A chain of pointwise ops with a pair of `t` or `neg` in every twenty nodes, or with none."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4, device="meta")
    for index in range(nodes):
        pair = _RULES[index // 20 % 2][1]
        x = graph.call_function(pair if matching and index % 20 < 2 else _aten.relu.default, (x,))
        x.meta["val"] = torch.empty(4, 4, device="meta")
    graph.output((x,))
    return fx.GraphModule(torch.nn.Module(), graph)


def ours(module: fx.GraphModule) -> Callable[[], int]:
    """Worklist, rules indexed by root operator."""
    program: Program = from_graph_module(module)
    rules = [Rule(text, text, lambda match: match["x"]) for text, _ in _RULES]
    return lambda: sum(apply_rules(program, rules).counts.values())


def torch_fx(module: fx.GraphModule) -> Callable[[], int]:
    """`torch.fx.subgraph_rewriter`: each pattern traced, each node tried."""
    from torch.fx.subgraph_rewriter import replace_pattern

    def run() -> int:
        done = 0
        for _, op in _RULES:
            done += len(replace_pattern(module, _twice(op), lambda x: _aten.alias.default(x)))
        return done

    return run


def _twice(op: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: op(op(x))


def inductor(module: fx.GraphModule) -> Callable[[], int]:
    """Inductor's pattern matcher, as its post-grad passes use it."""
    from torch._inductor import pattern_matcher as matcher

    rules = matcher.PatternMatcherPass()
    for _, op in _RULES:
        pattern = matcher.CallFunction(op, matcher.CallFunction(op, matcher.KeywordArg("x")))

        def handler(match: matcher.Match, x: fx.Node) -> None:
            match.output_node().replace_all_uses_with(x)
            match.erase_nodes()

        matcher.register_graph_pattern(pattern, pass_dict=rules)(handler)
    return lambda: rules.apply(module.graph)


def timed(make: Callable[[fx.GraphModule], Callable[[], int]], nodes: int, *, matching: bool) -> tuple[float, int]:
    """Median seconds of three fresh runs, and how many matches were replaced."""
    seconds, done = [], 0
    for _ in range(3):
        run = make(graph_module(nodes, matching=matching))
        start = time.perf_counter()
        done = run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), done


def main() -> None:
    """Print the table."""
    table = Table("matcher", "nodes", "replaced", "ms, with matches", "us a node", "ms, without any")
    for name, make in (("crossfade", ours), ("torch.fx", torch_fx), ("inductor", inductor)):
        for nodes in (1_000, 10_000):
            seconds, done = timed(make, nodes, matching=True)
            idle, _ = timed(make, nodes, matching=False)
            row = (
                name,
                f"{nodes:,}",
                str(done),
                f"{seconds * 1e3:.1f}",
                f"{seconds / nodes * 1e6:.1f}",
                f"{idle * 1e3:.1f}",
            )
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
