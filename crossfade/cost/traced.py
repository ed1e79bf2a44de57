"""What a trace of an earlier step says of its machine: links, arithmetic, memory, launches.

Read are the Chrome traces that `torch.profiler` writes with `record_shapes=True`. Where kernels of a device are in it,
their times count, otherwise those of operators on the host.

- Links: NCCL's kernels name their collective, elements, dtype and group; gloo's spans name collective and input. A
  collective waits for the slowest rank, so that of equal ones the shortest counts.
- Arithmetic: by dtype, the median rate of products that have at least a quarter of the operations of the largest.
- Memory: likewise of elementwise operators, by bytes read and written.
- Overhead: the median of elementwise operators on at most 4 KB. Launch: the median call of a functional collective.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossfade.cost.machine_parts import Link, bytes_sent, fitted, rounded
from crossfade.errors import MachineError
from crossfade.files.found import FileValue
from crossfade.files.plain import read_json
from crossfade.graph.collectives import Kind, is_named

REMEDY = "write it with torch.profiler's profile(record_shapes=True) and export_chrome_trace"
_LARGE_SHARE = 0.25
_SMALL_BYTES = 4096
_MOST_DIMS = 16

# fmt: off
_KINDS = {
    "all_reduce": Kind.ALL_REDUCE, "allreduce": Kind.ALL_REDUCE, "allreduce_coalesced": Kind.ALL_REDUCE,
    "all_gather": Kind.ALL_GATHER, "allgather": Kind.ALL_GATHER, "_allgather_base": Kind.ALL_GATHER,
    "all_gather_into_tensor": Kind.ALL_GATHER, "allgather_into_tensor_coalesced": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER, "_reduce_scatter_base": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER, "reduce_scatter_tensor_coalesced": Kind.REDUCE_SCATTER,
    "all_to_all": Kind.ALL_TO_ALL, "all_to_allv": Kind.ALL_TO_ALL, "alltoall_base": Kind.ALL_TO_ALL,
    "broadcast": Kind.BROADCAST,
}
_DTYPES = {
    "float": ("float32", 4), "double": ("float64", 8), "bfloat16": ("bfloat16", 2), "half": ("float16", 2),
    "long": ("int64", 8), "long int": ("int64", 8), "int": ("int32", 4), "short": ("int16", 2), "char": ("int8", 1),
    "signed char": ("int8", 1), "byte": ("uint8", 1), "unsigned char": ("uint8", 1), "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1), "float8_e5m2": ("float8_e5m2", 1),
}
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that multiply matrices, and which of their arguments is the first of these."""
_ELEMENTWISE = {"aten::add": 3, "aten::mul": 3, "aten::add_": 3, "aten::mul_": 3, "aten::sub": 3, "aten::div": 3}
"""Elementwise operators, and how many tensors they read and write if both operands are tensors."""
# fmt: on


@dataclass(frozen=True)
class Traced:
    """What was found: links by group (as the trace names it) and kind, the rest None or empty where nothing was seen.

    `ranks` has the sizes of groups, `counts` what all of it was read from.
    """

    device: str
    links: Mapping[str, Mapping[Kind, Link]]
    launch: float | None
    flops: Mapping[str, float]
    memory_bandwidth: float | None
    overhead: float | None
    counts: Mapping[str, int]

    @property
    def unseen(self) -> dict[str, str]:
        """The kinds of collectives that were not seen, by group."""
        missing = {axis: [str(kind) for kind in Kind if kind not in links] for axis, links in self.links.items()}
        return {axis: ", ".join(kinds) for axis, kinds in missing.items() if kinds}

    def said(self) -> str:
        """What it was read from, in words."""
        return ", ".join(f"{number:,} {what}" for what, number in self.counts.items() if number)


def read_trace(path: Path) -> Traced:
    """What a trace says; a file that is none, or does not say what it should, is refused by name and place."""
    if path.suffix == ".gz":
        raise MachineError(
            f"{path}, which is compressed", expected="JSON", remedy="unpack it first: gunzip --keep FILE"
        )
    whole = FileValue(read_json(path, MachineError, REMEDY), str(path), "", MachineError, REMEDY)
    events = whole["traceEvents"]
    reader = _Reader(_groups_of(whole))
    for event in events.items():
        reader.read(event)
    return reader.found()


