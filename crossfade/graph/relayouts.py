"""Operators that only rearrange elements, in whatever spelling, and the values that are reached through them.

`layout_of` says the layout of one value over one behind it, `spread` those of all values that follow from some.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import layouts
from crossfade.graph.collectives import is_collective, is_wait
from crossfade.graph.layouts import Layout, Size, Unreadable
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.order import Later
from crossfade.graph.private import schema_of
from crossfade.graph.program import source_line

CHAIN = 64
"""How many re-layouts are followed back from one value: real programs have a handful."""

Laid = Layout | list[Layout]
Known = Callable[[fx.Node], Any]
Step = Callable[[fx.Node, Known], Laid]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a value is not recognised: the node it failed at, a reason that is the same for all such cases, numbers."""

    node: fx.Node
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        where = source_line(self.node)
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.node.name}{f' [{where}]' if where else ''}: {self.reason}{detail}"


def layout_of(node: fx.Node, source: fx.Node) -> Layout:
    """The layout of a value over one of its `ancestors`; raises Unreadable where there is none.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 6] = input("x")
    ... t: f32[6, 4] = aten.t(x)
    ... flat: f32[24] = aten.reshape(t, [24])
    ... return output("flat", flat)
    ... ''')
    >>> x, t, flat, _ = program.graph.nodes
    >>> print(layout_of(flat, x))
    (6, 4) (4, 24)
    """
    known: dict[fx.Node, Any] = {source: layouts.of_tensor(source.meta["val"])}

    def ask(value: fx.Node) -> Any:
        if value not in known:
            step = _step_of(value.target)
            if step is None:
                raise Unreadable("it is not only rearranged", f"{value.name} is made by {value.target}")
            known[value] = step(value, ask)
        return known[value]

    return ask(node)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """The value itself and the tensors behind it through re-layouts, nearest first; waits and collectives end them."""
    found = [node]
    last: fx.Node | None = node
    for _ in range(CHAIN):
        last = _source(last) if last is not None else None
        if last is None:
            break
        if isinstance(last.meta.get("val"), Tensor):
            found.append(last)
    return found


def laid_between(source: fx.Node, node: fx.Node) -> set[fx.Node]:
    """The nodes through which `node` is laid out from `source`: with `node`, without `source`."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        last = stack.pop()
        if last is not source and last not in found:
            found.add(last)
            stack += [read for read in last.all_input_nodes if isinstance(read.meta.get("val"), Tensor | list | tuple)]
    return found


@dataclass(frozen=True, slots=True)
class Spread:
    """What is reached from some values: the layouts of re-laid values, and who reads one without being one.

    `readers` has them in order, each with the values it reads; `refused` says why a re-layout among them is none.
    """

    layouts: dict[fx.Node, Laid]
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    refused: dict[fx.Node, Unreadable] = field(default_factory=dict)

    def tensor(self, node: fx.Node) -> Layout | None:
        """The layout of a reached tensor, None for lists of them and for all others."""
        found = self.layouts.get(node)
        return found if isinstance(found, Layout) else None


def spread(given: Mapping[fx.Node, Layout]) -> Spread:
    """Follow re-layouts from values with the given layouts, one walk over what they reach."""
    reached = Spread(dict(given))
    waiting = [user for node in given for user in node.users]
    heapq.heapify(waiting)
    last: fx.Node | None = None
    while waiting:
        node = heapq.heappop(waiting)
        if node is last or node in given:
            continue
        last = node
        try:
            step = _step_of(node.target) if node.op == "call_function" else None
            read = [source for source in node.all_input_nodes if source in reached.layouts]
            if step is None or not _is_whole(node, reached.layouts):
                reached.readers[node] = read
                continue
            reached.layouts[node] = step(node, reached.layouts.__getitem__)
        except Unreadable as error:
            reached.readers[node], reached.refused[node] = read, error
            continue
        for user in node.users:
            heapq.heappush(waiting, user)
    return reached


def _is_whole(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Whether all tensors that a re-layout reads are known; symbolic sizes are no tensors."""
    return all(
        source in known for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor | list | tuple)
    )


def _source(node: fx.Node) -> fx.Node | None:
    """The value that a node rearranges, also if it joins pieces of it; None at a wait or anything else."""
    if node.op != "call_function" or is_wait(node) or _step_of(node.target) is None:
        return None
    first: Any = node.args[0] if node.args else next(iter(node.kwargs.values()))
    if not isinstance(first, list | tuple):
        return first if isinstance(first, fx.Node) and not is_collective(first) else None
    return _common_source([part for part in first if isinstance(part, fx.Node)])


def _common_source(parts: list[fx.Node]) -> fx.Node | None:
    """The value that all parts are laid out from: the last of them is followed back until they meet."""
    latest = [Later(part) for part in set(parts)]
    heapq.heapify(latest)
    seen = set(parts)
    for _ in range(CHAIN * len(parts)):
        last = heapq.heappop(latest).node
        if not latest:
            return last
        source = _source(last)
        if source is None:
            return None
        if source not in seen:
            seen.add(source)
            heapq.heappush(latest, Later(source))
    return None


