"""A machine measured on this process's ranks: torchrun's if there are, else local ones started for it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from crossfade.cost.calibrate import calibrate
from crossfade.cost.machine import ANY_AXIS, Machine
from crossfade.ranks.local import Ranks


def measure_ranks(name: str, count: int, seconds: float) -> Machine | None:
    """Measure; under torchrun the result is the first rank's, None on the others."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        with Ranks(count, timeout=60.0 + 10 * seconds) as ranks:
            return Machine.from_json(ranks.run(_measured, name, seconds)[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        machine = Machine.from_json(_measured(name, seconds))
        return machine if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _measured(name: str, seconds: float) -> str:
    return calibrate(name, {ANY_AXIS: dist.group.WORLD}, seconds=seconds).to_json()
