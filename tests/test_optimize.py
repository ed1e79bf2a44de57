"""`optimize`: a graph that is broken when it is given is said to be so, whatever the rule and the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from crossfade.communicate.sink_waits import SinkWaits
from crossfade.errors import PassError, VerifyError
from crossfade.graph.passes import Numerics, Pass, PassResult, run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.pipeline import optimize

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
    drop_the_wait: 's = c10d.all_gather_into_tensor(n, 2, "dp") [train.py:12], never waited for',
    read_before_the_wait: "e = aten.exp(s) [train.py:12], which reads s before its wait",
    write_what_is_read: "add__tensor = aten.add_.Tensor(n, 1) [train.py:12], which writes n before the wait of s",
    forget_metadata: "n = aten.neg(x) [train.py:12], without metadata",
    use_before_definition: "a malformed graph (Argument 'n' of Node 's' was used before it has been defined!",
    communicate_elsewhere: "s = c10d.all_gather_into_tensor(n, 2, \"tp\") [train.py:12], on group 'tp'",
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
    with pytest.raises(VerifyError, match=r"found in the graph given: s = .*, never waited for"):
        run_passes(program, [SinkWaits()])


class DropWaits(Pass):
    """Breaks what it is given."""

    name = "drop-waits"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        drop_the_wait(program.module(), {node.name: node for node in program.graph.nodes})
        return PassResult(True)


def test_a_pass_that_breaks_a_good_program_is_still_to_blame() -> None:
    with pytest.raises(
        PassError, match=r"pass drop-waits which left a broken program at node s: VerifyError: found s ="
    ):
        optimize(parse(GIVEN, groups=GROUPS).module(), passes=[SinkWaits(), DropWaits()])
