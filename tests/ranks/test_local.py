"""Ranks forked from a process that started long ago: they have the world, threads and variables of the caller now."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from crossfade import CrossfadeError, Ranks


def seen(variable: str) -> tuple[int, int, int, str | None]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.environ.get(variable)


def test_other_ways_to_start_are_refused() -> None:
    with pytest.raises(CrossfadeError, match=r"start='frok': expected one of spawn, forkserver on this system"):
        Ranks(2, start="frok")  # type: ignore[arg-type]


@pytest.mark.ranks
def test_ranks_see_the_variables_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("CROSSFADE_SEEN", value)
        with Ranks(2, threads=2, start="forkserver", timeout=60) as ranks:
            assert ranks.run(seen, "CROSSFADE_SEEN") == [(0, 2, 2, value), (1, 2, 2, value)]
    monkeypatch.delenv("CROSSFADE_SEEN")
    with Ranks(1, start="forkserver", timeout=60) as ranks:
        assert ranks.run(seen, "CROSSFADE_SEEN") == [(0, 1, 1, None)]
