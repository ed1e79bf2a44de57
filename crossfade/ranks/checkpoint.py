"""Training state as one nested dict of tensors, to and from disk: what `torch.distributed.checkpoint` takes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from crossfade.errors import CrossfadeError, StateError
from crossfade.files.plain import decoded_json
from crossfade.ranks.shards import is_distributed

_OLD, _NEW = ".old", ".new"


class SplitState(Protocol):
    """A state of which this rank has parts that are no DTensors: how parts become DTensors, and these parts again."""

    def seen(self, name: str, part: Tensor) -> Any:
        """A part as what a checkpoint takes."""

    def own(self, name: str, value: Any, like: Tensor) -> Any:
        """This rank's part of what a checkpoint has, where there is one like this."""


def state_of(
    model: nn.Module, optimizer: Optimizer, *, steps: int, with_random: bool, parts: SplitState | None = None
) -> dict[str, Any]:
    """Everything that training goes on from, by the names of parameters; the tensors are the live ones.

    With `parts`, the parameters' and the optimizer's tensors are parts of whole ones, and there as DTensors.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if own := optimizer.state.get(parameter, {}):
            entries[name] = {key: _seen(parts, name, value, parameter) for key, value in own.items()}
    held = model.state_dict()
    held.update({name: _seen(parts, name, value, value) for name, value in held.items()})
    groups = [_plain_options(group) for group in optimizer.param_groups]
    state = {"model": held, "optimizer": entries, "groups": json.dumps(groups), "steps": steps}
    return state | ({"random": random_state(model)} if with_random else {})


def _seen(parts: SplitState | None, name: str, value: Any, parameter: Any) -> Any:
    """A value as a checkpoint takes it: split if it is of the parameter's shape and that is."""
    is_like = parts is not None and isinstance(value, Tensor) and value.shape == parameter.shape
    return parts.seen(name, value) if parts is not None and is_like else value


def restore(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, parts: SplitState | None = None
) -> int:
    """Put a state back, in place, and return its number of steps; the optimizer's entries must exist already."""
    _check(state)
    with torch.no_grad():
        present = model.state_dict()
        model.load_state_dict(
            {name: _own(parts, name, value, present.get(name)) for name, value in state["model"].items()}
        )
        for name, entries in state["optimizer"].items():
            parameter = model.get_parameter(name)
            live = optimizer.state[parameter]
            for key, value in entries.items():
                if isinstance(value, Tensor) and isinstance(now := live.get(key), Tensor):
                    now.copy_(_own(parts if now.shape == parameter.shape else None, name, value, now))
                else:
                    live[key] = value
    for group, saved in zip(optimizer.param_groups, json.loads(state["groups"]), strict=True):
        _put_options(group, saved)
    for device, generator in state.get("random", {}).items():
        _set_random_state(device, generator)
    return int(state["steps"])


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that JSON can hold; tensors of one number as that."""
    numbers = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
    kinds = (type(None), bool, int, float, str, list, tuple)
    return {k: v for k, v in numbers.items() if k != "params" and isinstance(v, kinds)}


def _put_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Options as they were saved, in place where they are tensors, in tuples where they are tuples."""
    for key, value in saved.items():
        live = group.get(key)
        if isinstance(live, Tensor) and isinstance(value, int | float):
            live.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(live, tuple) else value


def _own(parts: SplitState | None, name: str, value: Any, live: Any) -> Any:
    """What a rank puts in the place of a live tensor."""
    if parts is not None and isinstance(live, Tensor):
        return parts.own(name, value, live)
    return _split_like(live, value)


