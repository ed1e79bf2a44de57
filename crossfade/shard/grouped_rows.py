"""Rows sorted by group and multiplied by the matrix of their group, as of routed experts: each rank has its own."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments

_aten = torch.ops.aten

_SAME_NUMBERS = {_aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.clone.default}
_SORTS = {_aten.sort.default, _aten.sort.stable}


def ends_of_groups(node: fx.Node) -> fx.Node | None:
    """Where each group of rows of a grouped matmul ends, if it counts the groups by which these rows were sorted.

    Which rows are in a group then follows from the rows alone, and the count is right for every part of a batch:

        sort = aten.sort(groups)
        counts = aten.histc(sort[0], 4, 0, 3)
        ends = aten.cumsum(counts, 0)
        y = aten._grouped_mm(aten.index.Tensor(x, [sort[1]]), weight, ends)
    """
    if "grouped_mm" not in str(node.target):
        return None
    ends = arguments(node).get("offs")
    if not isinstance(ends, fx.Node) or (total := _without_copies(ends)).target is not _aten.cumsum.default:
        return None
    counts = _without_copies(total.args[0])
    if not _counts_in_bins(counts):
        return None
    groups = _without_copies(counts.args[0])
    if groups.target is not operator.getitem or groups.args[1] != 0:
        return None
    sort: Any = groups.args[0]
    return ends if sort.target in _SORTS and _is_permuted_by(node.args[0], sort) else None


def counts_groups(node: fx.Node, forward: Collection[fx.Node]) -> bool:
    """Whether a node counts the members of groups, and a forward uses the counts for the ends of groups alone."""
    if not _counts_in_bins(node):
        return False
    queue = [node]
    for value in queue:
        for user in value.users:
            if user in forward and ends_of_groups(user) is not value:
                if user.target not in _SAME_NUMBERS and user.target is not _aten.cumsum.default:
                    return False
                queue.append(user)
    return True


def _counts_in_bins(node: fx.Node) -> bool:
    """Whether a node counts values in bins that do not depend on them."""
    return node.target is _aten.histc.default and arguments(node)["min"] < arguments(node)["max"]


def _without_copies(node: Any) -> fx.Node:
    while node.target in _SAME_NUMBERS:
        node = node.args[0]
    return node


def _is_permuted_by(rows: Any, sort: fx.Node) -> bool:
    """Whether rows were taken in the order that a sort has found."""
    seen: set[fx.Node] = set()
    queue = [rows]
    for node in queue:
        if node.target is operator.getitem and node.args == (sort, 1):
            return True
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        queue.extend(new)
    return False
