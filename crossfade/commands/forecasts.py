"""What `crossfade simulate` does with a model: forecasts on machines, side by side or swept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crossfade.commands.whatif import machine_of
from crossfade.errors import CrossfadeError, MeshError
from crossfade.forecast.forecast import Forecast
from crossfade.forecast.page import write_page
from crossfade.forecast.simulate import Forecaster, Setting
from crossfade.forecast.sources import NAMED, source_of
from crossfade.forecast.sweeps import Point, Sweep, sweep, to_csv
from crossfade.forecast.ways import way_named

DEFAULT_MACHINE = "h100-cluster"


@dataclass(frozen=True)
class Asked:
    """What is to be forecast, as the command line has it."""

    model: str
    batch: str = "1x2048"
    mesh: str = "dp=8"
    machines: Sequence[str] = ()
    ways: Sequence[str] = ()
    recompute: str = "none"
    float8: bool = False
    compiled: bool = False
    accumulate: int = 1
    spread: float = 0.0
    over: str = ""
    scaling: str = "weak"
    expandable: bool = False
    master: bool = True


@dataclass(frozen=True)
class Answered:
    """Forecasts, and the points of a sweep where one was asked for."""

    forecasts: list[Forecast]
    points: list[Point]
    over: str

    def write(self, html: Path | None, csv: Path | None) -> list[str]:
        """Write what was asked for; a line about each file."""
        try:
            return self._written(html, csv)
        except OSError as error:
            raise CrossfadeError(f"{error.filename}, which cannot be written ({error.strerror})",
                              remedy="give a place that can") from error  # fmt: skip

    def _written(self, html: Path | None, csv: Path | None) -> list[str]:
        written = []
        if html is not None:
            written.append(f"HTML report: {write_page(html, self.forecasts, self.points, self.over)}")
        if csv is not None:
            if not self.points:
                raise MeshError("--csv without a sweep", remedy="pass --sweep gpus=8..1024, say")
            csv.write_text(to_csv(self.points))
            written.append(f"CSV: {csv}")
        return written


def is_model(what: str) -> bool:
    """Whether the command line names a model, rather than a program as text.

    >>> is_model("model.py:build"), is_model("step.txt")
    (True, False)
    """
    if what.endswith(".txt"):
        return False
    return what in NAMED or what.endswith(".json") or ".py:" in what or not Path(what).exists()


def mesh_of(text: str) -> dict[str, int]:
    """A mesh as people write it.

    >>> mesh_of("dp=32,tp=8")
    {'dp': 32, 'tp': 8}
    """
    found = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not size.isdigit() or axis in found:
            raise MeshError(f"a mesh of {text!r}", expected="axes and ranks, such as dp=32,tp=8",
                            remedy="write it so: --mesh dp=32,tp=8")  # fmt: skip
        found[axis] = int(size)
    return found


def answer(asked: Asked) -> Answered:
    """Forecast what was asked for: every way on every machine."""
    source = source_of(asked.model, asked.batch)
    forecaster = Forecaster(source.model, source.batch, source.loss_fn, name=source.name, tokens=source.tokens)
    machines = [machine_of(name) for name in asked.machines or (DEFAULT_MACHINE,)]
    mesh = mesh_of(asked.mesh)
    settings = [
        (Setting(mesh, way_named(way), asked.recompute, asked.float8, asked.compiled, asked.accumulate, asked.spread,
                 asked.expandable, asked.master),
         machine)
        for way in asked.ways or ("fsdp",)
        for machine in machines
    ]  # fmt: skip
    forecasts = [forecaster.forecast(*each) for each in settings]
    if not asked.over:
        return Answered(forecasts, [], "")
    over = Sweep.read(asked.over)
    what = "GPUs" if over.what == "gpus" else "times the bandwidth between nodes"
    return Answered(forecasts, sweep(forecaster, settings, over, asked.scaling), what)
