"""Machine: what communication, computation and memory cost; measured or preset, kept as JSON, equal on every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossfade.cost.machine_parts import HostLink, Link
from crossfade.cost.network import Network, Wire, routed
from crossfade.cost.products import Products
from crossfade.cost.traced import REMEDY, Traced, read_trace
from crossfade.errors import MachineError
from crossfade.files.found import is_number
from crossfade.files.plain import decoded_json, read_text
from crossfade.graph.collectives import Kind

ANY_AXIS = "*"
"""The key of the fabric that serves every axis without one of its own."""

LATENCY_SHARE = 0.2
"""The most of a collective's travel that may be latency, where bytes can be put together."""


def bytes_worth_latency(latency: float, seconds_a_byte: float) -> float:
    """How many bytes make latency `LATENCY_SHARE` of the travel.

    >>> bytes_worth_latency(1e-3, 1e-9)
    4000000.0
    """
    return (latency / LATENCY_SHARE - latency) / seconds_a_byte if seconds_a_byte else math.inf


@dataclass(frozen=True)
class Fabric:
    """What communication along one mesh axis costs.

    `links` has one entry for each kind of collective. `launch` is the time that starting one takes on the computing
    thread or stream. While a collective travels, computation takes `1 + slows_compute` times as long.
    """

    links: Mapping[Kind, Link]
    launch: float = 0.0
    slows_compute: float = 0.0


@dataclass(frozen=True)
class Launching:
    """What the host takes to launch one operator, `seconds`, while the device computes; and how unevenly ranks do.

    `spread` is the standard deviation of a rank's speed as a share: ranks that meet in every layer go at the pace of
    the slowest, which is the expected largest of as many draws.
    """

    seconds: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, repr=False)