def _groups_of(whole: FileValue) -> dict[str, int]:
    """The process groups that a trace names, and how many ranks each has."""
    if "distributedInfo" not in whole.entries():
        return {}
    listed = whole["distributedInfo"].get("pg_config", []).items()
    return {_axis(group["pg_desc"].text()): group["pg_size"].whole(least=1, most=2**24) for group in listed}


def _axis(description: str) -> str:
    """The mesh axis that a process group stands for, `*` for the group of all ranks."""
    return "*" if description in ("default_pg", "undefined", "") else description.removeprefix("mesh_")


@dataclass
class _Call:
    """An operator that the host called, and the seconds of its kernels if a device has any."""

    event: FileValue
    name: str
    seconds: float
    on_device: float = 0.0


@dataclass
class _Reader:
    """Sorts events out, one after another."""

    groups: Mapping[str, int]
    calls: list[_Call] = field(default_factory=list)
    kernels: dict[int, float] = field(default_factory=dict)
    travels: dict[tuple[str, Kind], dict[tuple[int, int], float]] = field(default_factory=lambda: defaultdict(dict))
    launches: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def read(self, event: FileValue) -> None:
        """Take what an event says, if it is one of those that say something."""
        if not isinstance(event.value, dict):
            raise event.wrong("an object")
        category = event.value.get("cat")
        if event.value.get("ph") != "X":
            return
        if category == "kernel":
            self._kernel(event)
        elif category in ("cpu_op", "user_annotation"):
            name = event["name"].text()
            if name.startswith("gloo:"):
                self._gloo(event, name.removeprefix("gloo:"))
            elif is_named(name):
                self.launches.append(_seconds(event))
            elif name in _PRODUCTS or name in _ELEMENTWISE:
                self.calls.append(_Call(event, name, _seconds(event)))

    def found(self) -> Traced:
        """All of it put together."""
        on_device = bool(self.kernels) or self.counts["kernels"] > 0
        if on_device:
            for call in self.calls:
                number = call.event["args"].get("External id", -1).value
                call.seconds = self.kernels.get(number, 0.0) if isinstance(number, int) else 0.0
        products = self._rates(_PRODUCTS, _operations)
        moved = self._rates(_ELEMENTWISE, _bytes_moved)
        small = [seconds for _, amount, seconds in moved if amount <= _SMALL_BYTES]
        by_dtype: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for dtype, amount, seconds in products:
            by_dtype[dtype].append((amount, seconds))
        links: dict[str, dict[Kind, Link]] = defaultdict(dict)
        for (axis, kind), seen in self.travels.items():
            points = [
                (float(math.ceil(math.log2(ranks))), bytes_sent(kind, size, ranks), seconds)
                for (ranks, size), seconds in seen.items()
            ]
            links[axis][kind] = fitted(points)
        return Traced(
            "cuda" if on_device else "cpu",
            links,
            rounded(statistics.median(self.launches)) if self.launches else None,
            {dtype: rate for dtype, seen in by_dtype.items() if (rate := _rate(seen)) is not None},
            _rate([(amount, seconds) for _, amount, seconds in moved if amount > _SMALL_BYTES]),
            rounded(statistics.median(small)) if small else None,
            {
                **{name: self.counts[name] for name in ("collectives", "collectives of unknown size or group")},
                "matrix products": len(products),
                "elementwise operators": len(moved),
            },
        )

    def _rates(self, operators: Mapping[str, int], amount_of: Any) -> list[tuple[str, float, float]]:
        """Dtype, amount and seconds of each call of some operators that says what it was called with."""
        found = []
        for call in self.calls:
            if call.name in operators and call.seconds > 0:
                amount = amount_of(call.event["args"], operators[call.name])
                if amount is not None:
                    found.append((*amount, call.seconds))
        return found

    def _kernel(self, event: FileValue) -> None:
        self.counts["kernels"] += 1
        given, seconds = event.get("args", {}), _seconds(event)
        known = given.entries()
        if "Collective name" in known:
            kind = _KINDS.get(known["Collective name"].text().lower())
            dtype = _dtype(known["dtype"].text()) if "dtype" in known else None
            ranks = known["Group size"].whole(least=1, most=2**24) if "Group size" in known else 0
            sizes = [known[name].whole(least=0) for name in ("In msg nelems", "Out msg nelems") if name in known]
            axis = _axis(given.get("Process Group Description", "").text())
            self._travelled(axis, kind, max(sizes, default=0) * dtype[1] if dtype else 0, ranks, seconds)
        elif "External id" in known and isinstance(known["External id"].value, int):
            number = known["External id"].value
            self.kernels[number] = self.kernels.get(number, 0.0) + seconds

    def _gloo(self, event: FileValue, name: str) -> None:
        """Gloo does not say which group: there must be one size only."""
        kind, seconds = _KINDS.get(name), _seconds(event)
        sizes = set(self.groups.values())
        axis = next(iter(self.groups)) if len(self.groups) == 1 else "*"
        ranks = sizes.pop() if len(sizes) == 1 else 0
        given = event.get("args", {})
        shapes, dtypes = _shapes(given.get("Input Dims", [])), given.get("Input type", []).items()
        dtype = _dtype(dtypes[0].text()) if dtypes else None
        size = sum(map(math.prod, shapes)) * dtype[1] if dtype else 0
        self._travelled(axis, kind, size * ranks if kind is Kind.ALL_GATHER else size, ranks, seconds)

    def _travelled(self, axis: str, kind: Kind | None, size: int, ranks: int, seconds: float) -> None:
        if kind is None or size <= 0 or ranks < 2 or seconds <= 0:
            self.counts["collectives of unknown size or group"] += 1
            return
        self.counts["collectives"] += 1
        seen = self.travels[axis, kind]
        seen[ranks, size] = min(seconds, seen.get((ranks, size), math.inf))