def _split_like(live: Any, value: Any) -> Any:
    """A value in parts if the live tensor is, and it is whole; whole if the live tensor is, and it is in parts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, DTensor):
        return value if isinstance(live, DTensor) else value.full_tensor()
    if not isinstance(live, DTensor):
        return value
    return distribute_tensor(value, live.device_mesh, live.placements, src_data_rank=None)


def _check(state: Mapping[str, Any]) -> None:
    if missing := [key for key in ("model", "optimizer", "groups", "steps") if key not in state]:
        raise CrossfadeError(
            f"a state without {', '.join(missing)}",
            expected="what step.state_dict() returned",
            remedy="load a checkpoint that step.save() or torch.distributed.checkpoint.save(step.state_dict()) wrote",
        )


def checksums(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """A line for what all ranks hold alike: parameters, buffers, optimizer state that is a number or no DTensor.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(layer.weight)
    >>> checksums(layer, torch.optim.SGD(layer.parameters()))
    ['weight with checksum aca16a6a']
    """
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        entries = optimizer.state.get(parameter, {})
        tensors |= {f"{name}:{key}": value for key, value in entries.items() if isinstance(value, Tensor)}
    whole = {name: tensor for name, tensor in tensors.items() if not is_distributed(tensor)}
    sums = [f"{name} with checksum {checksum(tensor):08x}" for name, tensor in whole.items()]
    return sums + [
        f"{name}:{key} = {value}"
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, int | float)
    ]


def checksum(tensor: Tensor) -> int:
    """Of a tensor's bytes: equal for equal numbers."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def random_state(model: nn.Module) -> dict[str, Tensor]:
    """Of the generators that the model draws from, by the kind of device."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def _set_random_state(device: str, generator: Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(generator)
    else:
        torch.cuda.set_rng_state(generator)


def save(state: Mapping[str, Any], folder: str | Path, group: Any, *, first: bool) -> None:
    """Write a state from all ranks of a group; an earlier one in the same place stays whole until this one is.

    `group` is the ranks' process group, None for one process; `first` says whether this rank moves the folders.
    """
    from torch.distributed import checkpoint

    folder = Path(folder)
    new = folder.with_name(folder.name + _NEW)
    _refuse_other_files(folder)
    if first and new.exists():  # of a run that was cut
        shutil.rmtree(new)
    _meet(group)
    with _plain_errors(f"saving to {folder}"):
        checkpoint.save(dict(state), checkpoint_id=new, process_group=group, no_dist=group is None)
    _meet(group)
    if first:
        _replace(folder, new)
    _meet(group)


def load(state: dict[str, Any], folder: str | Path, group: Any) -> None:
    """Read into a state, its tensors in place, what `save` wrote from any number of ranks."""
    from crossfade.files.checkpoints import load_into, read_metadata

    folder = Path(folder)
    old = folder.with_name(folder.name + _OLD)
    found = folder if folder.exists() else old
    if not found.exists():
        raise CrossfadeError(f"no checkpoint at {folder}", remedy="save one there with step.save()")
    saved = read_metadata(found).state_dict_metadata
    if not any(key.startswith("random.") for key in saved):  # of ranks that each had a generator of their own
        state.pop("random", None)
    load_into(state, found, group)
    _check_loaded(state, found)


def _check_loaded(state: Mapping[str, Any], folder: Path) -> None:
    """What is no tensor in a checkpoint is what `state_of` writes there."""
    where, remedy = f"{folder}, 'groups'", "load a checkpoint that step.save() wrote"
    raw = state["groups"]
    groups = decoded_json(raw, where, StateError, remedy, finite=False) if isinstance(raw, str) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise StateError(where, expected="the optimizer's options as JSON", remedy=remedy)
    if type(state["steps"]) is not int or not 0 <= state["steps"] < 2**62:
        raise StateError(f"{folder}, 'steps' = {state['steps']!r:.80}", expected="a number of steps", remedy=remedy)


def _refuse_other_files(folder: Path) -> None:
    """A checkpoint replaces the folder it is saved to: only an earlier one may be lost that way."""
    files = list(folder.iterdir()) if folder.exists() else []
    strangers = [file.name for file in files if file.name != ".metadata" and file.suffix != ".distcp"]
    if strangers:
        raise CrossfadeError(
            f"{folder} holds {strangers[0]}, which is no part of a checkpoint",
            expected="a folder that is new, or has a checkpoint and nothing else",
            remedy="save into a folder of its own, such as one below it",
        )


@contextlib.contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """torch's checkpoint errors are no `Exception`s, and carry those of all ranks: raise the first as ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CrossfadeError(
            f"{type(first).__name__} while {what}: {str(first).splitlines()[0]}",
            remedy="see that the folder is whole, and that model and optimizer are those that were saved",
        ) from error


def _replace(folder: Path, new: Path) -> None:
    """Put a finished checkpoint in its place. At every moment the old or the new one is there, and whole."""
    old = folder.with_name(folder.name + _OLD)
    if old.exists() and folder.exists():
        shutil.rmtree(old)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    if old.exists():
        shutil.rmtree(old)


def _meet(group: Any) -> None:
    if group is not None:
        torch.distributed.barrier(group)
