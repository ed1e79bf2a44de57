"""What the metadata of nodes says: what they are made for, where they come from, how large their values are."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

COMPUTED_AGAIN = "crossfade_computed_again"
"""In a node's metadata: the name of the one that computes the same for earlier uses."""

MADE_FOR = "made_for"
"""Metadata key: the user's name for what a node serves, such as the parameter whose gradient it carries."""


def source_line(node: fx.Node) -> str:
    """Where a node comes from in the user's terms: what it was made for, or `file.py:12` of the innermost user frame.

    >>> source_line(fx.Graph().placeholder("x"))
    ''
    """
    if MADE_FOR in node.meta:
        return node.meta[MADE_FOR]
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    inside_torch = "/torch/"
    users = [frame for frame in frames if inside_torch not in frame] or frames
    found = re.match(r'File "(?:.*/)?(.*)", line (\d+)', users[-1]) if users else None
    return f"{found[1]}:{found[2]}" if found else ""


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor's elements; symbolic sizes count by their hint, everything else as 0.

    >>> tensor_bytes(torch.empty(3, 2))
    24
    """
    if isinstance(value, torch.Tensor):
        return size_hint(value.numel()) * value.element_size()
    return sum(tensor_bytes(item) for item in value) if isinstance(value, (tuple, list)) else 0


def size_hint(size: Any) -> int:
    """An int for a possibly symbolic size; decides policy only, never semantics."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else 0
    return int(size)


def described(node: fx.Node, constants: Mapping[str, Any]) -> Any:
    """What stands for a node's value where there is no data: its metadata, or the graph that it names."""
    value = constants.get(str(node.target)) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else node.meta.get("val")


def complete_metadata(graph: fx.Graph) -> None:
    """Describe the absent results of multi-output ops (gradients not asked for), which torch's tracer leaves bare."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        if "val" not in node.meta:
            values = node.args[0].meta.get("val")
            node.meta["val"] = values[node.args[1]] if values is not None else None
