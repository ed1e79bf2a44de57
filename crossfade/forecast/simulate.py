"""From a model, a mesh and a machine to a forecast: `crossfade.simulate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from crossfade.compile.overlap import plan_overlap
from crossfade.cost.flops import flops_of, is_convolution
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.cost.products import is_attention, shape_of
from crossfade.cost.stragglers import largest_of
from crossfade.cost.timeline import Costs, Timeline
from crossfade.cost.timeline import simulate as run_timeline
from crossfade.errors import BatchError, MachineError, MeshError
from crossfade.forecast.capture import TENSOR_AXIS, Captured, capture_model
from crossfade.forecast.forecast import Forecast, Help, Memory
from crossfade.forecast.held_memory import Kept, held_memory
from crossfade.forecast.prepared import Prepared, at_the_pace_of
from crossfade.forecast.step_time import Exchanged, Once
from crossfade.forecast.ways import DATA_AXIS, Way, recomputation, way_named
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.private import tree_flatten
from crossfade.graph.program import InputKind, OutputKind, Program, tensor_bytes
from crossfade.tracebacks import users_frames

_ADAM_READS_AND_WRITES = 7
"""Numbers moved for each parameter by Adam: it, its gradient and two moments read, all but the gradient written."""
_MOST_HELPS = 3


@dataclass(frozen=True)
class Setting:
    """How a model is run, but for the machine."""

    mesh: Mapping[str, int]
    way: Way
    recompute: str = "none"
    float8: bool = False
    compiled: bool = False
    accumulate: int = 1
    spread: float = 0.0
    expandable: bool = False
    """Whether torch's allocator makes its segments longer (`expandable_segments`), instead of taking more of them."""
    master: bool = True
    """Whether parameters in half precision have copies in float32, which are what is updated: mixed precision."""


@users_frames
def simulate(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    mesh: Mapping[str, int],
    machine: Machine | str = "h100-cluster",
    loss_fn: Callable[..., Tensor] | None = None,
    way: str = "fsdp",
    recompute: str = "none",
    float8: bool = False,
    compiled: bool = False,
    accumulate: int = 1,
    plan: Any = None,
    spread: float = 0.0,
    expandable: bool = False,
    master: bool = True,
    name: str = "",
) -> Forecast:
    """Forecast a training step of a model on a mesh of a machine, without a device, ranks or weights.

    `batch` is one micro-batch of one rank, by shapes alone; model and batch may be on the meta device. `mesh` has the
    axes `dp` and `tp`, the last one inside nodes. `way` is how data-parallel ranks run it: `ddp`, `fsdp`, `fsdp-kept`,
    `megatron`, `megatron-bucketed`, or `crossfade`, planned by simulation. `recompute` is `none`, `full` or
    `selective`; `float8` computes products of weights in it; `compiled` fuses elementwise operators as Inductor does.
    `spread` is the standard deviation of a device's speed: all ranks wait for the slowest. `expandable` counts memory
    as torch's allocator takes it with `expandable_segments:True`. Parameters in half precision are taken to have
    copies in float32 that are updated (in FSDP their parts are such copies, and gradients are reduced in float32);
    with `master=False` they are updated themselves, and the optimizer's state and gradients are as precise as they are.

        >>> model = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(8)))
        >>> batch = torch.empty(4096, 1024, device="meta"), torch.empty(4096, 1024, device="meta")
        >>> found = simulate(model, batch, mesh={"dp": 16}, loss_fn=nn.functional.mse_loss, way="ddp")
        >>> found.gpus, found.fits
        (16, True)
    """
    known = preset(machine) if isinstance(machine, str) else machine
    setting = Setting(dict(mesh), way_named(way), recompute, float8, compiled, accumulate, spread, expandable, master)
    return Forecaster(model, batch, loss_fn, plan, name or type(model).__name__).forecast(setting, known)


