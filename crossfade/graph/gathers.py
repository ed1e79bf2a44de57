"""All-gathers and reduce-scatters along any dim, recognised in whatever spelling a graph has.

The collectives themselves know dim 0 only. Another dim is a re-layout after a gather or before a scatter: pieces split
and joined, slices, a view and a permutation, bytes instead of elements. What is recognised is not the spelling but the
layout: a gather's result must read the parts of all ranks as `torch.cat` along one dim would have them, a scatter's
the own part of one dim. Whatever else reads the values in between is taken into account.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives, layouts
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.layouts import Factors, Layout, LayoutFactor, Size, Unreadable, merged, same
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Outcome, Verdict
from crossfade.graph.relayouts import Refusal, Spread, ancestors, laid_between, layout_of, spread
from crossfade.graph.text import render_type


@dataclass(frozen=True)
class Gather:
    """An all-gather along `dim`: `result` is the parts of all ranks, put together, and cut to `trim` if given.

    `part` is this rank's, in its true dtype and shape; `also` has further nodes that hold the same value as `result`;
    `nodes` has everything between the two in order, the result included.
    """

    collective: Collective
    part: fx.Node
    dim: int
    ranks: int
    result: fx.Node
    trim: Size | None
    nodes: tuple[fx.Node, ...]
    also: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Scatter:
    """A reduce-scatter along `dim`: `result` is this rank's part of the sum or mean of all ranks' `whole`.

    `whole` is the value before any re-layout for the collective; `also` has further nodes that hold the same value as
    `result` (a start that is itself a result of the program); `nodes` has everything between, the result included.
    """

    collective: Collective
    whole: fx.Node
    dim: int
    ranks: int
    reduce_op: str
    result: fx.Node
    nodes: tuple[fx.Node, ...]
    also: tuple[fx.Node, ...] = ()


def find_gathers(graph: fx.Graph) -> tuple[list[Gather], list[Verdict]]:
    """The all-gathers of a graph that put parts together along one dim, and a verdict on each other one.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 3, 8] = input("x")
    ... start: f32[8, 3, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
    ... done: f32[8, 3, 8] = c10d.wait_tensor(start)
    ... parts: (f32[4, 3, 8], f32[4, 3, 8]) = aten.split.Tensor(done, 4)
    ... first: f32[4, 3, 8] = parts[0]
    ... second: f32[4, 3, 8] = parts[1]
    ... whole: f32[4, 6, 8] = aten.cat([first, second], 1)
    ... return output("whole", whole)
    ... ''', groups={"tp": 2})
    >>> [(one.part.name, one.dim, one.result.name) for one in find_gathers(program.graph)[0]]
    [('x', 1, 'whole')]
    """
    return _sorted_out(_gather(found) for found in collectives.find(graph) if found.kind is Kind.ALL_GATHER)


def find_scatters(graph: fx.Graph) -> tuple[list[Scatter], list[Verdict]]:
    """The reduce-scatters of a graph that keep one part along one dim, and a verdict on each other one.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 6] = input("x")
    ... parts: (f32[4, 3], f32[4, 3]) = aten.split.Tensor(x, 3, 1)
    ... first: f32[4, 3] = parts[0]
    ... second: f32[4, 3] = parts[1]
    ... both: f32[8, 3] = aten.cat([first, second])
    ... start: f32[4, 3] = c10d.reduce_scatter_tensor(both, "sum", 2, "tp")
    ... done: f32[4, 3] = c10d.wait_tensor(start)
    ... return output("done", done)
    ... ''', groups={"tp": 2})
    >>> [(one.whole.name, one.dim, one.result.name) for one in find_scatters(program.graph)[0]]
    [('x', 1, 'done')]
    """
    return _sorted_out(_scatter(found) for found in collectives.find(graph) if found.kind is Kind.REDUCE_SCATTER)


def _sorted_out(found: Iterable[Any]) -> tuple[list[Any], list[Verdict]]:
    kept, verdicts = [], []
    for candidate in found:
        if isinstance(candidate, Refusal):
            verdicts.append(Verdict.of(candidate.node, Outcome.LEFT, candidate.reason, detail=candidate.detail))
        else:
            kept.append(candidate)
    return kept, verdicts


def _gather(gather: Collective) -> Gather | Refusal:
    if (refusal := _not_plain(gather)) is not None:
        return refusal
    best: Gather | None = None
    problem: Refusal | None = None
    for part in _parts(gather.inputs[0]):
        found = _gather_of(gather, part)
        if isinstance(found, Refusal):
            problem = problem or found
        elif best is None or len(_behind(found)) > len(_behind(best)):
            best = found
    return best or problem or Refusal(gather.node, "its input is not a tensor's bytes", _described(gather.inputs[0]))


def _parts(given: fx.Node) -> list[fx.Node]:
    """The values whose parts may be gathered, nearest first: only those before a change to bytes, if there is one."""
    chain = ancestors(given)
    if chain[-1].meta["val"].dtype == given.meta["val"].dtype and len({_dtype(node) for node in chain}) == 1:
        return chain
    erased = next(index for index, node in enumerate(chain) if _dtype(node) != _dtype(given))
    return chain[erased:]


def _gather_of(gather: Collective, part: fx.Node) -> Gather | Refusal:
    """The gather of one part, along the dim for which most of the re-layout after the collective belongs to it."""
    value: Tensor = part.meta["val"]
    own, size = layouts.of_tensor(value), layouts.product(value.shape) * value.element_size()
    try:
        sent = layout_of(gather.inputs[0], part)
    except Unreadable as error:
        return Refusal(gather.node, error.reason, f"from {part.name} to {gather.inputs[0].name}, {error.detail}")
    ranks = LayoutFactor(gather.group_size, size)
    reached = spread({gather.node: replace(sent, dims=(merged((ranks, *sent.dims[0])), *sent.dims[1:]))})
    wanted = {
        dim: replace(own, dims=(*own.dims[:dim], merged((ranks, *own.dims[dim])), *own.dims[dim + 1 :]))
        for dim in range(len(own.dims))
    }
    ends = _ends(reached, wanted, value.dtype)
    best: Gather | None = None
    early = ""
    for dim, found in ends.items():
        closed = _close(gather, reached, found)
        if isinstance(closed, str):
            early = closed
            continue
        results, between = closed
        held = _waited_for_again(results)
        cuts, trim = _trimmed(held, dim) if gather.node not in results else ([], None)
        if cuts:
            between, results = [*between, *held], cuts
        result = next(node for node in results if node is not gather.node)
        also = tuple(node for node in results if node is not result)
        nodes = tuple(sorted({*laid_between(part, gather.inputs[0]), *between, *results}))
        made = Gather(gather, part, dim, gather.group_size or 0, result, trim, nodes, also)
        if best is None or len(_behind(made)) > len(_behind(best)):
            best = made
    if best is not None:
        return best
    if early:
        return Refusal(gather.node, "something reads it before its parts are put together", early)
    apart = f"of {gather.group_size} {_described(part)}"
    return Refusal(gather.node, "its parts are not put together along one dim", apart)


def _behind(gather: Gather) -> list[fx.Node]:
    """What of a gather comes after its start."""
    return [node for node in gather.nodes if gather.collective.node < node]


def _ends(reached: Spread, wanted: dict[int, Layout], dtype: torch.dtype) -> dict[int, set[fx.Node]]:
    """For each dim, the values that are laid out as wanted for it."""
    found: dict[int, set[fx.Node]] = {}
    for node in reached.layouts:
        layout = reached.tensor(node)
        if layout is None or _dtype(node) != dtype:
            continue
        for dim, expected in wanted.items():
            if layouts.same_layout(layout, expected):
                found.setdefault(dim, set()).add(node)
    return found


def _close(collective: Collective, reached: Spread, ends: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]] | str:
    """The ends that all reading goes through, and what lies before them; or who reads something before."""
    results, between, seen = [], [], {collective.node}
    stack = [collective.node]
    while stack:
        node = stack.pop()
        outside = [user for user in node.users if user not in reached.layouts]
        if outside and (node is not collective.node or node not in ends):
            return f"{outside[0].name} reads {node.name}, {_described(node)}"
        between.append(node)
        if outside:
            results.append(node)
        for user in node.users:
            if user in seen or user not in reached.layouts:
                continue
            seen.add(user)
            if user in ends:
                results.append(user)
            else:
                stack.append(user)
    if all(node is collective.node for node in results):
        return "nothing reads it"
    return sorted(results), between


def _waited_for_again(ends: list[fx.Node]) -> list[fx.Node]:
    """These values, and what waits for them once more, as functional collectives called by hand often do."""
    held = list(ends)
    for node in held:
        held += [user for user in node.users if collectives.is_wait(user)]
    return held


def _trimmed(ends: list[fx.Node], dim: int) -> tuple[list[fx.Node], Size | None]:
    """The slices that cut the end of a dim off, if all that reads these values are such, of one size."""
    reads = [(user, node) for node in ends for user in node.users if user not in ends]
    if not reads or any(not _cuts(user, node, dim) for user, node in reads):
        return [], None
    cuts = [user for user, _ in reads]
    sizes = [cut.meta["val"].shape[dim] for cut in cuts]
    return (sorted(set(cuts)), sizes[0]) if all(same(size, sizes[0]) for size in sizes) else ([], None)


def _cuts(node: fx.Node, source: fx.Node, dim: int) -> bool:
    if node.target not in (torch.ops.aten.slice.Tensor, torch.ops.aten.narrow.default):
        return False
    given = arguments(node)
    start = given.get("start")
    along = given["dim"] % source.meta["val"].dim() == dim
    whole = same(node.meta["val"].shape[dim], source.meta["val"].shape[dim])
    return along and start in (0, None) and given.get("step", 1) == 1 and not whole


def _scatter(scatter: Collective) -> Scatter | Refusal:
    if (refusal := _not_plain(scatter)) is not None:
        return refusal
    if scatter.reduce_op not in ("sum", "avg"):
        return Refusal(scatter.node, "it reduces otherwise than by sum or mean", f"by {scatter.reduce_op}")
    problem: Refusal | None = None
    chain = ancestors(scatter.inputs[0])
    for whole in reversed([node for node in chain if _dtype(node) == _dtype(scatter.inputs[0])]):
        found = _scatter_of(scatter, whole)
        if isinstance(found, Scatter):
            return found
        problem = found
    assert problem is not None
    return problem


def _scatter_of(scatter: Collective, whole: fx.Node) -> Scatter | Refusal:
    value: Tensor = whole.meta["val"]
    own = layouts.of_tensor(value)
    apart = Refusal(scatter.node, "what it scatters is not one dim's parts", f"of {_described(whole)}")
    try:
        sent = layout_of(scatter.inputs[0], whole)
        outer, inner = _cut_for_ranks(sent.dims[0], scatter)
    except Unreadable as error:
        return Refusal(scatter.node, error.reason, f"from {whole.name} to {scatter.inputs[0].name}, {error.detail}")
    if len(outer) != 1:
        return apart
    reached = spread({scatter.node: replace(sent, dims=(inner, *sent.dims[1:]))})
    early = ""
    for dim, expected in _own_parts(own, outer[0], sent.dims[0], inner).items():
        found = _ends(reached, {dim: expected}, value.dtype).get(dim, set())
        closed = _close(scatter, reached, found)
        if isinstance(closed, str):
            early = closed
            continue
        results, between = closed
        result = next(node for node in results if node is not scatter.node)
        also = tuple(node for node in results if node is not result)
        nodes = tuple(sorted({*laid_between(whole, scatter.inputs[0]), *between, *results}))
        return Scatter(scatter, whole, dim, scatter.group_size or 0, scatter.reduce_op or "", result, nodes, also)
    return Refusal(scatter.node, "something reads it before its part is laid out", early) if early else apart


def _cut_for_ranks(factors: Factors, scatter: Collective) -> tuple[Factors, Factors]:
    """What is scattered, as the ranks' parts and what is inside one: that a single dim divides, the collective says."""
    received = scatter.node.meta["val"].shape[0]
    if len(factors) == 1:
        ((_, stride),) = factors
        return (LayoutFactor(scatter.group_size, received * stride),), merged((LayoutFactor(received, stride),))
    outer, inner = layouts.grouped(factors, (scatter.group_size, received))
    return outer, inner


