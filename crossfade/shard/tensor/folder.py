"""A sharded program on disk: one program for all ranks, the weights of each, and an account for people and loaders.

    program.pt2               the local program without its state, which `torch.export.load` reads
    rank-0-of-2.safetensors   what rank 0 holds
    rank-1-of-2.safetensors
    sharded.json              axis, ranks, placements, plan, verdicts, versions

Every file names the program that it belongs to, by a hash that all ranks find by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from crossfade.errors import StateError
from crossfade.graph.passes import Outcome, Verdict
from crossfade.graph.private import exported_with, tree_map_only
from crossfade.shard.tensor.devices import device_types, like, moved
from crossfade.shard.tensor.fill import devices_of
from crossfade.shard.tensor.partition import RANK
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from crossfade.shard.tensor.plan_resolved import ModuleBoundary, ParameterSharding, ResolvedPlan
from crossfade.shard.tensor.sources import safetensors_for

PROGRAM, ACCOUNT = "program.pt2", "sharded.json"
FORMAT = 1


@dataclass(frozen=True)
class Account:
    """What `sharded.json` says."""

    axis: str
    ranks: int
    program: str
    """The hash of the program."""
    plan: ResolvedPlan
    placements: Mapping[str, Placement]
    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]
    verdicts: tuple[Verdict, ...]


def weights_file(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def fingerprint(exported: ExportedProgram) -> str:
    """A hash of what the program computes and of the shapes of its state: alike on all ranks."""
    said = hashlib.sha256()
    modules = [module for _, module in exported.graph_module.named_modules() if isinstance(module, fx.GraphModule)]
    for node in (node for module in modules for node in module.graph.nodes):
        value = node.meta.get("val")
        shape = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ""
        arguments = tree_map_only(torch.device, lambda device: device.type, (node.args, node.kwargs))
        said.update(f"{node.name} {node.op} {node.target} {arguments} {shape}\n".encode())
    for spec in (*exported.graph_signature.input_specs, *exported.graph_signature.output_specs):
        said.update(f"{spec.kind} {spec.arg} {spec.target}\n".encode())
    return said.hexdigest()[:32]


def write_program(folder: Path, exported: ExportedProgram, account: Account) -> None:
    """Write what is alike on all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: like(torch.empty_like(value, device="meta"), value) for name, value in exported.state_dict.items()}
    split = _split_constants(exported, account.placements)
    constants = {
        name: torch.empty_like(value, device="meta") if name in split else value
        for name, value in exported.constants.items()
    }
    bare = exported_with(exported, state, constants)
    with _finished(folder / PROGRAM) as path:
        torch.export.save(bare, path, extra_files={ACCOUNT: account.program})
    with _finished(folder / ACCOUNT) as path:
        path.write_text(json.dumps(_to_data(account), indent=1) + "\n", encoding="utf-8")


def write_weights(folder: Path, exported: ExportedProgram, account: Account, rank: int) -> Path:
    """Write what one rank holds; a file that is there under this name is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / weights_file(rank, account.ranks)
    tensors = {name: value.detach() for name, value in exported.state_dict.items() if name != RANK}
    for alias, canonical in account.plan.aliases.items():
        if canonical in tensors:
            tensors.pop(alias, None)
    tensors |= {name: exported.constants[name] for name in _split_constants(exported, account.placements)}
    said = {"format": "pt", "program": account.program, "rank": str(rank), "ranks": str(account.ranks)}
    with _finished(path) as unfinished:
        safetensors_for(path).torch.save_file(_apart(tensors), str(unfinished), metadata=said)
    return path


@contextlib.contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """Another name to write under, which becomes the path once all is written: replicas may save at the same time."""
    unfinished = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_account(folder: Path) -> Account:
    """What a folder says of itself."""
    path = folder / ACCOUNT
    if not path.exists():
        raise StateError(f"no {ACCOUNT} in {folder}", expected="a folder that Sharded.save or `crossfade shard` wrote",
                         remedy="correct the path, or save there first")  # fmt: skip
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise StateError(f"{path} of format {data.get('format')}", expected=f"{FORMAT}",
                         remedy="load it with the version of Crossfade that wrote it, or save it again")  # fmt: skip
    return _from_data(data)


def read_program(folder: Path, account: Account) -> ExportedProgram:
    """The program for this process's device, still without its state."""
    path = folder / PROGRAM
    if not path.exists():
        raise StateError(f"no {PROGRAM} in {folder}", expected="the file that rank 0 writes",
                         remedy="save on every rank of the axis, and wait for rank 0")  # fmt: skip
    extra = {ACCOUNT: ""}
    exported = torch.export.load(path, extra_files=extra)
    _check_program(path, extra[ACCOUNT], account)
    if "cuda" in device_types(exported):  # saved on the first rank's
        exported = moved(exported, {"cuda": torch.device("cuda", torch.cuda.current_device())})
    return exported


