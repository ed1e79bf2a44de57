"""What `compile_step` is asked for, checked before anything is opened or captured."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from crossfade.capture.divide_batch import BatchIs
from crossfade.compile.phases import Phases
from crossfade.compile.pipeline import DataParallelMode, LossIs, Semantics
from crossfade.compile.step_plan import StepPlan
from crossfade.cost.machine import Machine
from crossfade.errors import CrossfadeError
from crossfade.execute.compile_regions import Execute
from crossfade.graph.passes import Pass
from crossfade.report.expect import Expect
from crossfade.shard.tensor.plan import Plan

Exchange = Literal["now", "later", "with-earlier"]
"""When gradients are exchanged: at once, not in this program, or together with those that were kept before."""

KeepWhole = Literal["auto"] | Collection[str]
"""Parameters to keep whole: their names, or patterns; or as many as pay."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `compile_step`, which explains them, in the form in which the compiler uses them."""

    data_parallel: DataParallelMode = "replicate"
    keep_whole: tuple[str, ...] | None = ()
    """The names of the parameters to keep whole; None where they are to be chosen."""
    tensor_parallel: Plan | Mapping[str, object] | None = None
    batch: BatchIs = "global"
    accumulate: int = 1
    clip_grad_norm: float | None = None
    semantics: Semantics = "global"
    loss_is: LossIs = "auto"
    machine: Machine | str | None = None
    memory_limit: int | None = None
    memory: float | None = None
    """Bytes that a step may hold; up to 1, a share of what the device has."""
    recompute: tuple[tuple[str, str], ...] | Literal["auto"] = ()
    """What is computed again or kept in any case: patterns of modules' names, each with a word."""
    offload: tuple[tuple[str, str], ...] | Literal["auto", "all"] = ()
    """What moves to the host or stays in any case, as `recompute`; or whatever is hidden, or what is chosen."""
    reduce_dtype: tuple[tuple[str, str], ...] = ()
    """The dtype that gradients are sent in along each axis, where it is not their own."""
    passes: tuple[Pass, ...] | None = None
    phases: Phases | None = None
    check_every: int = 1
    dynamic: bool | None = None
    execute: Execute = "auto"
    exchange: Exchange = "now"
    timeout: float = 60.0
    expect: Expect | None = None
    plan: StepPlan | None = None

    def __post_init__(self) -> None:
        _check_words(
            data_parallel=(self.data_parallel, DataParallelMode),
            batch=(self.batch, BatchIs),
            semantics=(self.semantics, Semantics),
            loss_is=(self.loss_is, LossIs),
            execute=(self.execute, Execute),
        )
        _check_numbers(self)
        if self.phases is not None and not isinstance(self.phases, Phases):
            raise CrossfadeError(
                f"phases={type(self.phases).__name__}", expected="Phases", remedy="change crossfade.TRAINING by name"
            )

    def settings(self) -> list[str]:
        """What ranks must have in common before they compile, a line each."""
        common = {
            "data_parallel": self.data_parallel,
            "keep_whole": "auto" if self.keep_whole is None else list(self.keep_whole),
            "tensor_parallel": self.tensor_parallel is not None,
            "batch": self.batch,
            "accumulate": self.accumulate,
            "clip_grad_norm": self.clip_grad_norm,
            "semantics": self.semantics,
            "loss_is": self.loss_is,
            "machine": self.machine,
            "memory_limit": self.memory_limit,
            "memory": self.memory,
            "recompute": self.recompute if self.recompute == "auto" else dict(self.recompute),
            "offload": dict(self.offload) if isinstance(self.offload, tuple) else self.offload,
            "reduce_dtype": dict(self.reduce_dtype),
            "check_every": self.check_every,
            "dynamic": self.dynamic,
            "execute": self.execute,
            "exchange": self.exchange,
            "strict": self.expect,
            "passes": None if self.passes is None else [own.spelling for own in self.passes],
            "phases": None if self.phases is None else self.phases.settings(),
            "timeout": self.timeout,
            "plan": self.plan,
        }
        return [f"{name} = {value}" for name, value in common.items()]


def names_to_keep_whole(
    asked: KeepWhole, mode: DataParallelMode, model: nn.Module, memory_limit: int | None
) -> tuple[str, ...] | None:
    """The parameters to keep whole, by name; None where that is to be chosen."""
    if not asked:
        return ()
    if mode not in ("zero2", "zero3"):
        raise CrossfadeError(
            f"keep_whole={asked!r} with data_parallel={mode!r}",
            expected="a mode that splits parameters",
            remedy="pass zero2 or zero3, or leave it out: every rank keeps all of them whole",
        )
    if asked == "auto":
        _check_automatic(mode, memory_limit)
        return None
    if isinstance(asked, str):
        raise CrossfadeError(
            f"keep_whole={asked!r}", expected='"auto", or a list', remedy=f"pass [{asked!r}] for one name or pattern"
        )
    first = {parameter: name for name, parameter in model.named_parameters()}
    names = {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    patterns = tuple(asked)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            raise CrossfadeError(
                f"no parameter {pattern!r} to keep whole",
                expected="a parameter's name, or a pattern with *",
                remedy=f"did you mean {near[0]!r}" if near else "see model.named_parameters()",
            )
    chosen = {names[name] for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    return tuple(name for name in first.values() if name in chosen)


def _check_automatic(mode: DataParallelMode, memory_limit: int | None) -> None:
    if mode != "zero2":
        raise CrossfadeError(
            f'keep_whole="auto" with data_parallel={mode!r}',
            expected="zero2, which holds all parameters whole for a while anyway",
            remedy="name the parameters to keep whole",
        )
    if memory_limit is not None:
        raise CrossfadeError(
            'keep_whole="auto" within a memory limit',
            expected="names, since what is kept whole between steps does not count towards the limit",
            remedy="name the parameters to keep whole, or leave one of the two out",
        )


def _check_words(**given: tuple[str, Any]) -> None:
    """Refuse words that an option does not know, each given with its type."""
    for name, (value, kind) in given.items():
        if value not in get_args(kind):
            expected = " or ".join(repr(word) for word in get_args(kind))
            raise CrossfadeError(f"{name}={value!r}", expected=expected, remedy="pass one of those")


def _check_numbers(given: Options) -> None:
    """Refuse numbers that make no sense."""
    if given.check_every < 0:
        raise CrossfadeError(
            f"check_every={given.check_every}", expected="a number of steps", remedy="pass 0 to compare only the first"
        )
    if given.accumulate < 1:
        raise CrossfadeError(
            f"accumulate={given.accumulate}", expected="at least 1", remedy="pass the number of micro-batches"
        )
    if given.clip_grad_norm is not None and not given.clip_grad_norm > 0:
        raise CrossfadeError(
            f"clip_grad_norm={given.clip_grad_norm}", expected="more than 0", remedy="pass None for no clipping"
        )
    if not given.timeout > 0:
        raise CrossfadeError(
            f"timeout={given.timeout}", expected="seconds, more than 0", remedy="pass how long to wait"
        )