def _own_parts(own: Layout, outer: LayoutFactor, scattered: Factors, inner: Factors) -> dict[int, Layout]:
    """For each dim that steps of `outer` cut in parts, the layout of one part."""
    found = {}
    for dim, factors in enumerate(own.dims):
        size = layouts.divided(factors[0].size, outer.size) if factors else None
        part = merged((LayoutFactor(size, factors[0].stride),)) if size is not None else None
        if part is not None and not same(outer.stride, size * factors[0].stride):
            part = None
        if part is None and factors and layouts.same_factors(factors, scattered):
            part = inner  # symbolic: not provably whole parts, but the collective takes no others
        if part is not None:
            found[dim] = replace(own, dims=(*own.dims[:dim], part, *own.dims[dim + 1 :]))
    return found


def _not_plain(moved: Collective) -> Refusal | None:
    """Why a collective is not one of a single tensor into a new one that is waited for; None if it is."""
    if moved.coalesced:
        return Refusal(moved.node, "it moves several tensors at once", f"{len(moved.inputs)} tensors")
    if moved.in_place or moved.out is not None:
        return Refusal(moved.node, "it writes into a given buffer", moved.out.name if moved.out else "its input")
    if not moved.waits:
        return Refusal(moved.node, "nothing waits for it", f"{len(moved.node.users)} readers")
    value = moved.inputs[0].meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dim() == 0:
        return Refusal(moved.node, "what it moves has no dims", _described(moved.inputs[0]))
    if not isinstance(moved.group_size, int) or moved.group_size < 2:
        return Refusal(moved.node, "its group has one rank", f"group {moved.group} of {moved.group_size}")
    if any(same(size, 0) for size in value.shape):
        return Refusal(moved.node, "it moves nothing", _described(moved.inputs[0]))
    return None


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _described(node: fx.Node) -> str:
    return f"{node.name} {render_type(node.meta.get('val'))}"
