"""What lies around a compiled step, as text: torch's settings, the environment, the versions of all packages, and the
sources of the user's own modules. Where all of it is the same, code that is the same does the same."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import crossfade
from crossfade.capture.baked_in import ambient

FORMAT = 2
"""Of what is kept, and of the key: raised whenever either means something else."""

_OF_THIS_PROCESS = re.compile(
    r"(CROSSFADE_(CACHE|PROGRESS|TRACEBACK).*|RANK|.*_RANK|WORLD_SIZE|.*_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|GROUP_.*"
    r"|ROLE_.*|PWD|OLDPWD|SHLVL|_|TERM.*|COLUMNS|LINES|SSH_.*|HOSTNAME|TMUX.*|STY|WINDOWID|DISPLAY|XDG_.*|DBUS_.*"
    r"|SLURM_.*|PYTEST_.*|PYTHONHASHSEED|TMPDIR|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|INVOCATION_ID|JOURNAL_STREAM)"
)
"""Variables that differ from one start to the next and that no model reads."""


def surroundings() -> list[str]:
    """A line for each thing that captures may depend on beside what they read."""
    return [*_versions(), *_settings_of_torch(), *_environment(), *_own_sources(), *_loaded_libraries()]


def _settings_of_torch() -> Iterator[str]:
    yield f"ambient {ambient()}"
    yield f"threads {torch.get_num_threads()} grad {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}"
    yield f"precision {torch.get_float32_matmul_precision()} {torch.backends.mkldnn.enabled}"  # type: ignore[attr-defined]
    einsum = torch.backends.opt_einsum
    yield f"chosen {einsum.enabled} {einsum.strategy} {torch.backends.mha.get_fastpath_enabled()}"
    yield f"filled {torch.utils.deterministic.fill_uninitialized_memory}"  # type: ignore[attr-defined]
    yield f"capability {torch.backends.cpu.get_cpu_capability()} {torch.is_anomaly_enabled()}"
    yield f"debug {torch.is_deterministic_algorithms_warn_only_enabled()} {sys.flags} {platform.processor()}"


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if not _OF_THIS_PROCESS.fullmatch(name):
            yield f"${name}={hashlib.sha256(value.encode(errors='replace')).hexdigest()}"


@functools.cache
def _versions() -> tuple[str, ...]:
    """Python, every installed package, Crossfade's own sources, and the state of the files of torch that are traced."""
    root = Path(torch.__file__).parent
    traced = [path for part in ("nn", "optim", "autograd", "utils") for path in (root / part).rglob("*.py")]
    states = sorted((str(path), *_state_of(path)) for path in [*traced, *root.glob("*.py")])
    ours = sorted(Path(crossfade.__file__).parent.rglob("*.py"))
    return (
        f"format {FORMAT} python {sys.version} {platform.machine()} {os.cpu_count()}",
        f"torch {torch.__version__} {torch.version.git_version} {_sum(states)}",
        f"packages {_sum(_packages())}",
        f"crossfade {crossfade.__version__} {_sum([(path.name, content_of(str(path))) for path in ours])}",
    )


def _packages() -> list[tuple[str, int, int]]:
    """Every installed package by its name and version, and when it was installed: versions may stay as they are."""
    found = []
    for folder in filter(os.path.isdir, sys.path):
        with os.scandir(folder) as entries:
            named = [entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
            found += [(entry.name, *_state_of(Path(entry.path))) for entry in named]
    return sorted(found)


def _loaded_libraries() -> Iterator[str]:
    """Operators that were loaded from libraries."""
    for path in sorted(map(str, torch.ops.loaded_libraries)):
        yield f"library {path} {_state_of(Path(path)) if os.path.exists(path) else ''}"


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
        if isinstance(module, types.ModuleType) and isinstance(path, str) and not path.startswith(installed()):
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
def installed() -> tuple[str, ...]:
    """Folders whose files change with versions only, which are told apart by those, and our own."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*(sysconfig.get_paths()[kind] for kind in kinds), str(Path(crossfade.__file__).parent)]
    return tuple(dict.fromkeys(os.path.join(os.path.realpath(folder), "") for folder in folders)) + tuple(
        dict.fromkeys(os.path.join(folder, "") for folder in folders)
    )


def patched_torch() -> str:
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