@dataclass
class Forecaster:
    """Forecasts of one model on many meshes and machines: what they have in common is made once."""

    model: nn.Module
    batch: tuple[Any, ...]
    loss_fn: Callable[..., Tensor] | None = None
    plan: Any = None
    name: str = "model"
    tokens: int = 0
    """In a micro-batch of a rank; by default counted."""
    _captured: dict[int, Captured] = field(default_factory=dict)
    _built: dict[Any, Built] = field(default_factory=dict)

    def forecast(self, setting: Setting, machine: Machine, *, helps: bool = True) -> Forecast:
        """One forecast."""
        check(setting, machine)
        on_mesh = machine.on_mesh(setting.mesh)
        built = self._build(setting, on_mesh)
        found = built.spent(on_mesh)
        ways_to_help = _helps(built, machine, found.seconds) if helps else ()
        data = setting.mesh.get(DATA_AXIS, 1)
        return Forecast(
            self.name, machine.name, dict(setting.mesh), setting.way.name, found.seconds,
            (self.tokens or _tokens(self.batch)) * data * setting.accumulate,
            built.flops * setting.accumulate,
            machine.products.peak if machine.products is not None else 0.0,
            built.memory if machine.device == "cuda" else dataclasses.replace(built.memory, allocator=0),
            machine.memory, found.spent, found.bounds, ways_to_help, found.timeline, setting.accumulate,
        )  # fmt: skip

    def _build(self, setting: Setting, on_mesh: Machine) -> Built:
        planned = on_mesh if setting.way.planned else None
        how = (setting.recompute, setting.float8, setting.compiled, setting.accumulate, setting.spread)
        held = (setting.expandable, setting.master)
        key = (tuple(setting.mesh.items()), setting.way.name, *how, *held, on_mesh.device, planned)
        if key not in self._built:
            ranks = setting.mesh.get(TENSOR_AXIS, 1)
            if ranks not in self._captured:
                self._captured[ranks] = capture_model(self.model, self.batch, self.loss_fn, ranks=ranks, plan=self.plan)
            self._built = {key: build(self._captured[ranks].program, setting, on_mesh.device, planned)}
        return self._built[key]


def check(setting: Setting, machine: Machine) -> None:
    """Refuse a setting that no machine could run."""
    unknown = [axis for axis in setting.mesh if axis not in (DATA_AXIS, TENSOR_AXIS)]
    if unknown or any(type(size) is not int or size < 1 for size in setting.mesh.values()):
        raise MeshError(f"a mesh of {dict(setting.mesh)}", expected="axes dp and tp, each of at least one rank",
                        remedy='write mesh={"dp": 32, "tp": 8}, or --mesh dp=32,tp=8')  # fmt: skip
    if setting.accumulate < 1:
        raise BatchError(
            f"accumulate={setting.accumulate}", expected="at least 1", remedy="pass a number of at least 1"
        )
    if not 0 <= setting.spread < math.inf:
        raise MachineError(f"spread={setting.spread}", expected="a share of at least 0", remedy="pass 0.02, say")
    tensor = setting.mesh.get(TENSOR_AXIS, 1)
    if machine.network is not None and list(setting.mesh)[-1] != TENSOR_AXIS and tensor > 1:
        raise MeshError("tp is not the last axis of the mesh", expected="ranks of tp side by side in a node",
                        remedy="write dp first: --mesh dp=32,tp=8")  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """A step on one machine: its seconds, where they go, and its last micro-batch in detail."""

    seconds: float
    spent: Mapping[str, float]
    bounds: Mapping[str, float]
    timeline: Timeline


