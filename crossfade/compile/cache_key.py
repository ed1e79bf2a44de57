"""What a compiled step depends on, as text: where all of it is the same, so is the step that would be compiled.

Three parts: what the code within reach of a capture reads (`capture/portable`); what is compiled, for which batches,
with which options, where (this file); and everything around it (`cache_surroundings`). What is in doubt counts as
changed: a step compiled twice costs seconds, a wrong one a training. The optimizer's numbers (learning rates, weight
decay) are no part of it, as they are none of a program's: what its code asked about them is kept with the program, and
asked again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossfade.capture.code_names import is_looked_into, names_in
from crossfade.capture.divide_batch import batch_key
from crossfade.capture.numbers import OF_SCHEDULERS, is_plain_number, own_attributes
from crossfade.capture.optimizer import parameter_names
from crossfade.capture.optimizer_state import FirstState
from crossfade.capture.portable import like, portable_lines
from crossfade.capture.tokens import plain_token
from crossfade.compile.cache_surroundings import patched_torch, surroundings
from crossfade.compile.job import Job
from crossfade.compile.training_phases import GRADIENTS, TRAINING
from crossfade.graph.private import dispatch_modes
from crossfade.graph.strides import plain_strides
from crossfade.shard.tensor.rules import REGISTERED

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b|<not described>")
_NOT_DESCRIBED = "<not described>"
_ELSEWHERE = ("tensor_parallel", "machine", "passes", "phases")
"""Options that the key has in the form in which they are used."""


@dataclass(frozen=True)
class CacheKey:
    """Everything that a compiled step depends on; `why_not` says what keeps it from being known."""

    lines: tuple[str, ...]
    why_not: str = ""

    @property
    def digest(self) -> str:
        """The name of what is kept under this key."""
        return hashlib.sha256("\n".join(self.lines).encode(errors="surrogatepass")).hexdigest()


def key_of(job: Job, batch: tuple[Any, ...], first: Mapping[str, FirstState]) -> CacheKey:
    """The key of a step for batches like this one, as everything is now; `first` are states that are not there yet."""
    if why_not := _not_kept(job):
        return CacheKey((), why_not)
    lines, unknown = portable_lines(job.model, {"loss_fn": job.loss_fn, **_of_optimizers_code(job)})
    around = [*surroundings(), *_of_options(job), *_of_place(job), *_of_tensors(job, batch), *_of_optimizer(job, first)]
    doubtful = next((line for line in around if _ADDRESS.search(line)), "")
    if unknown or doubtful or (foreign := patched_torch()):
        what = unknown[0] if unknown else doubtful[:120] if doubtful else f"{foreign}, which is not torch's own"
        return CacheKey((), f"nobody can say whether it is the same in another process: {what}")
    return CacheKey((*around, *lines))


def _not_kept(job: Job) -> str:
    """Why steps like this are not kept at all."""
    options, place = job.options, job.place
    if options.passes is not None:
        return "passes of one's own"
    if options.phases is not None and options.phases is not GRADIENTS and options.phases is not TRAINING:
        return "phases of one's own"
    if place.experts is not None:
        return "experts over an axis, which are found in what tracing makes"
    if place.device != "cpu":
        return f"parameters on {place.device}: only steps on the CPU are kept so far"
    if options.memory is not None or options.recompute or options.offload:
        return "a memory budget, of which the step tells more than is kept"
    if options.execute not in ("auto", "eager"):
        return f"execute={options.execute!r}: what Inductor compiles, Inductor keeps, the rest is compiled again"
    modes = dispatch_modes()
    return f"{type(modes[0]).__name__}, which sees every operator" if modes else ""


def _of_options(job: Job) -> Iterator[str]:
    options = job.options
    for field in dataclasses.fields(options):
        if field.name not in _ELSEWHERE:
            yield f"{field.name} = {getattr(options, field.name)!r}"
    yield "gradients" if options.phases is GRADIENTS else "step"


def _of_place(job: Job) -> Iterator[str]:
    """The mesh and the machine. Which rank this is does not count: all ranks run one program."""
    place, shards, tensor = job.place, job.place.shards, job.place.tensor
    axes = [place.axes.whole, place.axes.split, place.axes.copies] if place.axes is not None else []
    yield f"axes {[(axis.name, axis.size, axis.backend) for axis in axes if axis is not None]} {place.mode}"
    yield f"groups {place.sizes} {place.carriers.backends} {place.device}"
    yield f"kept whole {place.kept_whole} {shards.will_split if shards is not None else None}"
    calibrated = job.options.machine == "calibrate"  # whose figures are others each time
    yield f"machine {f'calibrated on {platform.node()}' if calibrated else place.machine}"
    everyone = place.everyone
    yield f"ranks {len(everyone.ranks)} {everyone.rank if everyone.alone else ''}" if everyone is not None else "alone"
    if tensor is not None:
        split = (sorted(tensor.parts.placements.items()), tensor.parts.aliases) if tensor.parts is not None else None
        yield f"plan {tensor.plan!r} over {tensor.axis.name} of {tensor.axis.size} on {tensor.axis.backend}, {split}"
        yield f"rules {sorted(REGISTERED.items())}"


def _of_tensors(job: Job, batch: tuple[Any, ...]) -> Iterator[str]:
    model, (structure, leaves) = job.model, batch_key(batch)
    described = [leaf if isinstance(leaf[1], torch.dtype) else _plain(leaf[1]) for leaf in leaves]  # type: ignore[index]
    yield f"batch {structure} {described}"
    yield f"asks for gradients {[leaf.requires_grad for leaf in batch if isinstance(leaf, Tensor)]}"
    first = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            yield f"{name} {like(tensor)} {first[id(tensor)]}"


def _of_optimizer(job: Job, first: Mapping[str, FirstState]) -> Iterator[str]:
    optimizer, learned, names = job.optimizer, job.learned, parameter_names(job.model)
    yield f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for index, group in enumerate(optimizer.param_groups):
        options = {
            key: _option(f"{key}.{index}", value, learned.changing)
            for key, value in group.items()
            if key not in ("params", "param_names", *OF_SCHEDULERS)
        }
        yield f"group {options} {[names.get(parameter) for parameter in group['params']]}"
    yield f"begins {sorted(job.begins())} {learned.starts_from_gradients}"
    for name in job.trained():
        parameter = job.model.get_parameter(name)
        entries = {**(first[name].entries if name in first else {}), **optimizer.state.get(parameter, {})}
        said = {key: _entry(value, parameter) for key, value in sorted(entries.items()) if value is not None}
        yield f"state of {name} {said}"


def _option(name: str, value: Any, changing: set[str]) -> Any:
    """An option of a parameter group: of numbers that are inputs of a program, only that they are numbers."""
    if type(value) in (tuple, list):
        return [type(value).__name__, *(_option("", element, set()) for element in value)]
    if type(value) is float and is_plain_number(value):
        return "float"
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"{like(value)}"
    return "a number that changes" if name in changing and is_plain_number(value) else _plain(value)


def _entry(value: Any, parameter: Tensor) -> str:
    """An entry of a state, the same whether it is there already or will be made at the first step."""
    if isinstance(value, Tensor):
        shape = "as its parameter" if value.shape == parameter.shape else tuple(value.shape)
        strides = "" if value.stride() == plain_strides(value.shape) else value.stride()
        device = parameter.device if value.device.type == "meta" else value.device
        return f"{value.dtype} {shape} {strides} {device.type}"
    return type(value).__name__ if is_plain_number(value) else _plain(value)


def _of_optimizers_code(job: Job) -> dict[str, Any]:
    """What an optimizer runs and reads: the code of its step, its own attributes, and its defaults if that asks."""
    optimizer, kind = job.optimizer, type(job.optimizer)
    attributes = {
        key: "a number that changes" if f"optimizer.{key}" in job.learned.changing and is_plain_number(value) else value
        for key, value in own_attributes(optimizer).items()
    }
    own = [value for base in kind.__mro__ for value in vars(base).values() if is_looked_into(base)]
    code = [value.__code__ for value in own if isinstance(value, types.FunctionType)]
    asks = any("defaults" in names_in(part).attributes for part in code)
    defaults = dict(optimizer.defaults) if asks else {}
    return {"optimizer": {"class": kind, "step": kind.step, "own": attributes, "defaults": defaults}}


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{like(value)} {value.tolist() if value.numel() < 16 else _NOT_DESCRIBED}"
    token = plain_token(value)
    if token is not None:
        return repr(token)
    return repr(value) if isinstance(value, list | dict | tuple) else _NOT_DESCRIBED
