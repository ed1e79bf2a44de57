"""A plan found in the graph: column-wise and row-wise projections in pairs, as Megatron-LM pairs them.

A projection multiplies activations by a parameter. It is split by columns if every way its channels take ends in the
contraction of another projection, which is then split by rows, with each rank on its own until there. Queries, keys and
values end in the output projection, the first half of an MLP in the second; what meets a residual does not stay apart,
since the next norm needs all of it. A norm on the way needs the others' pieces only for its mean, which ranks add up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from crossfade.graph.effects import written_inputs
from crossfade.graph.metadata import tensor_bytes
from crossfade.graph.operators import arguments
from crossfade.shard.tensor.plan_channel_factors import ChannelFactor, Channels, sizes_of
from crossfade.shard.tensor.plan_channels import follow_all, is_normed, is_summed
from crossfade.shard.tensor.plan_meetings import (
    NO_VALUES,
    adds_earlier,
    is_value,
    lends,
)
from crossfade.shard.tensor.plan_names import ProgramNames, Use, is_glob, matches, names_of, owner, starred
from crossfade.shard.tensor.plan_styles import Fused, read_style

aten = torch.ops.aten


@dataclass
class Projection:
    """A multiplication by a parameter, and what became of it."""

    weight: str
    use: Use
    bias: str | None = None
    style: Any = None
    reason: str = ""
    """Why it stays whole."""
    apart: bool = True
    """Whether ranks can go on with their piece of what it puts out."""
    is_table: bool = False
    """Whether the weight is an embedding's too."""
    is_written: bool = False
    """Whether it stays whole because it is written into something else."""
    ends: set[fx.Node] = field(default_factory=set)
    on_the_way: dict[str, tuple[Use, Any]] = field(default_factory=dict)
    """Weights of convolutions in groups that its channels pass, which are split with them, and how."""

    @property
    def node(self) -> fx.Node:
        assert self.use.node is not None
        return self.use.node

    @property
    def activations(self) -> fx.Node:
        assert self.use.activations is not None
        return self.use.activations

    @property
    def width(self) -> int:
        return sizes_of(self.node)[self.use.out_at]