def read_weights(folder: Path, exported: ExportedProgram, account: Account, rank: int) -> ExportedProgram:
    """The program with a rank's state: mapped from its file, so that a number is read when it is first used."""
    path = folder / weights_file(rank, account.ranks)
    if not path.exists():
        there = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none"
        raise StateError(f"no {path.name} in {folder} (there: {there})", expected="a file of each rank",
                         remedy="save on every rank of the axis, or copy the file here")  # fmt: skip
    with safetensors_for(path).safe_open(str(path), framework="pt") as opened:
        _check_program(path, (opened.metadata() or {}).get("program", ""), account)
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    held[RANK] = torch.tensor(rank)
    devices = devices_of(exported)
    held = {name: value.to(devices.get(name, value.device)) for name, value in held.items()}
    aliases = account.plan.aliases
    needed = {aliases.get(name, name) for name in exported.state_dict}
    if lacking := sorted(needed.union(_split_constants(exported, account.placements)) - held.keys()):
        raise StateError(f"{path.name} without {', '.join(lacking[:3])}",
                         expected="everything that the program splits or trains",
                         remedy="save this rank again")  # fmt: skip
    read = {name: like(held[name], empty) for name, empty in exported.state_dict.items() if name in held}
    state = {name: read[aliases.get(name, name)] for name in exported.state_dict}
    return exported_with(exported, state, {name: held.get(name, value) for name, value in exported.constants.items()})


def _check_program(path: Path, found: str | bytes, account: Account) -> None:
    found = found.decode() if isinstance(found, bytes) else found
    if found != account.program:
        raise StateError(f"{path.name} of another program ({found[:8] or 'unnamed'})",
                         expected=f"{account.program[:8]}, which {ACCOUNT} names",
                         remedy="save all ranks again, into an empty folder")  # fmt: skip


def _split_constants(exported: ExportedProgram, placements: Mapping[str, Placement]) -> list[str]:
    """The buffers that checkpoints do not have and ranks have parts of."""
    return [name for name in exported.constants if isinstance(placements.get(name), Shard)]


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two share memory: the format has no word for that."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        seen.add(storage.data_ptr())
        result[name] = (tensor.clone() if shared else tensor).contiguous()
    return result


def _to_data(account: Account) -> dict[str, Any]:
    plan = account.plan
    return {
        "format": FORMAT,
        "axis": account.axis,
        "ranks": account.ranks,
        "program": account.program,
        "versions": {"torch": torch.__version__},
        "inputs": {name: _spelled(one) for name, one in account.inputs.items()},
        "outputs": [_spelled(one) for one in account.outputs],
        "placements": {name: _spelled(one) for name, one in account.placements.items()},
        "plan": {
            "parameters": [_parameter_data(one) for one in plan.parameters.values()],
            "boundaries": [dataclasses.asdict(one) for one in plan.boundaries.values()],
            "aliases": dict(plan.aliases),
            "notes": list(plan.notes),
        },
        "verdicts": [dataclasses.asdict(one) for one in account.verdicts],
    }


def _from_data(data: Mapping[str, Any]) -> Account:
    said = data["plan"]
    parameters = [_parameter(one) for one in said["parameters"]]
    boundaries = [ModuleBoundary(**one) for one in said["boundaries"]]
    plan = ResolvedPlan(
        {one.name: one for one in parameters},
        {one.module: one for one in boundaries},
        said["aliases"],
        data["ranks"],
        tuple(said["notes"]),
    )
    return Account(
        data["axis"],
        data["ranks"],
        data["program"],
        plan,
        {name: _read(one) for name, one in data["placements"].items()},
        {name: _read(one) for name, one in data["inputs"].items()},
        tuple(_read(one) for one in data["outputs"]),
        tuple(Verdict(**{**one, "outcome": Outcome(one["outcome"])}) for one in data["verdicts"]),
    )


def _parameter_data(one: ParameterSharding) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "dtype": str(one.dtype).removeprefix("torch.")}


def _parameter(data: Mapping[str, Any]) -> ParameterSharding:
    lists = {"blocks": tuple(data["blocks"]), "shape": tuple(data["shape"])}
    return ParameterSharding(**{**data, **lists, "dtype": getattr(torch, data["dtype"])})


def _spelled(placement: Placement) -> Any:
    """
    >>> _spelled(Shard(1)), _spelled(Shard(0, sizes=(4, 2))), _spelled(REPLICATE)
    ({'shard': 1}, {'shard': 0, 'sizes': [4, 2]}, 'replicate')
    """
    if not isinstance(placement, Shard):
        return "partial" if isinstance(placement, Partial) else "replicate"
    blocks = {"sizes": list(placement.sizes)} if placement.sizes else {"outer": placement.outer}
    return {"shard": placement.dim, **({} if blocks == {"outer": 1} else blocks)}


def _read(data: Any) -> Placement:
    if isinstance(data, str):
        return PARTIAL if data == "partial" else REPLICATE
    return Shard(data["shard"], data.get("outer", 1), tuple(data.get("sizes", ())))
