"""A sharded program on disk: one program for all ranks, the weights of each, and an account for people and loaders.

    program.pt2               the local program without its state, which `torch.export.load` reads
    rank-0-of-2.safetensors   what rank 0 holds
    rank-1-of-2.safetensors
    sharded.json              axis, ranks, placements, plan, verdicts, versions

Every file names the program that it belongs to, by a hash that all ranks find by themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from crossfade.errors import StateError
from crossfade.files.found import FileValue
from crossfade.files.plain import read_json
from crossfade.files.pt2 import load_exported
from crossfade.files.tensors import TensorsFile, safetensors_for
from crossfade.graph.private import exported_with, tree_map_only
from crossfade.graph.text import render_type
from crossfade.shard.tensor.account import FORMAT, Account, account_of, check_fits, to_data
from crossfade.shard.tensor.builder import RANK
from crossfade.shard.tensor.devices import device_types, like, moved
from crossfade.shard.tensor.fill import devices_of
from crossfade.shard.tensor.placements import Placement, Shard

__all__ = ["Account", "fingerprint", "read_account", "read_program", "read_weights", "write_program", "write_weights"]

PROGRAM, ACCOUNT = "program.pt2", "sharded.json"


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
        path.write_text(json.dumps(to_data(account), indent=1) + "\n", encoding="utf-8")


def write_weights(folder: Path, exported: ExportedProgram, account: Account, rank: int) -> Path:
    """Write what one rank holds; a file that is there under this name is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / weights_file(rank, account.files)
    tensors = {name: value.detach() for name, value in exported.state_dict.items() if name != RANK}
    for alias, canonical in account.plan.aliases.items():
        if canonical in tensors:
            tensors.pop(alias, None)
    tensors |= {name: exported.constants[name] for name in _split_constants(exported, account.placements)}
    said = {"format": "pt", "program": account.program, "rank": str(rank), "ranks": str(account.files)}
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
        raise StateError(f"{folder} has no {ACCOUNT}", expected="a folder that Sharded.save or `crossfade shard` wrote",
                         remedy="correct the path, or save there first")  # fmt: skip
    remedy = "load it with the version of Crossfade that wrote it, or save it again"
    found = FileValue(read_json(path, StateError, remedy), str(path), "", StateError, remedy)
    found["format"].whole(least=FORMAT, most=FORMAT)
    return account_of(found)


def read_program(folder: Path, account: Account, *, trusted: bool = False) -> ExportedProgram:
    """The program for this process's device, still without its state. Nothing in the file is run, unless it is
    `trusted`."""
    path = folder / PROGRAM
    if not path.exists():
        raise StateError(f"{folder} has no {PROGRAM}", expected="the file that rank 0 writes",
                         remedy="save on every rank of the axis, and wait for rank 0")  # fmt: skip
    exported, extra = load_exported(path, trusted=trusted)
    _check_program(path, extra.get(ACCOUNT, ""), account)
    check_fits(folder, account, exported)
    if "cuda" in device_types(exported):  # saved on the first rank's
        exported = moved(exported, {"cuda": torch.device("cuda", torch.cuda.current_device())})
    return exported


def read_weights(folder: Path, exported: ExportedProgram, account: Account, rank: int) -> ExportedProgram:
    """The program with a rank's state: mapped from its file, so that a number is read when it is first used."""
    path = folder / weights_file(rank, account.files)
    if not path.exists():
        there = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none"
        raise StateError(f"{folder} has no {path.name} (but: {there})", expected="a file of each rank",
                         remedy="save on every rank of the axis, or copy the file here")  # fmt: skip
    opened = TensorsFile(path)
    _check_program(path, opened.metadata().get("program", ""), account)
    held = {name: opened.tensor(name) for name in opened.names}
    held[RANK] = torch.tensor(rank % account.ranks)  # those of the plan's axis are side by side
    devices = devices_of(exported)
    held = {name: value.to(devices.get(name, value.device)) for name, value in held.items()}
    aliases = account.plan.aliases
    needed = {aliases.get(name, name) for name in exported.state_dict}
    if lacking := sorted(needed.union(_split_constants(exported, account.placements)) - held.keys()):
        raise StateError(f"{path.name} lacks {', '.join(lacking[:3])}",
                         expected="everything that the program splits or trains",
                         remedy="save this rank again")  # fmt: skip
    for name, empty in exported.state_dict.items():
        if name in held and (held[name].shape, held[name].dtype) != (empty.shape, empty.dtype):
            raise StateError(f"{path}: {name!r} is {render_type(held[name])}", expected=render_type(empty),
                             remedy="save this rank again")  # fmt: skip
    read = {name: like(held[name], empty) for name, empty in exported.state_dict.items() if name in held}
    state = {name: read[aliases.get(name, name)] for name in exported.state_dict}
    return exported_with(exported, state, {name: held.get(name, value) for name, value in exported.constants.items()})


def _check_program(path: Path, found: str | bytes, account: Account) -> None:
    found = found.decode() if isinstance(found, bytes) else found
    if found != account.program:
        raise StateError(f"{path.name} belongs to another program ({found[:8] or 'unnamed'})",
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
