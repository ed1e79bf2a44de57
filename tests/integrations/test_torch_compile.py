"""`torch.compile(model, backend="crossfade")` in one process: numbers as eagerly, and an account of each graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from crossfade.errors import CrossfadeError
from crossfade.graph.text import parse
from crossfade.integrations import torch_compile
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from tests.integrations.compiled import (
    EAGERLY,
    Broken,
    Network,
    Transformer,
    compare,
    needs_compiler,
    rows,
    tokens,
)

BOTH = [pytest.param(EAGERLY, id="eager"), pytest.param({}, id="inductor", marks=needs_compiler)]


def graphs(found: list[cf.Report]) -> list[str]:
    return [report.facts["graph"] for report in found]


@pytest.mark.parametrize("given", BOTH)
def test_a_network_trains_as_eagerly_at_every_size(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found = compare(Network(), [rows(size, size) for size in (4, 4, 6, 9)], given)
    assert graphs(found) == ["forward", "backward"] * 2  # the second time for any size
    assert all(report.nodes_after < report.nodes_before for report in found if report.facts["runs"] != "Inductor")
    assert {report.facts["runs"] for report in found} == {"node after node" if given else "Inductor"}


@pytest.mark.parametrize("given", BOTH)
def test_C5_a_transformer_trains_as_eagerly(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert graphs(compare(Transformer(), [tokens(3, seed) for seed in range(3)], given)) == ["forward", "backward"]


def test_symbolic_sizes_are_inputs() -> None:
    torch.manual_seed(0)
    found = compare(Network(), [rows(size) for size in (4, 6)], EAGERLY, dynamic=True)
    assert graphs(found) == ["forward", "backward"]
    assert 'input("' in found[0].program and "s" in found[0].program.partition("f32[s")[2]


def test_a_graph_break_gives_a_graph_on_either_side() -> None:
    torch.manual_seed(0)
    found = compare(Broken(), [rows(4, seed) for seed in range(3)], EAGERLY)
    assert graphs(found) == ["forward", "forward", "backward", "backward"]


@needs_compiler
def test_a_mode_is_passed_on_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch_compile, "compile_with_inductor", lambda module, *rest: asked.append(rest[-1]) or module)
    for given in ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"fallback-random": True}}):
        torch._dynamo.reset()
        torch.compile(torch.relu, backend="crossfade", **given)(torch.ones(2))  # type: ignore[call-overload]
    assert asked == [{"max_autotune": True, "coordinate_descent_tuning": True}, {"fallback_random": True}]


def copies(x: Tensor) -> tuple[Tensor, ...]:
    return x.clone(), x + 0, x.view(-1), (x * 2).view(-1)


def writes(x: Tensor) -> tuple[Tensor, ...]:
    before = x * 1
    x.add_(1)
    return before, x + 0


def twice(x: Tensor) -> tuple[Tensor, ...]:
    y = x.relu()
    return y, y, y[0]


def drops(x: Tensor) -> tuple[Tensor, ...]:
    return F.dropout(x, 0.5), F.dropout(x, 0.5)


def memory(values: list[Tensor]) -> list[list[bool]]:
    """Which of some tensors share memory."""
    starts = [value.untyped_storage().data_ptr() for value in values]
    return [[start == other for other in starts] for start in starts]


@pytest.mark.parametrize("given", [EAGERLY, pytest.param({"options": {"fallback_random": True}}, marks=needs_compiler)])
@pytest.mark.parametrize("function", [copies, writes, twice, drops])
def test_results_share_memory_and_numbers_are_drawn_as_by_torch(
    function: Callable[[Tensor], tuple[Tensor, ...]], given: dict[str, Any]
) -> None:
    # Inductor of torch 2.15 by itself returns `x` for `x + 0`: there it is what results are compared with.
    plainly = function if given is EAGERLY else torch.compile(function, backend="inductor", **given)
    found = []
    for call in (function, plainly, torch.compile(function, backend="crossfade", **given)):
        torch._dynamo.reset()
        torch.manual_seed(1)
        x = torch.arange(12.0).view(3, 4)
        found.append([x, *call(x)])
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
    assert memory(found[2]) == memory(found[1])


@needs_compiler
def test_a_graph_that_plain_torch_compile_has_cached_is_still_ours() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 1).cos() * 3

    for name in ("inductor", "crossfade"):
        torch._dynamo.reset()
        cf.reports(clear=True)
        torch.compile(function, backend=name)(torch.ones(5))
        assert len(cf.reports()) == (name == "crossfade")


def test_torch_finds_the_backend_by_itself() -> None:
    program = (
        "import sys, torch;"
        "f = torch.compile(lambda x: x * 2, backend='crossfade', options={'inductor': False});"
        "print(f(torch.ones(1)).item(), len(sys.modules['crossfade'].reports()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.split() == ["2.0", "1"], result.stderr[-2000:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"inductr": False}}, "the option 'inductr' .*did you mean inductor"),
        ({"options": {"inductor": "no"}}, "'inductor' .* as 'no': expected True or False"),
        ({"options": {"inductor": False, "max_autotune": True}}, "max_autotune, and inductor=False"),
        ({"options": {"inductor": False, "without": ["bucket-gathers"]}}, "bucket-all-gathers"),
    ],
)
def test_wrong_options_are_told(given: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(torch.relu, backend="crossfade", **given)(torch.ones(2))


def test_passes_are_chosen() -> None:
    for given, names in (
        ({"passes": [RemoveDeadCode()]}, ["remove-dead-code"]),
        ({"without": ["simplify-nodes"]}, None),
    ):
        torch._dynamo.reset()
        cf.reports(clear=True)
        options = {"inductor": False, **given}
        torch.compile(nn.Linear(2, 2), backend="crossfade", options=options)(torch.ones(1, 2))
        ran = [record.name for record in cf.reports()[0].records]
        assert ran == names if names is not None else ran and "simplify-nodes" not in ran


def test_what_copy_engines_carry_is_not_for_inductor() -> None:
    text = """
    x: f32[4, 4] = input("x")
    s: f32[8, 4] = crossfade.all_gather_by_copy_engines(x, 2, "dp")
    w: f32[8, 4] = c10d.wait_tensor(s)
    return output("w", w)
    """
    module = parse(text, groups={"dp": 2}).module()
    given = torch_compile._Options.of(None, {"passes": []})
    with pytest.raises(
        CrossfadeError, match=r"s, an all-gather by copy engines, in a graph for Inductor.*inductor=False"
    ):
        given.improved(module, "forward")
    assert callable(given.executable(module, "forward"))


def test_the_last_reports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cf.reports(clear=True)
    for size in range(torch_compile.KEPT + 3):
        torch_compile._reports.append(cf.Report(str(size)))
    kept = cf.reports(clear=True)
    assert (len(kept), kept[0].title) == (torch_compile.KEPT, "3")
    assert cf.reports() == []