def _number(value: Any) -> Any:
    """An argument that is a size: a number, or the node of a symbolic one."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _dim(value: int, rank: int) -> int:
    return value % rank if rank else 0


def _shape(node: fx.Node) -> tuple[Size, ...]:
    return tuple(node.meta["val"].shape)


def _first(node: fx.Node, known: Known) -> Any:
    return known(node.args[0] if node.args else next(iter(node.kwargs.values())))  # type: ignore[arg-type]


def _same(node: fx.Node, known: Known) -> Layout:
    return _first(node, known)


def _view(node: fx.Node, known: Known) -> Layout:
    return layouts.viewed(_first(node, known), _shape(node))


def _retype(node: fx.Node, known: Known) -> Layout:
    return layouts.retyped(_first(node, known), node.meta["val"].element_size())


def _expand(node: fx.Node, known: Known) -> Layout:
    return layouts.broadcast(_first(node, known), _shape(node))


def _permute(node: fx.Node, known: Known) -> Layout:
    source = _first(node, known)
    rank = len(source.dims)
    return layouts.permuted(source, [_dim(dim, rank) for dim in arguments(node)["dims"]])


def _swap(node: fx.Node, known: Known) -> Layout:
    source, given = _first(node, known), arguments(node)
    rank = len(source.dims)
    first, second = (_dim(given.get(name, default), rank) for name, default in (("dim0", 0), ("dim1", 1)))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return layouts.permuted(source, order)


def _turn(node: fx.Node, known: Known) -> Layout:
    """`t`: at most two dims, the other way round."""
    source = _first(node, known)
    return layouts.permuted(source, range(len(source.dims))[::-1])


def _move(node: fx.Node, known: Known) -> Layout:
    source, given = _first(node, known), arguments(node)
    rank = len(source.dims)
    old, new = ([dims] if isinstance(dims, int) else dims for dims in (given["source"], given["destination"]))
    places = {_dim(to, rank): _dim(start, rank) for start, to in zip(old, new, strict=True)}
    rest = iter([dim for dim in range(rank) if dim not in places.values()])
    return layouts.permuted(source, [places[dim] if dim in places else next(rest) for dim in range(rank)])


def _split(node: fx.Node, known: Known) -> list[Layout]:
    source = _first(node, known)
    dim = _dim(arguments(node)["dim"], len(source.dims))
    made, start = [], 0
    for piece in node.meta["val"]:
        made.append(layouts.sliced(source, dim, start, piece.shape[dim]))
        start = start + piece.shape[dim]
    return made


def _unbind(node: fx.Node, known: Known) -> list[Layout]:
    source = _first(node, known)
    dim = _dim(arguments(node)["dim"], len(source.dims))
    return [layouts.selected(source, dim, index) for index in range(len(node.meta["val"]))]


def _element(node: fx.Node, known: Known) -> Layout:
    made = _first(node, known)
    if not isinstance(made, list):
        raise Unreadable("it is not only rearranged", f"{node.name} is an element of what is no list of pieces")
    return made[node.args[1]]  # type: ignore[index]


def _slice(node: fx.Node, known: Known) -> Layout:
    source, given = _first(node, known), arguments(node)
    dim = _dim(given["dim"], len(source.dims))
    if not layouts.same(_number(given.get("step", 1)), 1):
        raise Unreadable("a slice leaves elements out in between", f"step {given['step']}")
    return layouts.sliced(source, dim, _start(given.get("start"), source.shape[dim]), _shape(node)[dim])


def _start(value: Any, size: Size) -> Size:
    start = _number(value) or 0 if not isinstance(value, fx.Node) else _number(value)
    return start + size if type(start) is int and start < 0 else start


def _select(node: fx.Node, known: Known) -> Layout:
    source, given = _first(node, known), arguments(node)
    dim = _dim(given["dim"], len(source.dims))
    return layouts.selected(source, dim, _start(given["index"], source.shape[dim]))


def _cat(node: fx.Node, known: Known) -> Layout:
    given = arguments(node)
    made = [known(piece) for piece in given["tensors"]]
    return layouts.joined(made, _dim(given.get("dim", 0), len(_shape(node))))


def _stack(node: fx.Node, known: Known) -> Layout:
    given = arguments(node)
    dim = _dim(given.get("dim", 0), len(_shape(node)))
    return layouts.joined([layouts.unsqueezed(known(piece), dim) for piece in given["tensors"]], dim)


_STEPS: dict[Step, str] = {
    _same: "clone contiguous alias detach lift_fresh_copy",
    _view: "view _unsafe_view reshape flatten unflatten unsqueeze squeeze view_as reshape_as _reshape_alias",
    _expand: "expand expand_as",
    _permute: "permute",
    _swap: "transpose",
    _turn: "t numpy_T",
    _move: "movedim moveaxis",
    _split: "split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk",
    _unbind: "unbind",
    _slice: "slice narrow",
    _select: "select",
    _cat: "cat concat concatenate",
    _stack: "stack",
}
_BY_NAME = {f"aten::{name}": step for step, names in _STEPS.items() for name in names.split()}
_NOT_THESE = {"dtype", "Dimname", "names", "out"}


@remembered
def _step_of(target: Any) -> Step | None:
    if target is operator.getitem:
        return _element
    if target is torch.ops.aten.view.dtype:
        return _retype
    if is_wait(fx.Graph().call_function(target)) if callable(target) else False:
        return _same
    schema = schema_of(target)
    if schema is None or any(part in schema.overload_name for part in _NOT_THESE):
        return None
    return _BY_NAME.get(schema.name)