def find_entries(
    exported: ExportedProgram, vocab: bool, singles: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The entries of a plan, and what was left whole and why."""
    names = names_of(exported)
    found = _paired(names, exported.graph)
    problems: tuple[str, ...] = ()
    if any(projection.is_written and projection.style is None for projection in found.values()):
        try:  # what becomes of it is seen once nothing is written in place
            exported = exported.run_decompositions({})
        except (RuntimeError, ValueError) as error:
            problems = (f"writes in place are not followed, torch cannot undo them: {str(error).splitlines()[0]}",)
        else:
            names = names_of(exported)
            found = _paired(names, exported.graph)
    tables = _split_vocabulary(found, names, _from_tokens(exported)) if vocab else {}
    alone: dict[str, Any] = {}
    if singles:
        whole = sum(tensor_bytes(names.tensors[name]) for name in names.parameters if names.canonical[name] == name)
        _split_singles(found.values(), names, whole)
        tables = _single_tables(names, whole) | tables
        alone = _single_groups(names, whole)
    styles = alone | _by_name(found.values(), names) | tables
    return _patterns(styles, names), (*_notes(found.values(), names, styles), *problems)


def _paired(names: ProgramNames, graph: fx.Graph) -> dict[fx.Node, Projection]:
    found = _projections(names, graph)
    _pair(found, _grouped(names))
    return found


def _projections(names: ProgramNames, graph: fx.Graph) -> dict[fx.Node, Projection]:
    """In the order of the graph."""
    every = [(name, use) for name, uses in names.uses.items() for use in uses]
    biases = {use.node: name for name, use in every if use.role == "bias"}
    tables = {name for name, use in every if use.role == "embedding"}
    known: dict[fx.Node | None, Projection] = {}
    for name, use in every:
        if use.multiplies:
            known.setdefault(use.node, Projection(name, use, biases.get(use.node), is_table=name in tables))
    return {node: known[node] for node in graph.nodes if node in known}


def _grouped(names: ProgramNames) -> dict[fx.Node, tuple[str, Use]]:
    """Convolutions in groups by what they compute, with their weights."""
    every = ((name, use) for name, uses in names.uses.items() for use in uses)
    known = ((name, use) for name, use in every if use.in_groups and use.out_dim is not None)
    return {use.node: (name, use) for name, use in known if use.node is not None}


def _pair(found: Mapping[fx.Node, Projection], grouped: Mapping[fx.Node, tuple[str, Use]]) -> None:
    """Split what can be split by columns, in order; what it ends in is taken by rows and starts nothing itself.

    Pairs with a norm over channels between them cost one more reduction, so they take what the others leave.
    """
    for through_norms in (False, True):
        for projection in found.values():
            if projection.style is not None:
                continue
            projection.reason, projection.apart, projection.is_written, projection.ends = "", True, False, set()
            projection.on_the_way = {}
            if projection.use.out_dim is None:
                projection.apart, projection.reason = False, "what its weight is computed by needs all of it"
                continue
            blocks = _followed(projection, found, grouped, through_norms)
            if projection.reason or not _all_free(projection, found, through_norms):
                projection.on_the_way = {}
                continue
            projection.style = _style_of(blocks)
            for end in projection.ends:
                found[end].style = "rowwise"
                found[end].reason = ""


def _all_free(projection: Projection, found: Mapping[fx.Node, Projection], through_norms: bool) -> bool:
    ends = [found[end] for end in projection.ends]
    if any(end.style not in (None, "rowwise") or end is projection for end in ends):
        projection.reason = "what it feeds is split by columns itself"
    elif through_norms and any(end.is_table for end in ends):
        projection.reason = "what it feeds is a table of words, which is split by words"
    elif not ends:
        projection.reason = "no other projection contracts over what it puts out"
    return not projection.reason


def _followed(
    projection: Projection,
    found: Mapping[fx.Node, Projection],
    grouped: Mapping[fx.Node, tuple[str, Use]],
    through_norms: bool,
) -> int | tuple[int, ...]:
    """Follow a projection's channels to their ends; the blocks of a fused one, or a reason."""
    start, width = projection.node, projection.width
    whole = Channels(0, width, (ChannelFactor(projection.use.out_at, width),))
    seen, pending, pieces = {(start, whole)}, deque([(start, whole)]), set()  # near first: most end soon
    passed: dict[fx.Node, set[tuple[int, int]]] = {}
    summed = meets_residual = False
    while pending and not (summed and meets_residual):
        node, channels = pending.popleft()
        for user in node.users:
            contracted = _contracts(user, node, channels, found)
            summing = through_norms and is_summed(user, node, channels)
            normed = through_norms and is_normed(user, node, channels)
            if contracted:
                projection.ends.add(user)
                if found[user].style not in (None, "rowwise"):
                    return 1  # refused, however far the others are
            if contracted or summing or user.op == "output":
                pieces.add((channels.start, channels.length))
                summed |= summing
            elif is_value(user) and not lends(user, node):
                meets_residual |= adds_earlier(user, start)
                after = (channels,) if normed else follow_all(user, node, channels) if user not in found else ()
                summed |= normed
                if not after:
                    projection.apart, projection.reason = False, f"{_where(user)} needs all that it puts out"
                    projection.is_written = bool(written_inputs(user))
                    return 1
                if user in grouped and _fill_dim(node, channels):
                    passed.setdefault(user, set()).add((channels.start, channels.length))
                new = [(user, now) for now in after if (user, now) not in seen]
                seen.update(new)
                pending.extend(new)
    if summed and meets_residual:
        projection.apart, projection.reason = False, "it is added to a residual that a norm needs all of"
        return 1
    ordered = sorted(pieces)
    projection.on_the_way = _on_the_way(passed, ordered, grouped)
    return _blocks(projection, width, ordered)


def _fill_dim(node: fx.Node, channels: Channels) -> bool:
    """Whether a dim holds these channels and nothing else."""
    first = channels.first
    return first.outer == 1 and first.size * first.inner == sizes_of(node)[first.dim]


def _on_the_way(
    passed: Mapping[fx.Node, set[tuple[int, int]]], pieces: list[tuple[int, int]], grouped: Mapping[fx.Node, Any]
) -> dict[str, tuple[Use, Any]]:
    """How convolutions in groups are split by what passes them: in the blocks that their channels are cut into."""
    found = {}
    for node, ranges in passed.items():
        name, use = grouped[node]
        cuts = {_within(begin, length, pieces) for begin, length in ranges}
        sizes = cuts.pop()
        width = arguments(node)["weight"].meta["val"].shape[0]
        if cuts or not sizes or width * min(sizes) % sum(sizes):
            continue
        blocks = tuple(size * width // sum(sizes) for size in sizes)
        found[name] = use, _style_of(len(blocks) if len(set(blocks)) == 1 else blocks)
    return found


def _within(begin: int, length: int, pieces: list[tuple[int, int]]) -> tuple[int, ...]:
    """The sizes of the pieces that make up this range; none if they do not."""
    sizes = tuple(size for start, size in pieces if begin <= start and start + size <= begin + length)
    return sizes if sum(sizes) == length else ()


def _style_of(blocks: int | tuple[int, ...]) -> Any:
    return "colwise" if blocks == 1 else Fused("colwise", blocks)


def _contracts(user: fx.Node, node: fx.Node, channels: Channels, found: Mapping[fx.Node, Projection]) -> bool:
    """Whether a projection contracts over the dim that the channels fill, outermost factor outermost."""
    if user not in found or found[user].activations is not node:
        return False
    end = found[user].use
    return end.in_dim is not None and channels.first.dim == end.in_at and channels.first.outer == 1


def _where(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    module = list(node.meta.get("nn_module_stack", {}).values())
    return f"{name} in {module[-1][0]}" if module and module[-1][0] else name


def _blocks(projection: Projection, width: int, pieces: list[tuple[int, int]]) -> int | tuple[int, ...]:
    """One block if all ends see all channels; else the pieces, which must lie side by side."""
    edges = [start for start, _ in pieces] + [width]
    if any(start + length != following for (start, length), following in zip(pieces, edges[1:], strict=True)):
        projection.reason = "parts of what it puts out overlap, or are not used"
        return 1
    sizes = tuple(length for _, length in pieces)
    return len(sizes) if len(set(sizes)) <= 1 else sizes


def _by_name(found: Iterable[Projection], names: ProgramNames) -> dict[str, Any]:
    """Styles by name; a name whose uses want different things is left out."""
    styles: dict[str, Any] = {}
    conflicts: set[str] = set()
    for projection in found:
        for name, style in (_named(projection, names) | _passed(projection, names)).items():
            if styles.setdefault(name, style) != style:
                conflicts.add(name)
    return {name: style for name, style in styles.items() if style is not None and name not in conflicts}


def _passed(projection: Projection, names: ProgramNames) -> dict[str, Any]:
    """Convolutions in groups between a pair."""
    entries = [_grouped_entry(name, use, style, names) for name, (use, style) in projection.on_the_way.items()]
    return dict(entries)


def _grouped_entry(name: str, use: Use, style: Any, names: ProgramNames, gather: bool = False) -> tuple[str, Any]:
    """The entry of a convolution in groups: as a module where it is one, which can gather what it puts out."""
    if owner(name) == use.module:
        return use.module, read_style("colwise_gather_output") if gather else style
    return name, _direct(style, use.out_dim, names.tensors[name])


def _split_singles(found: Iterable[Projection], names: ProgramNames, whole: int) -> None:
    """What is in no pair is split by columns where it is large, and what it puts out is gathered."""
    for projection in found:
        large = tensor_bytes(names.tensors[projection.weight]) * _LARGE >= whole
        alone = projection.use.role == "linear" and projection.use.out_dim is not None and not projection.is_table
        if projection.style is None and alone and large:
            projection.style = read_style("colwise_gather_output") if _as_module(projection, names) else "colwise"


def _single_tables(names: ProgramNames, whole: int) -> dict[str, Any]:
    """Large tables by their width: what is looked up in them (positions, usually) is gathered."""
    large = [name for name, uses in names.uses.items() if uses and tensor_bytes(names.tensors[name]) * _LARGE >= whole]
    only = [name for name in large if all(use.role == "embedding" for use in names.uses[name])]
    modules = {use.module for name in only for use in names.uses[name] if owner(name) == use.module}
    return dict.fromkeys(modules - {""}, read_style("embedding_colwise"))


def _single_groups(names: ProgramNames, whole: int) -> dict[str, Any]:
    """Large convolutions in groups by their groups: each rank needs of what comes in only what its groups see."""
    alone = [(name, uses[0]) for name, uses in names.uses.items() if len(uses) == 1 and uses[0].in_groups]
    return dict(
        _grouped_entry(name, use, "colwise", names, gather=True)
        for name, use in alone
        if use.out_dim is not None and tensor_bytes(names.tensors[name]) * _LARGE >= whole
    )


_LARGE = 400
"""What is in no pair is worth a gather if all weights together are at most so many times as large."""


def _named(projection: Projection, names: ProgramNames) -> dict[str, Any]:
    """The module that multiplies, if that is all it does; else the weight and, split by columns, its bias."""
    use, style, weight = projection.use, projection.style, projection.weight
    if style is None:
        return {weight: None}
    if use.role != "expert" and _as_module(projection, names):
        return {use.module: style}
    if style == "rowwise":
        whole = owner(weight) if use.role == "expert" else use.module
        sums = {whole: "moe_tp_experts" if use.role == "expert" else "all_reduce"} if whole else {}
        return {weight: _direct(style, use.in_dim, names.tensors[weight])} | sums
    biases = {} if projection.bias is None else {projection.bias: style}
    return {weight: _direct(style, use.out_dim, names.tensors[weight])} | biases


def _as_module(projection: Projection, names: ProgramNames) -> bool:
    """Whether a module holds the weight and does nothing but multiply by it."""
    module = projection.use.module
    if not module or module in names.parents or all(owner(name) != module for name in names.tied[projection.weight]):
        return False
    return len([name for name in names.modules[module] if names.tensors[name].ndim > 1]) == 1


def _direct(style: Any, dim: int | None, tensor: torch.Tensor) -> Any:
    """A style for a parameter that is named itself: only of a matrix is it known which dims are meant."""
    if tensor.ndim == 2:
        return style
    split = f"shard({dim})"
    return Fused(split, style.blocks) if isinstance(style, Fused) else split


def _notes(found: Iterable[Projection], names: ProgramNames, styles: Mapping[str, Any]) -> tuple[str, ...]:
    """What stays whole, layers that are alike in one line."""
    whole = [projection for projection in found if projection.style is None]
    notes = [f"{starred(projection.weight)} stays whole: {starred(projection.reason)}" for projection in whole]
    multiplied = {name for projection in found for name in (projection.weight, *projection.on_the_way)}
    for name, uses in names.uses.items():
        matrix = name in names.parameters and names.tensors[name].ndim > 1
        split = name in styles or any(use.in_groups and use.module in styles for use in uses)
        if matrix and not split and name not in multiplied and not any(use.role == "embedding" for use in uses):
            notes.append(f"{starred(name)} stays whole: it is not multiplied with activations as a matrix")
    return tuple(dict.fromkeys(notes))


def _from_tokens(exported: ExportedProgram) -> set[fx.Node]:
    """What is computed of whole numbers that the user gives."""
    given = set(exported.graph_signature.user_inputs)
    found: set[fx.Node] = set()
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            own = node.op == "placeholder" and node.name in given
            if own or (node.target not in NO_VALUES and not found.isdisjoint(node.all_input_nodes)):
                found.add(node)
    return found


def _split_vocabulary(found: Mapping[fx.Node, Projection], names: ProgramNames, tokens: set[fx.Node]) -> dict[str, Any]:
    """The token embedding is as long as the head is wide; with no such head it is the longest embedding.

    A head puts out one column for each word, gathered at the end. A table is only split if it is used for nothing else,
    and looked up by what the user gives: positions are counted from shapes.
    """
    looked_up = {
        name
        for name, uses in names.uses.items()
        if all(_looks_up(use, tokens) or (use.node in found and use.role == "linear") for use in uses)
    }
    rows = {name: _rows(name, names) if name in looked_up else 0 for name in names.uses}
    unpaired = [projection for projection in found.values() if projection.style is None and not projection.ends]
    heads = {projection.width: projection for projection in unpaired}
    longest = max(rows.values(), default=0)
    words = max((count for count in rows.values() if count in heads and heads[count].apart), default=longest)
    if words in heads:
        heads[words].style = read_style("colwise_gather_output")
    longest_tables = [name for name in rows if rows[name] == words > 0]
    tables = [use for name in longest_tables for use in names.uses[name] if use.role == "embedding"]
    return dict.fromkeys((use.module for use in tables if use.module), "embedding_rowwise")


def _looks_up(use: Use, tokens: set[fx.Node]) -> bool:
    """Whether a table is looked up by token."""
    return use.role == "embedding" and use.node is not None and arguments(use.node)["indices"] in tokens


def _rows(name: str, names: ProgramNames) -> int:
    return max((names.tensors[name].shape[0] for use in names.uses[name] if use.role == "embedding"), default=0)


def _patterns(styles: Mapping[str, Any], names: ProgramNames) -> dict[str, Any]:
    """Layers that are alike in one entry, if its pattern names nothing else."""
    everything = [*names.modules, *names.tensors]
    alike = {
        pattern: matches(pattern, everything) for pattern in dict.fromkeys(map(starred, styles)) if is_glob(pattern)
    }
    one_style = {
        pattern
        for pattern, found in alike.items()
        if len(found) > 1 and all(styles.get(name) == styles.get(found[0]) for name in found)
    }
    return {starred(name) if starred(name) in one_style else name: style for name, style in styles.items()}
