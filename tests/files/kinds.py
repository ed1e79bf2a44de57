"""One example of every kind of file that is read, and how it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crossfade.capture.exported import capture_exported
from crossfade.compile.pipeline import optimization
from crossfade.compile.planned import take
from crossfade.compile.sharding import Sharded, shard
from crossfade.compile.step_plan import Origin, PlannedProgram, StepPlan, differences
from crossfade.cost.machine import Machine
from crossfade.cost.measure import Measurements
from crossfade.cost.presets import PRESETS, preset
from crossfade.errors import BatchError, CrossfadeError
from crossfade.files.pickled import load_tensors
from crossfade.files.program_text import read_program_text
from crossfade.files.pt2 import load_exported
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.ranks import checkpoint
from crossfade.report.report import Report, Table
from crossfade.shard.tensor.placements import REPLICATE, Shard
from crossfade.shard.tensor.plan import Fused, Plan
from crossfade.shard.tensor.sources import source_of
from tests.cost.traces import whole_step, write

TEXT = '''
def body():
    row: f32[3] = input("row")
    relu: f32[3] = aten.relu(row)
    return output("0", relu)
w: f32[8, 8] = parameter("layers.0.w")
x: f32[4, 8] = input("x [0] \\\\ \\"q\\"")
n: int = scalar("n")
rows: f32[4, 3] = input("rows")
body: graph = constant("body")
mapped: (f32[4, 3],) = higher_order.map_impl(body, [rows], [])
first: f32[4, 3] = mapped[0]
m: int = operator.mul(n, 2)
half: bf16[4, 8] = aten._to_copy(x, dtype=bf16)
mm: f32[4, 8] = aten.mm(x, w)
zeros: f32[4, 8] = aten.full([4, 8], 0.5, dtype=f32, layout=strided, device=device("cpu"), pin_memory=False)
sum_1: f32[4, 8] = aten.add.Tensor(mm, zeros, alpha=2)
parts: (f32[2, 8], f32[2, 8]) = aten.split.Tensor(sum_1, 2)
part: f32[2, 8] = parts[0]
start: f32[4, 8] = c10d.all_reduce(sum_1, "sum", "dp")
done: f32[4, 8] = c10d.wait_tensor(start)
return output("y", done), output("p", part), output("h", half), output("f", first), update("m", m)
'''  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """`write` puts a right example into a folder, `read` reads it from there and uses it."""

    write: Callable[[Path], None]
    read: Callable[[Path], object]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x)))) * self.scale


def exported() -> Any:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(Small().eval(), (torch.ones(4, 8),), dynamic_shapes={"x": {0: batch}})


def write_text(folder: Path) -> None:
    (folder / "program.txt").write_text(TEXT)


def read_text(folder: Path) -> object:
    program = read_program_text(folder / "program.txt")
    program.groups = dict.fromkeys(collectives.group_sizes(program.graph), 2)
    with contextlib.suppress(CrossfadeError):  # about the program, which has been read
        run_passes(program, optimization())
    return program


def write_report(folder: Path) -> None:
    before = parse(TEXT, groups={"dp": 2})
    report = Report.of(before, run_passes(before, optimization()), title="a step", facts={"mesh": "dp=2"})
    table = Table("times", ["ranks", "ms"], [[2, 14.5], [4, None]])
    Report(**{**vars(report), "tables": (table,), "memory": (("x", 12), ("y", 3))}).to_json(folder / "report.json")


def write_sharded(folder: Path) -> None:
    model = exported()
    for rank in range(2):
        shard(model, {"tp": 2}, Plan({"up": "colwise", "down": "rowwise"}), rank=rank).save(folder)


def read_sharded(folder: Path) -> object:
    sharded = Sharded.load(folder, {"tp": 2}, rank=0)
    return str(sharded.plan), sharded.program.module()


def write_weights(folder: Path) -> None:
    import json

    from safetensors.torch import save_file

    state = {name: value.contiguous() for name, value in Small().state_dict().items()}
    names = sorted(state)
    files = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, kept in files.items():
        save_file({name: state[name] for name in kept}, str(folder / file), metadata={"format": "pt"})
    listed = {
        "metadata": {"total_size": 1},
        "weight_map": {name: file for file, kept in files.items() for name in kept},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed, indent=1))


def write_tensors(folder: Path) -> None:
    write_weights(folder)
    for file in ("model.safetensors.index.json", "model-2.safetensors"):
        (folder / file).unlink()


def read_source(folder: Path) -> object:
    source = source_of(folder)
    for name in list(source.names()):
        placement = Shard(0) if source.shape(name) and source.shape(name)[0] % 2 == 0 else REPLICATE
        source.part(name, placement, 0, 2)
    return source


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_checkpoint(folder: Path) -> None:
    state = checkpoint.state_of(*training(), steps=3, with_random=True)
    checkpoint.save(state, folder / "step", None, first=True)


def read_checkpoint(folder: Path) -> object:
    model, optimizer = training()
    state = checkpoint.state_of(model, optimizer, steps=0, with_random=True)
    checkpoint.load(state, folder / "step", None)
    generator = torch.get_rng_state()
    try:
        return checkpoint.restore(model, optimizer, state)
    finally:
        torch.set_rng_state(generator)


def write_archive(folder: Path) -> None:
    torch.export.save(exported(), folder / "model.pt2", extra_files={"note.txt": "hello"})


def read_archive(folder: Path) -> object:
    loaded, _ = load_exported(folder / "model.pt2")
    return capture_exported(loaded), loaded.module()


def write_inputs(folder: Path) -> None:
    torch.save({"x": torch.ones(4, 8), "more": [torch.arange(3), 2.5, "word", None]}, folder / "inputs.pt")


PLAN = Plan(
    {"layers.*.up": "colwise", "down": Fused("rowwise", 2), "qkv": Fused("colwise", (8, 4, 4)), "e": "shard(0)"}
)

STEP_PLAN = StepPlan(
    {"model": "Small", "optimizer": "AdamW", "torch": "2.13.0", "device": "CPU", "settings": {"accumulate": 1},
     "backends": {"dp": "gloo"}},
    {"mesh": {"dp": 4, "tp": 2}, "data_parallel": "zero2", "keep_whole": ["up.bias"],
     "tensor_parallel": PLAN.as_data(), "machine": "ethernet-1gbit", "memory_limit": None},
    {"up.weight": "float32[16, 8] dim 0 over tp, rows over dp"},
    (PlannedProgram(("batch[0]: float32[4, 8]",), Origin("0123456789abcdef", {"aten.mm.default": 3}),
                    ("exchange-factors(chosen=(('reduce_scatter_tensor',2),))", "bucket-all-gathers(cap_mb=(1.0,4.0))",
                     "arrange-nodes(order=('x..mm','exp'))", "lower-all-gathers(piece_mb=1e999)"),
                    ("bucket-all-gathers, bucket 0: up.weight",), ("all_gather over dp, 64 bytes",), "fedcba"),),
)  # fmt: skip


def read_step_plan(folder: Path) -> object:
    plan = StepPlan.load(folder / "step_plan.json")
    differences(plan.as_json(), STEP_PLAN.as_json())
    nothing: dict[str, Any] = dict.fromkeys(("mesh", "keep_whole", "tensor_parallel", "machine", "memory_limit"))
    return take(plan, data_parallel="replicate", **nothing), [program.made() for program in plan.programs], plan.machine


KINDS: dict[str, Kind] = {
    "step-plan": Kind(lambda folder: STEP_PLAN.save(folder / "step_plan.json"), read_step_plan),
    "text": Kind(write_text, read_text),
    "machine": Kind(lambda folder: void(preset(next(iter(PRESETS))).save(folder / "machine.json")),
                    lambda folder: Machine.load(folder / "machine.json")),
    "trace": Kind(lambda folder: void(write(folder / "trace.json", whole_step())),
                  lambda folder: Machine.from_trace(folder / "trace.json", like=preset(next(iter(PRESETS))))),
    "measurements": Kind(lambda folder: void(Measurements({"aten.mm": 1e-3}, left_out=["a"], unmeasurable={"b": "c"})
                                             .save(folder / "times.json")),
                         lambda folder: Measurements.load(folder / "times.json")),
    "plan": Kind(lambda folder: PLAN.save(folder / "plan.json"), lambda folder: Plan.load(folder / "plan.json")),
    "plan-yaml": Kind(lambda folder: PLAN.save(folder / "plan.yaml"), lambda folder: Plan.load(folder / "plan.yaml")),
    "report": Kind(write_report, lambda folder: Report.from_json(folder / "report.json")),
    "sharded": Kind(write_sharded, read_sharded),
    "index": Kind(write_weights, read_source),
    "safetensors": Kind(write_tensors, read_source),
    "checkpoint": Kind(write_checkpoint, read_checkpoint),
    "weights-of-checkpoint": Kind(write_checkpoint, lambda folder: read_source(folder / "step")),
    "pt2": Kind(write_archive, read_archive),
    "inputs": Kind(write_inputs, lambda folder: load_tensors(folder / "inputs.pt", BatchError)),
}  # fmt: skip


def void(value: object) -> None:
    """For writers that return something."""