@dataclass(frozen=True)
class Built:
    """A model's step made ready for machines: the last micro-batch, the ones before it, and what is done once."""

    setting: Setting
    last: Prepared
    before: Prepared | None
    once: Once
    memory: Memory
    flops: float

    def spent(self, machine: Machine) -> Spent:
        """The step on a machine whose fabrics lie over the mesh."""
        setting, mesh = self.setting, dict(self.setting.mesh)
        slower = 1 + setting.spread * largest_of(math.prod(mesh.values()))
        paced = at_the_pace_of(machine, mesh.get(TENSOR_AXIS, 1))
        last = self.last.costs(paced)
        timeline = run_timeline(self.last.program, last, f"forecast for {machine.name}")
        spent = _where(self.last, last, timeline)
        bounds = _bounds(self.last, last)
        seconds = timeline.seconds
        if self.before is not None:
            times = setting.accumulate - 1
            costs = self.before.costs(paced)
            earlier = run_timeline(self.before.program, costs)
            seconds += times * earlier.seconds
            for into, more in ((spent, _where(self.before, costs, earlier)), (bounds, _bounds(self.before, costs))):
                for cause, each in more.items():
                    into[cause] = into.get(cause, 0.0) + times * each
        after = self.once.seconds(machine, mesh, setting.accumulate)
        travel = sum(machine.collective_seconds(each.kind, each.bytes, mesh[each.axis], each.axis)
                     for each in self.once.exchanged)  # fmt: skip
        spent["update"] = after - travel
        bounds["memory"] += after - travel
        if travel:
            cause = f"exposed {self.once.exchanged[0].axis} {self.once.exchanged[0].kind}"
            spent[cause] = spent.get(cause, 0.0) + travel
            bounds["links"] += travel
        spent["stragglers"] = (seconds + after) * (slower - 1)
        return Spent((seconds + after) * slower, spent, bounds, timeline)


def build(captured: Program, setting: Setting, device: str, planned_for: Machine | None = None) -> Built:
    """Run the passes of a way over a captured program, for a type of device.

    With a machine to plan for, plan its buckets and order.
    """
    data = setting.mesh.get(DATA_AXIS, 1)
    captured.groups = dict(setting.mesh)
    flops = sum(flops_of(node) for node in captured.graph.nodes if node.op == "call_function")
    again: list[Pass] = recomputation(setting.recompute)
    exchanging = setting.way.passes(data, device, setting.master) if data > 1 else []
    plain = run_passes(captured, again) if again else captured
    last = run_passes(plain, exchanging) if exchanging else plain
    if planned_for is not None and data > 1:
        last = plan_overlap(last, planned_for).program
    options: dict[str, Any] = {"compiled": setting.compiled, "float8": setting.float8}
    before = None
    if setting.accumulate > 1:
        earlier = last if setting.way.split else plain
        before = Prepared.of(earlier, setting.mesh, **options)
    prepared = Prepared.of(last, setting.mesh, **options)
    memory, once = _kept(prepared, plain, setting, data)
    return Built(setting, prepared, before, once, memory, flops)


def _kept(last: Prepared, plain: Program, setting: Setting, data: int) -> tuple[Memory, Once]:
    """What a rank keeps, and what its update moves."""
    held = [node.meta["val"] for item, node in last.program.named_inputs() if item.kind is InputKind.PARAMETER]
    sizes = [tensor_bytes(value) for value in held]
    copies = [4 * value.numel() if setting.master and value.dtype.itemsize < 4 else 0 for value in held]
    gradients = sum(tensor_bytes(value.meta["val"]) for out, value in plain.named_results()
                    if out.kind is OutputKind.GRADIENT)  # fmt: skip
    after = setting.way.after and data > 1
    states = [3 * copy if copy else 2 * size for size, copy in zip(sizes, copies, strict=True)]
    found = held_memory(last.program, Kept(
        sizes, states, gradients if setting.way.buckets and data > 1 else 0,
        DATA_AXIS if setting.way.split and data > 1 else "", not setting.compiled, setting.accumulate,
        setting.way.planned, last.unwritten,
    ), expandable=setting.expandable)  # fmt: skip
    beside = found.alive - sum(sizes) - sum(states)
    memory = Memory(sum(sizes), sum(states), beside, found.reserved - found.alive)
    reduced = (Exchanged(Kind.ALL_REDUCE, gradients, DATA_AXIS),) if after else ()
    moved = sum(_update_bytes(size, copy) for size, copy in zip(sizes, copies, strict=True))
    return memory, Once(reduced, moved, 3.0 * (sum(sizes) if setting.way.split else gradients))


