"""Fixtures shared by all tests: rank processes started once for the whole session."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from crossfade import Ranks
from tests.browser import Browser

os.environ["CROSSFADE_CACHE"] = "off"  # tests compile what they test; those of the cache have folders of their own


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A pool of rank processes for each count; a call that hangs is ended after 120 s with all its children.

    Pairs start afresh: only then does every rank hash in its own way, which shows what depends on it.
    """
    pools: dict[int, Ranks] = {}

    def get(count: int) -> Ranks:
        if count not in pools:
            pools[count] = Ranks(count, timeout=120.0, start="spawn" if count == 2 else "forkserver")
        return pools[count]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A Chromium for the tests of pages; they are skipped where there is none."""
    opened = Browser()
    yield opened
    opened.close()


# fmt: off
TIMED = {
    "test_calibrate", "test_estimate", "test_measure", "test_process_group", "test_messages", "test_stopwatch",
    "test_lost_ranks", "test_soak",
}
# fmt: on
"""Files whose tests compare times, or wait for them to run out: they are not run beside others."""


LONG = {"properties", "ranks", "models", "loops", "test_cli", "test_cli_shard", "test_package"}
"""Folders and files that take minutes: they come first, so that all workers end at about the same time."""


SAMPLED = {
    "test_uneven_batches": 7, "test_optimizers_on_ranks": 8, "test_lengths": 5, "test_trained_models": 7,
    "test_zero": 5, "test_draws_on_ranks": 4, "test_any_optimizer": 4, "test_from_other_tools": 4,
    "test_frameworks": 3, "test_habits_on_ranks": 4, "test_saving_everything": 2, "test_checkpoint": 4,
    "test_memory_on_ranks": 4, "test_alike": 2, "test_experts_on_ranks": 2, "test_find_plan": 2, "test_auto": 2,
    "test_building": 4, "test_fit_memory": 5, "test_cache": 2, "test_torch_compile": 5, "test_training_on_ranks": 3,
    "test_tensor_parallel_state": 2, "test_planning": 2, "test_torch_compile_on_ranks": 2, "test_offload": 2,
    "test_dtypes_on_ranks": 2, "test_simplify_properties": 2, "test_losses": 3, "test_simplified_models": 2,
    "test_reduce_dtype": 2, "test_schedule_properties": 2, "test_passes_properties": 2, "test_alike_updates": 2,
    "test_rules": 2, "test_choose_recompute": 2, "test_exchanges_on_ranks": 2, "test_collective_matmuls_on_ranks": 2,
    "test_collective_matmul_on_ranks": 2, "test_within_peak": 2, "test_kept_whole_on_ranks": 2, "test_draws": 2,
    "test_gradients": 2, "test_trial": 2,
}  # fmt: skip
"""Files of which one test in so many runs by itself; `make models` runs the others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what measures time and what runs seldom, put what is long first, skip what needs CUDA without any."""
    met: Counter[str] = Counter()
    for item in items:
        if item.path.stem in TIMED:
            item.add_marker(pytest.mark.timed)
        met[item.path.stem] += 1
        if met[item.path.stem] % SAMPLED.get(item.path.stem, 1):
            item.add_marker(pytest.mark.models)
    items.sort(key=lambda item: not LONG & {item.path.parent.name, item.path.stem})
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