class Machine:
    """What things cost: one fabric for each mesh axis (`"*"` for any other), arithmetic by dtype, memory.

    `flops` are floating-point operations a second of large matrix products, by dtype (`"float32"`); `memory_bandwidth`
    is in bytes a second, read and written counted alike; `overhead` is what calling one operator costs; `memory` is in
    bytes, None where unknown. `source` says where the numbers come from.

        >>> link = Link(latency=5e-5, bandwidth=125e6)
        >>> machine = Machine("two desktops", {"*": Fabric(dict.fromkeys(Kind, link))}, flops={"float32": 5e10},
        ...                   memory_bandwidth=1e10)
        >>> machine.collective_seconds(Kind.ALL_GATHER, 2**20, ranks=2, axis="dp")
        0.004244304
        >>> Machine.from_json(machine.to_json()) == machine
        True
    """

    name: str
    fabrics: Mapping[str, Fabric]
    flops: Mapping[str, float]
    memory_bandwidth: float
    overhead: float = 0.0
    device: str = "cpu"
    memory: int | None = None
    source: str = ""
    network: Network | None = None
    """Where the fabrics come from, if nodes and what joins them are known: see `on_mesh`."""
    products: Products | None = None
    """How the time of matrix products depends on their shape; without, only on their operations."""
    launching: Launching = Launching()
    """What a host takes to launch what a device computes; nothing where operators are called as they run."""
    host: HostLink | None = None
    """What copies to the host's memory and back cost; None where unknown."""
    convolutions: Mapping[str, float] = field(default_factory=dict)
    """The share of `flops` that convolutions and their gradients reach, by dtype; all of them where unknown."""
    _digest: str = field(init=False, compare=False, default="")

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "_digest", hashlib.sha256(self.to_json().encode()).hexdigest()[:8])

    def __repr__(self) -> str:
        return f"Machine({self.name!r}, {self._digest})"

    def __hash__(self) -> int:
        return hash(self._digest)

    def fabric(self, axis: str) -> Fabric:
        """What communication along an axis costs."""
        found = self.fabrics.get(axis, self.fabrics.get(ANY_AXIS))
        if found is None:
            raise MachineError(
                f"{self.name} has no fabric for axis {axis!r}",
                expected=f"one of {', '.join(self.fabrics) or 'none'}, or one for every axis",
                remedy=f'add it under fabrics, or add one under "{ANY_AXIS}"',
            )
        return found

    def collective_seconds(self, kind: Kind, size: int, ranks: int, axis: str = ANY_AXIS) -> float:
        """Seconds that one collective takes alone, for the bytes of its larger side."""
        return self.fabric(axis).links[kind].seconds(kind, size, ranks)

    def host_link(self) -> HostLink:
        """What copies to the host's memory and back cost."""
        if self.host is None:
            raise MachineError(
                f"{self.name} does not say what copies to the host's memory cost",
                expected="latency and bandwidth, as in host=HostLink(1e-5, 50e9)",
                remedy="add them, calibrate the machine again, or do without offload=",
            )
        return self.host

    def worthwhile(self, kind: Kind, ranks: int, axis: str = ANY_AXIS) -> float:
        """The least bytes to send at once where there are more: latency is then `LATENCY_SHARE` of the travel.

        >>> fabric = Fabric(dict.fromkeys(Kind, Link(latency=1e-3, bandwidth=1e9)))
        >>> machine = Machine("two desktops", {"*": fabric}, {"float32": 5e10}, 1e10)
        >>> [round(machine.worthwhile(Kind.ALL_TO_ALL, ranks)) for ranks in (2, 64)]
        [8000000, 24380952]
        """
        if ranks < 2:
            return 0.0
        link = self.fabric(axis).links[kind]
        latency = link.seconds(kind, 0, ranks)
        many = 2**30  # a way through several nodes has more than one bandwidth: that of large messages counts
        return bytes_worth_latency(latency, (link.seconds(kind, many, ranks) - latency) / many)

    def piece(self, kind: Kind, ranks: int, axis: str = ANY_AXIS) -> float | None:
        """The most bytes to send at once: the link's `piece`, which is measured among few ranks, but no fewer than
        are `worthwhile`; None if there is no such limit."""
        piece = self.fabric(axis).links[kind].piece
        return None if piece is None else max(float(piece), self.worthwhile(kind, ranks, axis))

    def with_scatters_as_exchanges(self, axes: Collection[str]) -> Machine:
        """This machine where reduce-scatters along some axes are carried out as all-to-alls, as programs on gloo do.

        They may have any size: exchanges are cut into pieces where they are made.

        >>> link, slow = Link(1e-4, 1e9), Link(1e-4, 5e8)
        >>> fabric = Fabric({**dict.fromkeys(Kind, link), Kind.REDUCE_SCATTER: slow})
        >>> machine = Machine("two desktops", {"*": fabric}, {"float32": 5e10}, 1e10)
        >>> machine.with_scatters_as_exchanges(["dp"]).fabric("dp").links[Kind.REDUCE_SCATTER] == link
        True
        """
        changed = {}
        for axis in axes:
            fabric = self.fabric(axis)
            exchange = dataclasses.replace(fabric.links[Kind.ALL_TO_ALL], piece=None)
            links = {**fabric.links, Kind.REDUCE_SCATTER: exchange}
            changed[axis] = dataclasses.replace(fabric, links=links)
        return dataclasses.replace(self, fabrics={**self.fabrics, **changed})

    def with_computation_undisturbed(self, axes: Collection[str]) -> Machine:
        """This machine where what travels along some axes does not slow computation down."""
        changed = {axis: dataclasses.replace(self.fabric(axis), slows_compute=0.0) for axis in axes}
        return dataclasses.replace(self, fabrics={**self.fabrics, **changed})

    def on_mesh(self, mesh: Mapping[str, int]) -> Machine:
        """This machine with a fabric for each axis of a mesh, by where its ranks lie; the last axis is inside nodes.

        A machine without a network has its fabrics already.
        """
        if self.network is None:
            return self
        like, network = self.fabric(ANY_AXIS), self.network
        made = {
            axis: dataclasses.replace(like, links=dict.fromkeys(Kind, routed(network, network.along(mesh, axis))))
            for axis in mesh
        }
        return dataclasses.replace(self, fabrics={**self.fabrics, **made})

    def to_json(self) -> str:
        """The machine as JSON."""
        plain = dataclasses.asdict(self)
        kept = (ANY_AXIS,) if self.network is not None else tuple(self.fabrics)  # the others follow from a mesh
        plain["fabrics"] = {axis: _plain_fabric(self.fabrics[axis]) for axis in kept}
        for name, nothing in (
            ("network", None),
            ("products", None),
            ("host", None),
            ("launching", dataclasses.asdict(Launching())),
            ("convolutions", {}),
        ):
            if plain[name] == nothing:
                del plain[name]
        del plain["_digest"]
        return json.dumps(plain, indent=2)

    def save(self, path: str | Path) -> Path:
        """Write the machine as a JSON file."""
        path = Path(path)
        path.write_text(self.to_json() + "\n")
        return path

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """A machine from its JSON; whatever is missing, unknown or impossible is named."""
        remedy = "write it with Machine.save or crossfade calibrate"
        plain = decoded_json(text, "text", MachineError, remedy, finite=False)
        found = _record(cls, plain, "machine")
        fabrics = _mapping(found["fabrics"], "fabrics")
        found["fabrics"] = {axis: _fabric(fabric, f"fabrics.{axis}") for axis, fabric in fabrics.items()}
        if found.get("network") is not None:
            network = _record(Network, found["network"], "network")
            for wire in ("inside", "between"):
                network[wire] = Wire(**_record(Wire, network[wire], f"network.{wire}"))
            found["network"] = Network(**network)
            made = dict.fromkeys(Kind, routed(found["network"]))
            found["fabrics"] = {axis: dataclasses.replace(each, links=made) for axis, each in found["fabrics"].items()}
        for name, kind in (("products", Products), ("launching", Launching), ("host", HostLink)):
            if found.get(name) is not None:
                found[name] = kind(**_record(kind, found[name], name))
        return cls(**found)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """A machine from a JSON file."""
        path = Path(path)
        if not path.exists():
            raise MachineError(f"no file {path}", remedy="measure one with `crossfade calibrate --save FILE`")
        try:
            return cls.from_json(read_text(path, MachineError, "give a machine's JSON file"))
        except MachineError as error:
            named = error.found if str(path) in error.found else f"{path}, {error.found}"
            raise MachineError(named, expected=error.expected, remedy=error.remedy) from error

    @classmethod
    def from_trace(cls, path: str | Path, *, like: Machine | None = None, name: str = "") -> Machine:
        """A machine from a Chrome trace of an earlier step, as `torch.profiler` writes it with `record_shapes=True`.

        Fabrics are those of the process groups in the trace: `dp` for the group that a mesh calls so, `"*"` for that of
        all ranks, or for the busiest group. What the trace does not show is taken from `like`, a preset or a calibrated
        machine; without one, what cannot be left out is an error. `source` says what was read and what was not.
        Kernels of collectives include waiting for other ranks: of equal ones the shortest counts.
        """
        path = Path(path)
        if not path.exists():
            raise MachineError(f"no file {path}", remedy=REMEDY)
        traced = read_trace(path)
        try:
            return cls(**_fields_traced(traced, like), name=name or path.stem)
        except MachineError as error:
            said = f"{path}, which has {traced.said() or 'nothing to read'}: {error.found}"
            raise MachineError(said, expected=error.expected, remedy=error.remedy) from error