def _seconds(event: FileValue) -> float:
    """How long an event took; its `dur` is in microseconds."""
    length = event["dur"]
    if not length.number() >= 0:
        raise length.wrong("microseconds, at least 0")
    return length.number() * 1e-6


def _rate(seen: Sequence[tuple[float, float]]) -> float | None:
    """The median amount a second of those that are large; None if there are none."""
    largest = max((amount for amount, _ in seen), default=0.0)
    rates = [amount / seconds for amount, seconds in seen if amount >= _LARGE_SHARE * largest and amount > 0]
    return rounded(statistics.median(rates)) if rates else None


def _operations(given: FileValue, first: int) -> tuple[str, float] | None:
    """The dtype and floating-point operations of a matrix product."""
    tensors = [tensor for tensor in _tensors(given)[first : first + 2] if tensor is not None]
    if len(tensors) < 2:
        return None
    (dtype, left), (_, right) = tensors
    if not 2 <= len(left) == len(right) <= 3 or left[-1] != right[-2]:
        return None
    return dtype[0], 2.0 * math.prod(left) * right[-1]


def _bytes_moved(given: FileValue, tensors: int) -> tuple[str, float] | None:
    """The dtype of an elementwise operator, and the bytes that it reads and writes."""
    read = _tensors(given)[:2]
    if not read or read[0] is None:
        return None
    (dtype, shape), other = read[0], read[1] if len(read) > 1 else None
    has_other = other is not None and bool(other[1])
    if has_other and other is not None and other[1] != shape:  # repeated values are read from a cache
        return None
    return dtype[0], float(math.prod(shape) * dtype[1] * (tensors if has_other else tensors - 1))


def _tensors(given: FileValue) -> list[tuple[tuple[str, int], list[int]] | None]:
    """The dtype and shape of each argument that is a tensor, None for others; empty where shapes were not recorded."""
    entries = given.entries()
    if "Input Dims" not in entries or "Input type" not in entries:
        return []
    found: list[tuple[tuple[str, int], list[int]] | None] = []
    for dims, kind in zip(entries["Input Dims"].items(), entries["Input type"].items(), strict=False):
        dtype = _dtype(kind.text())
        is_shape = dtype is not None and all(type(size.value) is int for size in dims.items())
        found.append((dtype, _shape(dims)) if dtype is not None and is_shape else None)
    return found


def _shapes(dims: FileValue) -> list[list[int]]:
    """The shapes in a list of shapes, or of lists of such."""
    found = []
    for entry in dims.items():
        inner = entry.items()
        if inner and isinstance(inner[0].value, list):
            found += [_shape(shape) for shape in inner]
        elif inner:
            found.append(_shape(entry))
    return found


def _shape(dims: FileValue) -> list[int]:
    if len(dims.items()) > _MOST_DIMS:
        raise dims.wrong(f"a shape of at most {_MOST_DIMS} dims")
    return [size.whole(least=0, most=2**40) for size in dims.items()]


def _dtype(name: str) -> tuple[str, int] | None:
    """The name that torch gives a dtype, and its bytes; None for what is no dtype."""
    return _DTYPES.get(name.lower().removeprefix("c10::"))
