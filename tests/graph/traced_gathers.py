"""Graphs with gathers and scatters as torch spells them, and all ranks of one in one process to compare with."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.gathers import Gather, Scatter, find_gathers, find_scatters
from crossfade.graph.matmuls import Product
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.relayouts import Refusal
from crossfade.graph.text import parse

RANKS = 2
Values = dict[fx.Node, Any]


@contextmanager
def fake_group(ranks: int = RANKS) -> Iterator[Any]:
    """A process group that communicates with nobody, for tracing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def traced(function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> Program:
    """A function of tensors with functional collectives, as a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # older names of the same functions
        module = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    return from_graph_module(module)


def random_inputs(graph: fx.Graph, ranks: int) -> list[list[Any]]:
    """Small whole numbers for the inputs of each rank, whose sums are exact in any order; a lone one is the rank."""

    def value_for(node: fx.Node, rank: int) -> Any:
        value = node.meta["val"]
        if not isinstance(value, Tensor):  # a mesh: no operator reads it
            return None
        if value.dim() == 0 and value.dtype == torch.int64:
            return torch.tensor(rank)
        made = torch.randint(-3, 4, [int(size) for size in value.shape]).to(torch.float32)
        return made.to(value.dtype)

    return [[value_for(node, rank) for node in graph.find_nodes(op="placeholder")] for rank in range(ranks)]


def run_ranks(graph: fx.Graph, inputs: Sequence[Sequence[Any]]) -> list[Values]:
    """The values of every node on every rank, collectives done by hand."""
    ranks: list[Values] = [{} for _ in inputs]
    for node in graph.nodes:
        if node.op == "placeholder":
            number = len(ranks[0])
            for values, given in zip(ranks, inputs, strict=True):
                values[node] = given[number]
        elif node.op == "call_function":
            for values, made in zip(ranks, _step(node, ranks), strict=True):
                values[node] = made
    return ranks


def _step(node: fx.Node, ranks: list[Values]) -> list[Any]:
    collective = collectives.view(node)
    if collective is not None:
        sent = [values[collective.inputs[0]] for values in ranks]
        if collective.kind is Kind.ALL_GATHER:
            return [torch.cat(sent)] * len(ranks)
        assert collective.kind is Kind.REDUCE_SCATTER
        return list(_reduced(sent, collective.reduce_op).chunk(len(ranks)))
    calls = [fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in ranks]
    return [args[0] if collectives.is_wait(node) else node.target(*args, **kwargs) for args, kwargs in calls]  # type: ignore[operator]


def _reduced(parts: list[Tensor], reduce_op: str | None) -> Tensor:
    stacked = torch.stack(parts)
    return stacked.sum(0) if reduce_op == "sum" else stacked.mean(0)


def check_gather(gather: Gather, ranks: list[Values]) -> None:
    """The result is the parts along the dim, on every rank."""
    whole = torch.cat([values[gather.part] for values in ranks], gather.dim)
    if gather.trim is not None:
        whole = whole.narrow(gather.dim, 0, int(gather.trim))
    for values in ranks:
        for node in (gather.result, *gather.also):
            assert torch.equal(values[node], whole), f"{node.name} is not the parts along dim {gather.dim}"
    assert gather.ranks == len(ranks) and gather.result.meta["val"].dtype == gather.part.meta["val"].dtype


def check_scatter(scatter: Scatter, ranks: list[Values]) -> None:
    """The result is each rank's part of the sum along the dim."""
    parts = _reduced([values[scatter.whole] for values in ranks], scatter.reduce_op).chunk(len(ranks), scatter.dim)
    for values, part in zip(ranks, parts, strict=True):
        for node in (scatter.result, *scatter.also):
            assert torch.equal(values[node], part), f"{node.name} is not the own part along dim {scatter.dim}"


def check_product(product: Product, values: Values) -> None:
    """The equation gives the node's value."""

    def shaped(node: fx.Node, shape: Any) -> Tensor:
        return values[node] if shape is None else values[node].view([int(size) for size in shape])

    operand, other = shaped(product.operand, product.operand_shape), shaped(product.other, product.other_shape)
    if product.scales is not None and product.scale_shapes is not None:
        (scale, of_other), (shape, other_shape) = product.scales, product.scale_shapes
        assert scale is not None and of_other is not None
        operand, other = operand.float() * shaped(scale, shape), other.float() * shaped(of_other, other_shape)
    made = torch.einsum(product.equation, operand, other).contiguous()
    if product.bias is not None:
        made = made + shaped(product.bias, product.bias_shape)
    assert tuple(made.shape) == tuple(int(size) for size in product.shape)
    wanted = values[product.node]
    assert product.dtype == wanted.dtype
    torch.testing.assert_close(made.to(product.dtype).view(wanted.shape), wanted)
    sizes = dict(zip(product.result_letters, product.shape, strict=True))
    for group, size in zip(product.letters, wanted.shape, strict=True):
        assert size == torch.Size([int(sizes[letter]) for letter in group]).numel()


def checked(program: Program, ranks: int = 2) -> list[Gather | Scatter]:
    """What is found in a program, compared with what its nodes hold on all ranks."""
    gathers, verdicts = find_gathers(program.graph)
    scatters, more = find_scatters(program.graph)
    assert not verdicts and not more, [str(verdict) for verdict in verdicts + more]
    values = run_ranks(program.graph, random_inputs(program.graph, ranks))
    for gather in gathers:
        check_gather(gather, values)
    for scatter in scatters:
        check_scatter(scatter, values)
    for moved in (*gathers, *scatters):
        ends = (moved.part if isinstance(moved, Gather) else moved.whole), moved.result
        assert ends[0] not in moved.nodes and ends[1] in moved.nodes and list(moved.nodes) == sorted(moved.nodes)
        assert set(moved.collective.nodes) <= set(moved.nodes)
    return [*gathers, *scatters]


Found = Product | Refusal


def read_lines(lines: str) -> dict[str, fx.Node]:
    """The nodes by name of a program that returns its last line."""
    body = textwrap.dedent(lines).strip()
    last = body.rpartition("\n")[2].partition(":")[0]
    program = parse(f'{body}\nreturn output("last", {last})')
    return {node.name: node for node in program.graph.nodes}


def said(found: Found) -> str:
    """The equation of a product, with the shapes in which its parts are taken; or the refusal."""
    if isinstance(found, Refusal):
        return f"{found.reason}: {found.detail}"
    shapes = {"operand": found.operand_shape, "other": found.other_shape, "bias": found.bias_shape}
    given = [f"{name} {list(shape)}" for name, shape in shapes.items() if shape is not None]
    for name, shape in zip(("scale", "other scale"), found.scale_shapes or (), strict=False):
        given += [f"{name} {list(shape)}"] if shape is not None else []
    return ", ".join([f"{found.equation} {list(found.shape)}", *given])


def compared(found: Found, graph: fx.Graph) -> Found:
    """The product, after its numbers were compared with its node's."""
    if isinstance(found, Product):
        (values,) = run_ranks(graph, random_inputs(graph, 1))
        check_product(found, values)
        assert found.matmul in found.nodes and found.operand not in found.nodes
    return found