def _fields_traced(traced: Traced, like: Machine | None) -> dict[str, Any]:
    """The fields of a machine, each from a trace or from another machine; `source` says which."""
    unseen = [f"{kinds} along {axis}" for axis, kinds in traced.unseen.items()]
    flops = {**(like.flops if like is not None else {}), **traced.flops}
    if "float32" not in flops:
        raise MachineError("no matrix product of float32", expected="one, with its shapes", remedy=_OWED)
    unseen += [] if "float32" in traced.flops else ["matrix products of float32"]
    if not traced.links and like is None:
        raise MachineError("no collective of known size", expected="NCCL's kernels or gloo's spans", remedy=_OWED)
    if traced.memory_bandwidth is None and like is None:
        raise MachineError("no elementwise operator of known size", expected="one, with its shapes", remedy=_OWED)
    measured = {"memory_bandwidth": traced.memory_bandwidth, "overhead": traced.overhead, "launch": traced.launch}
    unseen += [what.replace("_", " ") for what, found in measured.items() if found is None]
    instead = f"from {like.name}" if like is not None else "from the slowest link seen, or nothing"
    return {
        "fabrics": _fabrics_traced(traced, like),
        "flops": flops,
        "memory_bandwidth": traced.memory_bandwidth or (like.memory_bandwidth if like is not None else 0.0),
        "overhead": traced.overhead if traced.overhead is not None else like.overhead if like is not None else 0.0,
        "host": like.host if like is not None else None,
        "convolutions": like.convolutions if like is not None else {},
        "device": traced.device,
        "memory": like.memory if like is not None else None,
        "source": f"a trace of {traced.said()}" + (f"; unseen, {instead}: {', '.join(unseen)}" if unseen else ""),
    }


def _fabrics_traced(traced: Traced, like: Machine | None) -> dict[str, Fabric]:
    """A fabric for each group in a trace; for all others that of all ranks, or of the group with the most kinds."""
    fabrics = dict(like.fabrics) if like is not None else {}
    for axis, links in traced.links.items():
        known = like.fabrics.get(axis, like.fabrics.get(ANY_AXIS)) if like is not None else None
        slowest = min(links.values(), key=lambda link: link.bandwidth)
        found = {kind: links.get(kind) or (known.links[kind] if known is not None else slowest) for kind in Kind}
        launch = known.launch if known is not None else 0.0
        fabrics[axis] = Fabric(
            found,
            launch=traced.launch if traced.launch is not None else launch,
            slows_compute=known.slows_compute if known is not None else 0.0,
        )
    if traced.links and ANY_AXIS not in traced.links:
        fabrics[ANY_AXIS] = fabrics[max(traced.links, key=lambda axis: len(traced.links[axis]))]
    return fabrics


_OWED = "trace a whole step with record_shapes=True, or pass like=, a preset or a calibrated machine"


