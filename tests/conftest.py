"""Fixtures shared by all tests: rank processes started once for the whole session."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from crossfade import Ranks


@pytest.fixture(scope="session")
def started_ranks() -> Iterator[dict[int, Ranks]]:
    """The pools of rank processes, one for each count, as far as they were needed."""
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(started_ranks: dict[int, Ranks]) -> Iterator[Callable[[int], Ranks]]:
    """A pool of rank processes for each count; a call that hangs is ended after 120 s with all its children."""
    used: dict[int, Ranks] = {}

    def get(count: int) -> Ranks:
        used[count] = started_ranks.setdefault(count, Ranks(count, timeout=120.0))
        return used[count]

    yield get
    for pool in used.values():
        if pool.running:  # a failed call has ended them
            pool.run(forget_groups)


def forget_groups() -> None:
    """End the groups that a test has made: gloo wakes a thread of each a hundred times a second. Some are kept."""
    gc.collect()
    for group in [one for one in _world.pg_map if one is not dist.group.WORLD and one.group_desc != "kept"]:
        name = _world.pg_names[group]
        dist.destroy_process_group(group)
        _world.pg_names[object()] = name  # never given again: the store still has the ended group's addresses


TIMED = {"test_calibrate", "test_estimate", "test_measure", "test_emulated", "test_stopwatch", "test_errors"}
"""Files whose tests compare times, or wait for them to run out: they are not run beside others."""


LONG = {"properties", "ranks", "models", "test_cli", "test_cli_shard", "test_package"}
"""Folders and files that take minutes: they come first, so that both workers end at the same time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what measures time, put what is long first, and skip what needs CUDA where there is none."""
    for item in items:
        if item.path.stem in TIMED:
            item.add_marker(pytest.mark.timed)
    items.sort(key=lambda item: not LONG & {item.path.parent.name, item.path.stem})
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
