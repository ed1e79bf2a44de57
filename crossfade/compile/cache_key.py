"""What a compiled step depends on, as text: where all of it is the same, so is the step that would be compiled.

Two parts: what the code within reach reads (`capture/portable`), and everything around it: the sources of the user's
own modules, the versions of all packages, torch's settings, the environment, the options, the shapes. What is in doubt
counts as changed: a step compiled twice costs seconds, a wrong one a training.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import crossfade
from crossfade.capture.baked_in import ambient
from crossfade.capture.divide_batch import batch_key
from crossfade.capture.optimizer import parameter_names
from crossfade.capture.portable import like, portable_lines
from crossfade.capture.tokens import plain_token
from crossfade.compile.job import Job
from crossfade.graph.private import dispatch_modes

FORMAT = 1
"""Of what is kept, and of the key: raised whenever either means something else."""

_OF_THIS_PROCESS = re.compile(
    r"(CROSSFADE_(CACHE|PROGRESS|TRACEBACK).*|RANK|.*_RANK|WORLD_SIZE|.*_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|GROUP_.*"
    r"|ROLE_.*|PWD|OLDPWD|SHLVL|_|TERM.*|COLUMNS|LINES|SSH_.*|HOSTNAME|TMUX.*|STY|WINDOWID|DISPLAY|XDG_.*|DBUS_.*"
    r"|SLURM_.*|PYTEST_.*|TMPDIR|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|INVOCATION_ID|JOURNAL_STREAM)"
)
"""Variables that differ from one start to the next and that no model reads."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


@dataclass(frozen=True)
class CacheKey:
    """Everything that a compiled step depends on; `why_not` says what keeps it from being known."""

    lines: tuple[str, ...]
    why_not: str = ""

    @property
    def digest(self) -> str:
        """The name of what is kept under this key."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def key_of(job: Job, batch: tuple[Any, ...]) -> CacheKey:
    """The key of a step for batches like this one, as everything is now."""
    if why_not := _not_kept(job):
        return CacheKey((), why_not)
    lines, unknown = portable_lines(job.model, job.loss_fn)
    around = [*_versions(), *_settings_of_torch(), *_environment(), *_own_sources(), *_of_job(job, batch)]
    doubtful = next((line for line in around if _ADDRESS.search(line)), "")
    if unknown or doubtful or (foreign := _patched_torch()):
        what = unknown[0] if unknown else doubtful[:80] if doubtful else f"{foreign}, which is not torch's own"
        return CacheKey((), f"nobody can say whether it is the same in another process: {what}")
    return CacheKey((*around, *lines))


def _not_kept(job: Job) -> str:
    """Why steps like this are not kept at all; the same on all ranks."""
    options, place = job.options, job.place
    if place.tensor is not None:
        return "a model that a plan splits"
    if options.passes is not None or options.phases is not None:
        return "passes or phases of one's own"
    if options.expect is not None:
        return "strict="
    if options.keep_whole is None:
        return 'keep_whole="auto", which splits parameters on the way'
    if place.device != "cpu":
        return f"parameters on {place.device}"
    modes = dispatch_modes()
    return f"{type(modes[0]).__name__}, which sees every operator" if modes else ""


def _of_job(job: Job, batch: tuple[Any, ...]) -> Iterator[str]:
    place, model, optimizer = job.place, job.model, job.optimizer
    yield from job.options.settings()
    yield f"place {place.axes} {place.mode} {place.sizes} {place.kept_whole} {place.machine} {place.carriers.backends}"
    yield f"rank {place.part_of_batch} of {place.everyone.ranks if place.everyone is not None else None}"
    yield f"batch {batch_key(batch)}"
    first = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            yield f"{name} {like(tensor)} {first[id(tensor)]}"
    yield f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    names = parameter_names(model)
    for group in optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        yield f"group {options} {[names[parameter] for parameter in group['params']]}"
    if not type(optimizer).__module__.startswith("torch.optim"):
        for name in sorted(vars(optimizer).keys() - _of_every_optimizer()):
            yield f"optimizer.{name} {_plain(vars(optimizer)[name])}"
    for parameter, state in optimizer.state.items():
        entries = {key: like(v) if isinstance(v, torch.Tensor) else _plain(v) for key, v in state.items()}
        yield f"state of {names.get(parameter)} {entries}"


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """What torch keeps in an optimizer, and the `step` that a scheduler wraps: neither is traced."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step"}


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{like(value)} {value.tolist() if value.numel() < 16 else '0x000000 of more numbers'}"
    token = plain_token(value)
    return repr(token) if token is not None else repr(value)


