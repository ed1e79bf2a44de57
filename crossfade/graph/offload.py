"""Values moved to the host's memory and back (offloading): operators of ours that graphs hold.

As a collective has, each way has a launch and a wait: `crossfade.to_host` begins to copy a value, `crossfade.on_host`
waits until it is there and so is the last that needs the value on the device; `crossfade.from_host` begins to copy it
back into fresh memory, `crossfade.on_device` waits until it is there. On CUDA the copies go through pinned memory, on a
stream of their own each way, beside what is computed. On a CPU the launch copies into another piece of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from crossfade.graph.metadata import tensor_bytes

_DEFINITIONS = {
    "to_host": "(Tensor x) -> Tensor",
    "on_host": "(Tensor(a!) host, Tensor x) -> Tensor(a!)",
    "from_host": "(Tensor host, *, Device device) -> Tensor",
    "on_device": "(Tensor(a!) x) -> Tensor(a!)",
}

Way = Literal["to_host", "from_host"]
"""The way of a copy: a link of its own, as links are counted."""


def to_host(x: Tensor) -> Tensor:
    """Begin to copy a value to the host.

    >>> x = torch.arange(3.0)
    >>> host = on_host(to_host(x), x)
    >>> on_device(from_host(host, device=x.device))
    tensor([0., 1., 2.])
    """
    return torch.ops.crossfade.to_host(x)


def on_host(host: Tensor, x: Tensor) -> Tensor:
    """Wait until a value, of which `to_host` made `host`, is there; the value itself may then be freed."""
    return torch.ops.crossfade.on_host(host, x)


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a value back to a device."""
    return torch.ops.crossfade.from_host(host, device=device)


def on_device(x: Tensor) -> Tensor:
    """Wait until a value is back."""
    return torch.ops.crossfade.on_device(x)


class _Streams:
    """The streams of the two ways for each device, and what is under way on them."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], Any] = {}
        self._arrivals: dict[int, Any] = {}
        """When the copy into a place arrives, as an event."""

    def copy(self, into: Tensor, source: Tensor, device: torch.device, way: Way) -> None:
        """Begin to copy, after all that was launched so far."""
        now = torch.cuda.current_stream(device)
        key = (now.device_index, way)
        stream = self._streams.setdefault(key, None) or torch.cuda.Stream(now.device_index)
        self._streams[key] = stream
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            self._arrivals[into.data_ptr()] = stream.record_event()

    def wait(self, arriving: Tensor, device: torch.device) -> None:
        """Let nothing that is launched from now on begin before a copy has arrived."""
        torch.cuda.current_stream(device).wait_event(self._arrivals.pop(arriving.data_ptr()))


_streams = _Streams()


def _like(x: Tensor, **options: Any) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, **options)


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return _like(x).copy_(x)
    host = _like(x, pin_memory=True)
    _streams.copy(host, x, x.device, "to_host")
    return host


def _on_host(host: Tensor, x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        _streams.wait(host, x.device)
    return host


def _from_host(host: Tensor, *, device: torch.device) -> Tensor:
    x = _like(host, device=device)
    if x.device.type == "cpu":
        return x.copy_(host)
    _streams.copy(x, host, x.device, "from_host")
    return x


def _on_device(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        _streams.wait(x, x.device)
    return x


_WITHOUT_DATA: dict[str, Callable[..., Tensor]] = {
    "to_host": lambda x: _like(x, device="cpu"),
    "on_host": lambda host, x: host,
    "from_host": lambda host, *, device: _like(host, device=device),
    "on_device": lambda x: x,
}
_WITH_DATA: dict[str, Callable[..., Tensor]] = {
    "to_host": _to_host,
    "on_host": _on_host,
    "from_host": _from_host,
    "on_device": _on_device,
}

for _name, _schema in _DEFINITIONS.items():
    torch.library.define(f"crossfade::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"crossfade::{_name}", _WITHOUT_DATA[_name])
    torch.library.impl(f"crossfade::{_name}", "default", _WITH_DATA[_name])

TO_HOST = torch.ops.crossfade.to_host.default
FROM_HOST = torch.ops.crossfade.from_host.default
ON_HOST = torch.ops.crossfade.on_host.default
ON_DEVICE = torch.ops.crossfade.on_device.default

_LAUNCHES: dict[Any, Way] = {TO_HOST: "to_host", FROM_HOST: "from_host"}
_WAITS = frozenset({ON_HOST, ON_DEVICE})


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that a node begins: which way, how much, and the node that waits for it."""

    node: fx.Node
    way: Way
    bytes: int
    wait: fx.Node


def is_launch(node: fx.Node) -> bool:
    """Whether a node begins a copy to the host or back."""
    return node.target in _LAUNCHES


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a copy to the host or back."""
    return node.target in _WAITS


def started_by(wait: fx.Node) -> fx.Node:
    """The launch that a wait waits for."""
    return wait.args[0]  # type: ignore[return-value]


def view(node: fx.Node) -> Copy | None:
    """The copy that a node begins, or None if it begins none."""
    way = _LAUNCHES.get(node.target)
    if way is None:
        return None
    wait = next(user for user in node.users if is_wait(user) and started_by(user) is node)
    return Copy(node, way, tensor_bytes(node.meta.get("val")), wait)


def find(graph: fx.Graph) -> list[Copy]:
    """Every copy to the host and back, in order.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... start: f32[4] = crossfade.to_host(x)
    ... host: f32[4] = crossfade.on_host(start, x)
    ... back: f32[4] = crossfade.from_host(host, device=device("cpu"))
    ... there: f32[4] = crossfade.on_device(back)
    ... return output("y", there)
    ... ''')
    >>> [(copy.way, copy.bytes, copy.wait.name) for copy in find(program.graph)]
    [('to_host', 16, 'host'), ('from_host', 16, 'there')]
    """
    return [copy for node in graph.nodes if (copy := view(node)) is not None]


def has(graph: fx.Graph) -> bool:
    """Whether a graph moves values to the host."""
    return bool(graph.find_nodes(op="call_function", target=TO_HOST, sort=False))


def most_on_host(graph: fx.Graph) -> int:
    """The most bytes that lie on the host at any time."""
    most, size, there = 0, 0, dict[fx.Node, int]()
    for node in graph.nodes:
        if (copy := view(node)) is not None and copy.way == "to_host":
            there[copy.wait] = copy.bytes
            size += copy.bytes
            most = max(most, size)
        elif copy is not None:
            size -= there.pop(node.args[0], 0)  # type: ignore[arg-type]
    return most
