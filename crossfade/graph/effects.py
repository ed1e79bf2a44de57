"""What operators do beside computing: whose memory a result shares, what is written, drawn, or otherwise effected."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.operators import remembered
from crossfade.graph.private import has_schema, schema_of

_UNDECLARED_ALIASES = {
    **dict.fromkeys(("_unsafe_view", "type_as", "sum_to_size", "atleast_1d", "atleast_2d", "atleast_3d"), 0),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "conj_physical"), 0),
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "broadcast_tensors", "meshgrid"), 0),
    "einsum": 1,
}
"""ATen ops that may return an argument's memory though their schema does not say so: the argument's position."""

_UNDECLARED_WRITES = {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "_batch_norm_impl_index", "instance_norm"}
"""ATen ops that update their running statistics (arguments 3 and 4) while training (argument 5), undeclared."""


_TRITON_CALL = "triton_kernel_wrapper_mutation"


def alias_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node, the node that owns its memory: views, in-place results and waits share their input's.

    Elements of a multi-output op own theirs one by one; constants of one name are one memory.
    """
    roots: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    for node in nodes:
        op, target = node.op, node.target
        if op == "get_attr":
            roots[node] = first.setdefault(target, node)
        elif target is operator.getitem:
            shared, element = _element(node)
            roots[node] = roots[shared] if shared is not None else first.setdefault(element, node)
        elif op == "call_function" and (place := _shared_place(target)) is not None:
            shared = _at_place(node, place)
            roots[node] = roots[shared] if shared is not None else node
        else:
            roots[node] = node
    return roots


def memory_of(node: fx.Node) -> Any:
    """What stands for one node's memory: equal for nodes that share it, as `alias_roots` tells for all nodes."""
    while True:
        if node.op == "get_attr":
            return node.target
        if node.target is operator.getitem:
            shared, element = _element(node)
            if shared is None:
                return element
        else:
            shared = _aliased_input(node)
            if shared is None:
                return node
        node = shared


def aliased_by(node: fx.Node) -> fx.Node | None:
    """The node that this one's memory comes from at once: a view's argument, the list of an element; None if its own.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... halves: (f32[2], f32[2]) = aten.split.Tensor(x, 2)
    ... left: f32[2] = halves[0]
    ... neg: f32[2] = aten.neg(left)
    ... return output("neg", neg)
    ... ''')
    >>> [aliased_by(node) for node in program.graph.nodes]
    [None, x, halves, None, None]
    """
    if node.target is operator.getitem:
        return node.args[0] if _element(node)[0] is not None else None  # type: ignore[return-value]
    return _aliased_input(node) if node.op == "call_function" else None


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory this node writes, from its operator's schema."""
    if node.op != "call_function" or not may_write(node.target):
        return []
    if str(node.target) == _TRITON_CALL:  # which of its tensors a kernel writes is known to Triton only
        passed: list[fx.Node] = []
        fx.map_arg(node.kwargs["kwargs"], passed.append)
        return passed
    traits = _traits(node.target)
    if not traits.written or (traits.only_training and _argument(node, (5, "training")) is False):
        return []
    written: list[fx.Node] = []
    for place in traits.written:
        fx.map_arg(_argument(node, place), written.append)
    return written


@remembered
def may_write(target: Any) -> bool:
    """Whether some call of an operator writes memory that it is given.

    >>> may_write(torch.ops.aten.add_.Tensor), may_write(torch.ops.aten.add.Tensor)
    (True, False)
    """
    return str(target) == _TRITON_CALL or bool(_traits(target).written)