def _plain_fabric(fabric: Fabric) -> dict[str, Any]:
    links = {
        str(kind): {"latency": link.latency, "bandwidth": link.bandwidth, "piece": link.piece}
        for kind, link in fabric.links.items()
    }
    return {**dataclasses.asdict(fabric), "links": links}


def _fabric(plain: Any, where: str) -> Fabric:
    found = _record(Fabric, plain, where)
    links = {}
    for kind, link in _mapping(found["links"], f"{where}.links").items():
        if kind not in list(Kind):
            raise MachineError(
                f"{where}.links.{kind}", expected=f"one of {', '.join(Kind)}", remedy="correct or remove it"
            )
        links[Kind(kind)] = Link(**_record(Link, link, f"{where}.links.{kind}"))
    return Fabric(**{**found, "links": links})


def _mapping(plain: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise MachineError(
            f"{where} = {plain!r}", expected="an object", remedy="see `crossfade calibrate` for an example"
        )
    return plain


def _record(kind: Any, plain: Any, where: str) -> dict[str, Any]:
    """The fields of one dataclass, all that are owed and none that are unknown."""
    wanted = {declared.name: declared for declared in dataclasses.fields(kind) if declared.init}
    for name in _mapping(plain, where):
        if name not in wanted:
            raise MachineError(
                f"{where}.{name}", expected=f"only {', '.join(wanted)}", remedy="correct it, or calibrate again"
            )
    for name, declared in wanted.items():
        if name not in plain and declared.default is declared.default_factory is dataclasses.MISSING:
            raise MachineError(
                f"{where}.{name} is missing", expected="every field", remedy="add it, or calibrate again"
            )
    return dict(plain)


def _check(machine: Machine) -> None:
    """Everything a machine says is there and possible."""
    for axis, fabric in machine.fabrics.items():
        where = f"fabrics.{axis}"
        for kind in Kind:
            if kind not in fabric.links:
                raise MachineError(
                    f"{where}.links.{kind} is missing",
                    expected="every kind of collective",
                    remedy="add it, or calibrate again",
                )
            link = fabric.links[kind]
            _number(link.latency, f"{where}.links.{kind}.latency", least=0)
            _number(link.bandwidth, f"{where}.links.{kind}.bandwidth")
            if link.piece is not None:
                _number(link.piece, f"{where}.links.{kind}.piece")
        _number(fabric.launch, f"{where}.launch", least=0)
        _number(fabric.slows_compute, f"{where}.slows_compute", least=0)
    for where in ("name", "device", "source"):
        _text(getattr(machine, where), where)
    for dtype, rate in _mapping(machine.flops, "flops").items():
        _number(rate, f"flops.{dtype}")
    if "float32" not in machine.flops:
        raise MachineError("flops.float32 is missing", expected="that dtype at least", remedy="add it, or calibrate")
    _number(machine.memory_bandwidth, "memory_bandwidth")
    _number(machine.overhead, "overhead", least=0)
    for dtype, share in _mapping(machine.convolutions, "convolutions").items():
        _number(share, f"convolutions.{dtype}")
    if machine.memory is not None:
        _number(machine.memory, "memory")
    _check_parts(machine)


def _check_parts(machine: Machine) -> None:
    """What a machine says of its network, products and launches."""
    if machine.network is not None:
        for where in ("inside", "between"):
            wire = getattr(machine.network, where)
            _number(wire.latency, f"network.{where}.latency", least=0)
            _number(wire.bandwidth, f"network.{where}.bandwidth")
        _number(machine.network.per_node, "network.per_node")
        _number(machine.network.start, "network.start", least=0)
        if not machine.network.copy > 0:
            raise MachineError(f"network.copy = {machine.network.copy!r}", expected="a number more than 0",
                               remedy="correct it, or calibrate again")  # fmt: skip
    if machine.host is not None:
        _number(machine.host.latency, "host.latency", least=0)
        _number(machine.host.bandwidth, "host.bandwidth")
        if not isinstance(machine.host.apart, bool):
            raise MachineError(f"host.apart = {machine.host.apart!r}", expected="true or false", remedy="correct it")
    for name, part in (("products", machine.products), ("launching", machine.launching)):
        for field_of in dataclasses.fields(part) if part is not None else ():
            _number(getattr(part, field_of.name), f"{name}.{field_of.name}", least=0)


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise MachineError(f"{where} = {value!r}", expected="text", remedy="correct it, or calibrate again")


def _number(value: Any, where: str, least: float | None = None) -> None:
    """A finite number, more than 0, or at least `least`."""
    if not is_number(value) or (value < least if least is not None else value <= 0):
        expected = "a number of at least 0" if least is not None else "a number more than 0"
        raise MachineError(f"{where} = {value!r}", expected=expected, remedy="correct it, or calibrate again")