def _settings_of_torch() -> Iterator[str]:
    yield f"ambient {ambient()}"
    yield f"threads {torch.get_num_threads()} grad {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}"
    yield f"precision {torch.get_float32_matmul_precision()} {torch.backends.mkldnn.enabled}"  # type: ignore[attr-defined]
    einsum = torch.backends.opt_einsum
    yield f"chosen {einsum.enabled} {einsum.strategy} {torch.backends.mha.get_fastpath_enabled()}"
    yield f"filled {torch.utils.deterministic.fill_uninitialized_memory}"  # type: ignore[attr-defined]
    yield f"debug {torch.is_deterministic_algorithms_warn_only_enabled()} {sys.flags} {platform.processor()}"


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if not _OF_THIS_PROCESS.fullmatch(name):
            yield f"${name}={hashlib.sha256(value.encode(errors='replace')).hexdigest()}"


@functools.cache
def _versions() -> tuple[str, ...]:
    """Python, every installed package, Crossfade's own sources, and the state of the files of torch that are traced."""
    packages = sorted(f"{found.metadata['Name']}=={found.version}" for found in importlib.metadata.distributions())
    root = Path(torch.__file__).parent
    traced = [path for part in ("nn", "optim", "autograd", "utils") for path in (root / part).rglob("*.py")]
    states = sorted((str(path), *_state_of(path)) for path in [*traced, *root.glob("*.py")])
    ours = sorted(Path(crossfade.__file__).parent.rglob("*.py"))
    return (
        f"format {FORMAT} python {sys.version} {platform.machine()} {os.cpu_count()}",
        f"torch {torch.__version__} {torch.version.git_version} {_sum(states)}",
        f"packages {_sum(packages)}",
        f"crossfade {crossfade.__version__} {_sum([(path.name, content_of(str(path))) for path in ours])}",
    )


def _state_of(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _sum(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def own_files() -> dict[str, str]:
    """The files of the modules that are neither torch's nor Python's nor installed, with a hash of their contents.

    >>> any(path.endswith("crossfade/compile/cache_key.py") for path in own_files())
    False
    """
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(module, types.ModuleType) and isinstance(path, str) and not path.startswith(_installed()):
            found[path] = content_of(path)
    return found


def _own_sources() -> Iterator[str]:
    for path, content in sorted(own_files().items()):
        yield f"{path} {content}"


def content_of(path: str) -> str:
    """A hash of a file's contents; empty if there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders whose files change with versions only, which are told apart by those, and our own."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*(sysconfig.get_paths()[kind] for kind in kinds), str(Path(crossfade.__file__).parent)]
    return tuple(dict.fromkeys(os.path.join(os.path.realpath(folder), "") for folder in folders)) + tuple(
        dict.fromkeys(os.path.join(folder, "") for folder in folders)
    )


def _patched_torch() -> str:
    """A function of torch's that somebody has replaced by one from elsewhere, if there is one."""
    paths = sysconfig.get_paths()
    own = (os.path.dirname(torch.__file__), "<", *(os.path.realpath(paths[kind]) for kind in ("stdlib", "platstdlib")))
    own += (paths["stdlib"], paths["platstdlib"])
    spaces: list[tuple[str, Mapping[str, Any]]] = [
        ("torch", vars(torch)),
        ("torch.nn.functional", vars(nn.functional)),
        ("torch.Tensor", vars(torch.Tensor)),
        ("torch.nn.Module", vars(nn.Module)),
    ]
    for space, names in spaces:
        for name, value in names.items():
            if isinstance(value, types.FunctionType) and not value.__code__.co_filename.startswith(own):
                return f"{space}.{name} of {value.__code__.co_filename}"
    return ""
