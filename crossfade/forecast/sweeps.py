"""Sweeps: one model forecast over many numbers of GPUs, or on machines whose links are slower and faster."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crossfade.cost.machine import Machine
from crossfade.errors import MeshError
from crossfade.forecast.forecast import Forecast
from crossfade.forecast.simulate import Forecaster, Setting
from crossfade.forecast.ways import DATA_AXIS

SCALING = ("weak", "strong")


@dataclass(frozen=True)
class Sweep:
    """What changes, and its values: `gpus=8..16384`, or `bandwidth=0.25..4` times that between nodes."""

    what: str
    values: tuple[float, ...]

    @classmethod
    def read(cls, text: str) -> Sweep:
        """A sweep as people write it: doubled from the first value to the last, or a list.

        >>> Sweep.read("gpus=8..64").values, Sweep.read("bandwidth=0.5,1,3").values
        ((8.0, 16.0, 32.0, 64.0), (0.5, 1.0, 3.0))
        """
        what, _, values = text.partition("=")
        found = re.fullmatch(r"([\d.]+)\.\.([\d.]+)", values)
        try:
            if found:
                first, last = map(float, found.groups())
                numbers = list(_doubled(first, last))
            else:
                numbers = [float(value) for value in values.split(",")]
        except ValueError:
            numbers = []
        possible = all(0 < number < math.inf and (what != "gpus" or number.is_integer()) for number in numbers)
        if what not in ("gpus", "bandwidth") or not numbers or not possible:
            raise MeshError(f"a sweep of {text!r}", expected="gpus=8..16384, or bandwidth=0.25,1,4",
                            remedy="write it so: --sweep gpus=8..1024")  # fmt: skip
        return cls(what, tuple(numbers))


def _doubled(first: float, last: float) -> Iterable[float]:
    value = first
    while 0 < value <= last:
        yield value
        value *= 2


@dataclass(frozen=True)
class Point:
    """One forecast of a sweep, and of which curve it is."""

    curve: str
    value: float
    forecast: Forecast


def sweep(
    forecaster: Forecaster, settings: Sequence[tuple[Setting, Machine]], over: Sweep, scaling: str = "weak"
) -> list[Point]:
    """Forecasts of every setting at every value; each setting on its machine is a curve.

    With `weak` scaling each GPU keeps its batch; with `strong` the batch of all stays that of the first point, made of
    fewer micro-batches, down to one.
    """
    if scaling not in SCALING:
        raise MeshError(f"scaling {scaling!r}", expected=f"one of {', '.join(SCALING)}", remedy="pass one of them")
    points = []
    for setting, machine in settings:
        curve = f"{setting.way.name} on {machine.name}"
        for value in over.values:
            changed = _at(setting, machine, over, value, scaling)
            if changed is not None:
                points.append(Point(curve, value, forecaster.forecast(*changed, helps=False)))
    if not points:
        raise MeshError(f"a sweep over {', '.join(f'{value:g}' for value in over.values)} GPUs",
                        expected="numbers that the other axes of the mesh divide",
                        remedy="sweep over multiples of the ranks of tp")  # fmt: skip
    return points


def _at(setting: Setting, machine: Machine, over: Sweep, value: float, scaling: str) -> tuple[Setting, Machine] | None:
    if over.what == "bandwidth":
        return setting, _with_bandwidth(machine, value)
    others = 1
    for axis, size in setting.mesh.items():
        others *= size if axis != DATA_AXIS else 1
    data, rest = divmod(int(value), others)
    if rest or not data:
        return None
    mesh = {**dict.fromkeys([DATA_AXIS], data), **{axis: n for axis, n in setting.mesh.items() if axis != DATA_AXIS}}
    accumulate = setting.accumulate
    if scaling == "strong":
        first = int(over.values[0]) // others or 1
        accumulate = max(1, round(setting.accumulate * first / data))
    return dataclasses.replace(setting, mesh=mesh, accumulate=accumulate), machine


def _with_bandwidth(machine: Machine, times: float) -> Machine:
    network = machine.network
    if network is None:
        raise MeshError(f"{machine.name} has no network to change", expected="a machine of nodes",
                        remedy="take one with a network, such as h100-cluster")  # fmt: skip
    between = dataclasses.replace(network.between, bandwidth=network.between.bandwidth * times)
    return dataclasses.replace(machine, network=dataclasses.replace(network, between=between))


COLUMNS = ("curve", "value", "gpus", "step_seconds", "tokens_per_second_per_gpu", "mfu", "memory_bytes", "fits",
           "bound_by", "exposed_seconds", "next_bound")  # fmt: skip


def to_csv(points: Sequence[Point]) -> str:
    """A sweep as comma-separated values."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in points:
        writer.writerow(row(point).values())
    return file.getvalue()


def row(point: Point) -> dict[str, object]:
    """One point's figures by column."""
    found = point.forecast
    by_size = sorted(found.bounds, key=found.bounds.__getitem__, reverse=True)
    values = (point.curve, point.value, found.gpus, found.seconds, found.tokens_per_second_per_gpu, found.mfu,
              found.memory.bytes, found.fits, found.bound_by, sum(found.exposed.values()), by_size[1])  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))