def _update_bytes(size: int, copy: int) -> float:
    """What Adam's update of one parameter reads and writes; of a copy, and then the parameter, where it has one.

    >>> _update_bytes(400, 0), _update_bytes(200, 400)
    (2800.0, 3400.0)
    """
    return float(_ADAM_READS_AND_WRITES * (copy or size) + (3 * size if copy else 0))


def _where(prepared: Prepared, costs: Costs, timeline: Timeline) -> dict[str, float]:
    """Where a program's seconds go."""
    spent = {"products": 0.0, "attention": 0.0, "memory": 0.0}
    for node, seconds in costs.compute.items():
        spent[_class(prepared, node)] += seconds
    for travel in timeline.communication:
        if travel.exposed:
            cause = f"exposed {travel.group} {travel.kind}"
            spent[cause] = spent.get(cause, 0.0) + travel.exposed
    spent["launches"] = timeline.launching
    spent["slowed by communication"] = max(0.0, timeline.seconds - sum(spent.values()))
    return spent


def _bounds(prepared: Prepared, costs: Costs) -> dict[str, float]:
    """Seconds that each resource would take by itself."""
    bounds = {"products": 0.0, "memory": 0.0, "launches": sum(costs.launches.values())}
    for node, seconds in costs.compute.items():
        bounds["memory" if _class(prepared, node) == "memory" else "products"] += seconds
    links: dict[str, float] = {}
    for node, seconds in costs.travel.items():
        group = collectives.group_of(node) or ""
        links[group] = links.get(group, 0.0) + seconds
    bounds["links"] = max(links.values(), default=0.0)
    return bounds


def _class(prepared: Prepared, node: fx.Node) -> str:
    if is_attention(node):
        return "attention"
    return "products" if shape_of(node, prepared.keys) is not None or is_convolution(node.target) else "memory"


def _helps(built: Built, machine: Machine, seconds: float) -> tuple[Help, ...]:
    """What would help most: each resource made twice as good, by itself."""
    mesh = built.setting.mesh
    tried = []
    for what, better in _better(machine).items():
        gained = seconds - built.spent(better.on_mesh(mesh)).seconds
        tried.append(Help(what, gained))
    best = sorted(tried, key=lambda each: -each.seconds)[:_MOST_HELPS]
    return tuple(each for each in best if each.seconds > 1e-3 * seconds)


def _better(machine: Machine) -> dict[str, Machine]:
    launching = dataclasses.replace(machine.launching, seconds=machine.launching.seconds / 2)
    found = {
        "products twice as fast": dataclasses.replace(
            machine, flops={dtype: 2 * rate for dtype, rate in machine.flops.items()}
        ),
        "memory twice as fast": dataclasses.replace(machine, memory_bandwidth=2 * machine.memory_bandwidth),
        "launches in half the time": dataclasses.replace(machine, launching=launching, overhead=machine.overhead / 2),
    }
    network = machine.network
    if network is not None:
        for where, links in (("between", "network between nodes"), ("inside", "links inside nodes")):
            wire = getattr(network, where)
            for what, better in (
                (f"twice the {links}", dataclasses.replace(wire, bandwidth=2 * wire.bandwidth)),
                (f"half the latency of the {links}", dataclasses.replace(wire, latency=wire.latency / 2)),
            ):
                found[what] = dataclasses.replace(machine, network=dataclasses.replace(network, **{where: better}))
    return found


def _tokens(batch: tuple[Any, ...]) -> int:
    """Elements of the first tensor of whole numbers; samples, where there is none."""
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    if not leaves:
        raise BatchError("a batch without tensors", remedy="pass what the model and the loss function take")
    whole = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dim() > 1]
    return whole[0].numel() if whole else leaves[0].shape[0]
