"""Ranks that differ, stay away, or are gone: said at once, by name; steps that are done leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from crossfade.compile import programs
from crossfade.errors import CrossfadeError

BATCH = torch.ones(6, 4), torch.ones(6, 2)


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def compiled(model: nn.Module, **options: Any) -> cf.Step:
    settings = {"mesh": {"dp": 2}, "timeout": 20.0, **options}
    return cf.compile_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), lr=0.1), **settings)


def error_of(attempt: Any, *given: Any) -> str:
    try:
        attempt(*given)
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Scaled(nn.Linear):
    """Multiplies by a tensor of its own that is neither a parameter nor a buffer."""

    def __init__(self, factor: float, size: int) -> None:
        super().__init__(4, 2)
        self.factor = torch.full((size, 2), factor)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor.mean(0)


# ------------------------------------------------------------------------------------------------- settings that differ

DIFFERENT: dict[str, dict[str, Any]] = {
    "machine": {"machine": "loopback-gloo"},
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "accumulate": {"accumulate": 3},
    "data_parallel": {"data_parallel": "zero2"},
    "loss_is": {"loss_is": "sum"},
    "timeout": {"timeout": 30.0},
}


def _settings_differ(what: str) -> tuple[str, float]:
    start = time.monotonic()
    options = DIFFERENT[what] if dist.get_rank() else {}
    return error_of(lambda: compiled(linear(), **options)), time.monotonic() - start


@pytest.mark.ranks
@pytest.mark.parametrize("what", DIFFERENT)
def test_settings_that_differ_are_named_on_every_rank_before_anything_is_captured(ranks: Any, what: str) -> None:
    for message, seconds in ranks(2).run(_settings_differ, what):
        assert message.startswith("RankMismatchError: different programs, first at line")
        assert f"rank 0 has `{what} = " in message
        assert "Remedy: pass the same on every rank" in message
        assert seconds < 20.0, "said at once, not by running into the timeout"


def _constants_differ(size: int) -> str:
    torch.manual_seed(0)
    model = Scaled(1.0 + dist.get_rank(), size)
    return error_of(lambda: compiled(model)(*BATCH))


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 20_000])
def test_constants_that_differ_are_named(ranks: Any, size: int) -> None:
    for message in ranks(2).run(_constants_differ, size):
        assert message.startswith("RankMismatchError: different programs")
        assert "has `constant " in message and "with checksum" in message


# ------------------------------------------------------------------------------------------------- staying away


def _only_one_saves(who: int, folder: str) -> tuple[str, float]:
    step = compiled(linear(), timeout=8.0)
    step(*BATCH)
    start = time.monotonic()
    if dist.get_rank() == who:
        return error_of(step.save, folder), time.monotonic() - start
    return error_of(step, *BATCH), time.monotonic() - start


@pytest.mark.ranks
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_saves_alone_hears_where_the_other_is(who: int, tmp_path: Path) -> None:
    with cf.Ranks(2, timeout=100, start="forkserver") as world:  # not the pool: these have lost count of each other
        results = world.run(_only_one_saves, who, str(tmp_path / "c"))
    (saving, soon), (training, late) = results[who], results[1 - who]
    assert "RankFailedError" in saving and f"rank {1 - who}" in saving
    assert "save a checkpoint" in saving and "went on to step 1" in saving
    assert soon < 8.0 < 16.0 + late
    assert "RankFailedError: a collective failed in step 1: all_reduce" in training
    assert f"rank {who} " in training
    assert not (tmp_path / "c").exists()


def _after_destroying() -> list[str]:
    step = compiled(linear())
    step(*BATCH)
    dist.barrier()
    dist.destroy_process_group()
    return [error_of(step, *BATCH), error_of(step.save, "nowhere"), error_of(lambda: step.close())]


@pytest.mark.ranks
def test_a_destroyed_process_group_is_named() -> None:
    with cf.Ranks(2, timeout=100, start="forkserver") as world:
        for called, saved, closed in world.run(_after_destroying):
            assert called.startswith("MeshError: process group crossfade/")
            assert saved.startswith("MeshError: process group crossfade/")
            assert closed == "no error"


# ------------------------------------------------------------------------------------------------- lifetimes


def _left_behind() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _steps_come_and_go(count: int) -> tuple[list[tuple[int, int]], bool, bool]:
    warm = compiled(linear())
    warm(*BATCH)  # what torch itself starts once
    warm.close()
    del warm
    before = _left_behind()
    for number in range(count):
        step = compiled(linear())
        if number % 3 == 0:
            step.close()
    del step
    after = _left_behind()
    model = linear()
    first, other = compiled(model), compiled(model)
    shared = first._place.groups == other._place.groups
    first.close()
    other(*BATCH)
    distinct = compiled(linear())._place.groups != other._place.groups
    return [before, after], shared, distinct


@pytest.mark.ranks
def test_steps_that_are_dropped_or_closed_leave_no_files_and_no_threads(ranks: Any) -> None:
    for (before, after), shared, distinct in ranks(2).run(_steps_come_and_go, 30):
        assert after[0] <= before[0] and after[1] <= before[1]
        assert shared, "steps of one model share process groups"
        assert distinct, "steps of different models, which threads may call, do not"


def _many_shapes(kept: int) -> tuple[int, bool]:
    before, programs.CAPTURES_KEPT = programs.CAPTURES_KEPT, kept
    try:
        step = compiled(linear(), machine="loopback-gloo")
        for size in range(2, 22, 2):
            step(torch.ones(size, 4), torch.ones(size, 2))
        held = {memory.data_ptr() for memory in step.kept_memory()}
        step._inputs.keep_for(ready.built.program for ready in step._programs.ready.values())
        return len(step._programs.ready), held == {memory.data_ptr() for memory in step.kept_memory()}
    finally:
        programs.CAPTURES_KEPT = before


@pytest.mark.ranks
def test_workspaces_go_with_the_programs_that_used_them(ranks: Any) -> None:
    for count, only_what_is_used in ranks(2).run(_many_shapes, 3):
        assert count == 3
        assert only_what_is_used


def _evict_workspaces() -> list[str]:
    class Node:
        def __init__(self, size: int) -> None:
            self.meta = {"val": torch.empty(size)}

    step = cf.compile_step(model := linear(), F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*BATCH)
    step._inputs._workspace("bucket", Node(8))  # type: ignore[arg-type]
    step._inputs.keep_for(ready.built.program for ready in step._programs.ready.values())
    return [str(memory.shape) for memory in step.kept_memory()]


def test_a_workspace_of_no_kept_program_is_dropped() -> None:
    assert _evict_workspaces() == []


def test_a_closed_step_says_so_and_may_be_closed_again() -> None:
    step = cf.compile_step(model := linear(), F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*BATCH)
    step.close()
    step.close()
    with pytest.raises(CrossfadeError, match="a step that was closed"):
        step(*BATCH)


# ------------------------------------------------------------------------------------------------- threads


def _eager(seed: int, steps: int) -> list[Tensor]:
    model = linear(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _in_threads(calls: list[Any]) -> list[BaseException]:
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def call(function: Any) -> None:
        start.wait()
        try:
            for _ in range(3):
                function(*BATCH)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,)) for function in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _first_calls_in_threads(modes: tuple[str, str]) -> list[str]:
    models = [linear(seed) for seed in range(2)]
    steps = [compiled(model, data_parallel=mode) for model, mode in zip(models, modes, strict=True)]
    found = [str(error) for error in _in_threads(steps[:: 1 if dist.get_rank() else -1])]
    for seed, step in enumerate(steps):
        with step.gathered() as whole:
            pairs = zip(_eager(seed, 3), whole.parameters(), strict=True)
            found += [] if all(torch.allclose(a, b, atol=1e-5) for a, b in pairs) else [f"other numbers in {seed}"]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("modes", [("replicate", "replicate"), ("zero3", "zero1")])
def test_first_calls_of_two_steps_in_two_threads_on_ranks(ranks: Any, modes: tuple[str, str]) -> None:
    assert ranks(2).run(_first_calls_in_threads, modes) == [[], []]


def test_first_calls_of_one_step_in_two_threads_capture_once() -> None:
    step = compiled(model := linear(), mesh=None)
    assert _in_threads([step, step]) == []
    assert step.captures == 1 and step.steps == 6
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(_eager(0, 6), model.parameters(), strict=True))
