"""Products in graphs as torch and our own shard stage trace them, sampled ones, and those of symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from crossfade.graph.gathers import Gather, Scatter, find_gathers
from crossfade.graph.matmuls import SIZE_ONLY, Product, product_before, products_of
from crossfade.graph.private import guards_of
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.relayouts import Refusal
from crossfade.graph.text import parse
from tests.graph.traced_gathers import check_product, checked, fake_group, random_inputs, run_ranks, traced
from tests.growth import grows_linearly


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with fake_group() as made:
        yield made


def fusions(program: Program) -> list[tuple[str, int, list[str]]]:
    """Each gather and scatter with its dim and the products beside it, all compared with the values of all ranks."""
    found: list[tuple[str, int, list[str]]] = []
    values = run_ranks(program.graph, random_inputs(program.graph, 2))
    for moved in checked(program):
        gathers = isinstance(moved, Gather)
        beside = products_of(moved.result, moved.also) if isinstance(moved, Gather) else [product_before(moved.whole)]
        for product in beside:
            if isinstance(product, Product):
                check_product(product, values[1])
        words = [product.equation if isinstance(product, Product) else product.reason for product in beside]
        found.append(("gather" if gathers else "scatter", moved.dim, words))
    return found


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def test_a_sequence_parallel_layer_of_dtensors_forward_and_backward(group: Any) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    kept: list[Program] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(from_graph_module(module))
        return make_boxed_func(module)

    layers = Layers()
    styles = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(layers, init_device_mesh("cpu", (2,)), styles)
    compiled = torch.compile(layers, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    compiled(torch.zeros(4, 6, 8, requires_grad=True)).sum().backward()
    forward, backward = map(fusions, kept)
    other = "something else than a matmul reads it"
    assert forward == [("gather", 1, ["abc,cd->abd", other]), ("scatter", 1, ["abc,cd->abd"])]
    assert backward == [("gather", 1, ["abc,cd->abd", "abc,abd->cd", other]), ("scatter", 1, ["abc,cd->abd"])]


def test_a_sequence_parallel_layer_of_our_shard_stage() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    import crossfade as cf

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layers(), Layers()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x)
            return x + self.second(x)

    exported = torch.export.export(Twice().eval(), (torch.zeros(4, 6, 8),))
    plan = {"*.up": "colwise", "*.down": RowwiseParallel(output_layouts=Shard(1))}
    local = cf.shard(exported, {"tp": 2}, plan, rank=0).program
    inputs = [node.meta["val"] for node in local.graph.find_nodes(op="placeholder")]
    real = [torch.zeros([int(size) for size in value.shape], dtype=value.dtype) for value in inputs]
    found = fusions(traced(local.graph_module, *real))
    assert [entry for entry in found if entry[0] == "scatter"] == [("scatter", 1, ["abc,cd->abd"])] * 2
    assert all(dim == 1 for _, dim, _ in found)
    assert any("abc,cd->abd" in words for kind, _, words in found if kind == "gather")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_symbolic_sizes_add_no_guard(group: Any, dim: int) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return functional.all_gather_tensor(x, dim, group) @ w

    program = traced(function, torch.zeros(4, 6, 8), torch.zeros(16 if dim == 2 else 8, 5), symbolic=True)
    mode = program.placeholders[0].meta["val"].fake_mode
    kept = guards_of(mode)
    ((found,), _) = find_gathers(program.graph)
    readers = products_of(found.result)
    (product,) = [reader for reader in readers if isinstance(reader, Product)]
    assert {reader.reason for reader in readers if isinstance(reader, Refusal)} <= {SIZE_ONLY}
    assert (found.dim, product.equation) == (dim, "abc,cd->abd")
    assert guards_of(mode) == kept


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def _flat(x: Tensor, w: Tensor) -> Tensor:
    return (x.flatten(0, -2) @ w.t()).view(*x.shape[:-1], -1)


def _turned(x: Tensor, w: Tensor) -> Tensor:
    return (w @ x.flatten(0, -2).t()).t().reshape(*x.shape[:-1], -1)


def _batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x.view(-1, *x.shape[-2:]), w.t().expand(x[..., 0, 0].numel(), -1, -1)).view(*x.shape[:-1], -1)


def _gradient(x: Tensor, w: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    return rows.t() @ w.t()[: rows.shape[1]].sum(0).expand(rows.shape[0], -1).contiguous()


SPELLINGS: list[Callable[[Tensor, Tensor], Tensor]] = [_linear, _flat, _turned, _batched, _gradient]


@given(
    st.sampled_from(SPELLINGS),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=80, deadline=None)
def test_sampled_products_both_ways(
    spelling: Callable[[Tensor, Tensor], Tensor], shape: list[int], columns: int, dtype: torch.dtype
) -> None:
    program = traced(spelling, torch.zeros(shape, dtype=dtype), torch.zeros(columns, shape[-1], dtype=dtype))
    (values,) = run_ranks(program.graph, random_inputs(program.graph, 1))
    x, *_ = program.graph.nodes
    found = [reader for reader in products_of(x) if isinstance(reader, Product)]
    assert len(found) == 1
    check_product(found[0], values)
    assert found[0].operand is x and len(found[0].operand_letters) == len(shape)
    made = product_before(program.results[0])
    assert isinstance(made, Product), str(made)
    check_product(made, values)
    assert made.matmul is found[0].matmul


def test_many_readers_take_linear_work() -> None:
    def work(size: int) -> Any:
        lines = ['x: f32[2, 3, 8] = input("x")', 'w: f32[8, 4] = input("w")']
        for number in range(size):
            lines += [f"v{number}: f32[6, 8] = aten.view(x, [6, 8])", f"m{number}: f32[6, 4] = aten.mm(v{number}, w)"]
        graph = parse("\n".join([*lines, 'return output("y", m0)'])).graph
        x, *_ = graph.nodes
        return lambda: products_of(x)

    grows_linearly(work, 50)


def test_a_scatter_is_found_behind_its_product(group: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(x @ w, "avg", 2, group)

    program = traced(function, torch.zeros(4, 6, 8), torch.zeros(8, 10))
    assert fusions(program) == [("scatter", 2, ["abc,cd->abd"])]
    (found,) = checked(program)
    assert isinstance(found, Scatter)
    product = product_before(found.whole)
    assert isinstance(product, Product) and product.result_dim(found.dim, found.ranks) == 2