def rewritten(nodes: Iterable[fx.Node], roots: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The values whose memory something writes: read later than they are, they might not be the same."""
    written = written_owners(nodes, roots)
    return {node for node, root in roots.items() if root in written} if written else set()


def written_owners(nodes: Iterable[fx.Node], roots: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The owners of memory that something writes."""
    writers = (node for node in nodes if node.op == "call_function" and may_write(node.target))
    return {roots[target] for node in writers for target in written_inputs(node)}


def rewritten_at_waits(nodes: Iterable[fx.Node], roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each memory that the wait on a sibling may write again, the coalesced collectives whose results these are.

    Whichever result is waited for, all may be written: gloo copies every output of a coalesced reduce-scatter out at
    each wait. It shows only where another node writes one of them; other lists are left out.
    """
    nodes = list(nodes)
    started = [view for node in nodes if (view := collectives.view(node)) is not None and view.coalesced]
    if not started:
        return {}
    writers: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        for target in written_inputs(node):
            writers.setdefault(roots[target], set()).add(node)
    lists: dict[fx.Node, list[fx.Node]] = {}
    for collective in started:
        owners = {roots[result] for result in collective.results}
        if any(writers.get(owner, set()) - {collective.node} for owner in owners):
            for owner in owners:
                lists.setdefault(owner, []).append(collective.node)
    return lists


def strided_owners(nodes: Iterable[fx.Node], roots: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The owners of memory that some view takes apart by strides, counted from the memory's beginning."""
    return {roots[node] for node in nodes if node.target is torch.ops.aten.as_strided.default}


def is_random(node: fx.Node) -> bool:
    """Whether this node draws from the random generator; attention without dropout does not, though it could."""
    traits = _traits(node.target) if node.op == "call_function" else _Traits()
    if traits.dropout is None:
        return traits.random
    return traits.random and _argument(node, traits.dropout) not in (None, 0.0)


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an operator's schema says, read once per operator; places are an argument's position and name.

    `shared` has the place of the argument that each result shares memory with, or None.
    """

    written: tuple[tuple[int, str], ...] = ()
    shared: tuple[tuple[int, str] | None, ...] = ()
    one_list: bool = False
    only_training: bool = False
    random: bool = False
    hidden_effect: bool = False
    dropout: tuple[int, str] | None = None


@remembered
def is_pure(target: Any) -> bool:
    """Whether no call of this operator writes, draws, communicates or has another effect: only data orders it."""
    traits = _traits(target)
    effect = traits.written or traits.random or traits.hidden_effect or collectives.communicates(target)
    return has_schema(target) and not effect


@remembered
def _traits(target: Any) -> _Traits:
    schema = schema_of(target)
    if schema is None:
        return _Traits()
    namespace, name = schema.name.split("::")
    places = [(index, argument.name, argument.alias_info) for index, argument in enumerate(schema.arguments)]
    written = [(index, label) for index, label, info in places if info is not None and info.is_write]
    shared: list[tuple[int, str] | None] = []
    for item in schema.returns:
        sharers = [place for *place, info in places if info is not None and _same_memory(item.alias_info, info)]
        shared.append(tuple(sharers[0]) if sharers else None)
    undeclared = namespace == "aten" and name in _UNDECLARED_WRITES
    if undeclared:
        written += [place[:2] for place in places[3:5]]
    if namespace == "aten" and name in _UNDECLARED_ALIASES and schema.returns:
        shared[0] = places[_UNDECLARED_ALIASES[name]][:2]
    call = fx.Graph().call_function(target)
    if collectives.is_wait(call):
        shared[0] = places[0][:2]
    return _Traits(
        written=tuple(written),
        shared=tuple(shared),
        one_list=len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType),
        only_training=undeclared,
        random=torch.Tag.nondeterministic_seeded in target.tags,
        hidden_effect=_is_effectful(call),
        dropout=next((place[:2] for place in places if place[1] == "dropout_p"), None),
    )


def _same_memory(result: Any, argument: Any) -> bool:
    """Whether a result's annotation names an argument's; torch drops the names of a list of views, `Tensor(a)[]`."""
    return result is not None and (not result.before_set or bool(result.before_set & argument.before_set))


def _aliased_input(node: fx.Node) -> fx.Node | None:
    place = _shared_place(node.target) if node.op == "call_function" else None
    return None if place is None else _at_place(node, place)


def _at_place(node: fx.Node, place: tuple[int, str]) -> fx.Node | None:
    """The node given as the argument at a place; of a list, the first."""
    if place is _UNKNOWN:  # the safe side
        return node.all_input_nodes[0] if node.all_input_nodes else None
    value = _argument(node, place)
    return value if isinstance(value, fx.Node) else _first_node(value)


_UNKNOWN = (-1, "")
"""The place of the argument that an operator without a schema may share memory with."""


@remembered
def _shared_place(target: Any) -> tuple[int, str] | None:
    """The place of the argument whose memory an operator's one result is or may be; None if its memory is new."""
    if not has_schema(target):
        return _UNKNOWN
    shared = _traits(target).shared
    return shared[0] if len(shared) == 1 else None


def _element(node: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, Any]]:
    """For a `getitem`: the node whose memory it shares, if any, and a key equal for equal elements."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    if isinstance(index, int) and index < 0 and isinstance(source.meta.get("val"), (tuple, list)):
        index += len(source.meta["val"])
    traits = _traits(source.target) if source.op == "call_function" else _Traits()
    if not traits.shared or not isinstance(index, int) or index < 0:
        return source, (source, index)
    place = traits.shared[0 if traits.one_list else index]
    value = _argument(source, place) if place is not None else None
    if traits.one_list and isinstance(value, (tuple, list)) and index < len(value):
        value = value[index]
    return _first_node(value), (source, index)


def _argument(node: fx.Node, place: tuple[int, str]) -> Any:
    index, name = place
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _first_node(value: Any) -> fx.Node | None:
    if isinstance(value, (tuple, list)):
        return next((item for item in value if isinstance(item, fx.Node)), None)
    return value if isinstance(value, fx.Node) else None


def has_hidden_effect(node: fx.Node) -> bool:
    """Effects that no schema describes (asserts, profiler marks): kept in order among themselves."""
    return _traits(node.target).hidden_effect if has_schema(node.target) else _is_effectful(node)


def _is_effectful(node: fx.Node) -> bool:
    return not (collectives.is_wait(node) or collectives.is_collective(node)) and node.is_impure()


def memory_behind(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """All memory behind a value: of a list of tensors read as a whole, that of its elements too."""
    traits = _traits(node.target) if node.op == "call_function" else _Traits()
    if not traits.one_list and len(traits.shared) < 2:
        return [roots[node]]
    elements = [roots[user] for user in node.users if user.target is operator.getitem]
    shared: list[fx.Node] = []
    fx.map_arg([_argument(node, place) for place in traits.shared if place is not None], shared.append)
    return [roots[node], *elements, *(roots[source] for source in shared)]
