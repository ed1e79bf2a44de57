"""What something takes on all of some ranks, of which the slowest counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST_REPEATS, _MOST_REPEATS = 5, 50


@dataclass(frozen=True)
class CalibratingRanks:
    """All ranks that calibrate, and the device their agreement travels on."""

    group: Any
    device: str

    @classmethod
    def of(cls, group: Any) -> CalibratingRanks:
        """Those of a group, by default of torch's world."""
        group = dist.group.WORLD if group is None else group
        return cls(group, "cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def slowest(self, seconds: Iterable[float]) -> list[float]:
        """The largest of all ranks' numbers, one by one."""
        values = torch.tensor(list(seconds), dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values.tolist()

    @property
    def first(self) -> int:
        """The group's first rank, by its number in the world."""
        return dist.get_process_group_ranks(self.group)[0]

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first rank."""
        return dist.get_rank() == self.first

    def word_of_the_first(self, text: str) -> str:
        """What the group's first rank says."""
        said = [text]
        dist.broadcast_object_list(said, src=self.first, group=self.group)
        return said[0]


@dataclass
class Clock:
    """Times what a device does, on all ranks at once."""

    device: str
    ranks: CalibratingRanks

    def numbers(self, *sizes: int, seed: int = 0) -> Tensor:
        """Random numbers: a GPU multiplies numbers that are alike faster than a model's."""
        generator = torch.Generator(self.device).manual_seed(seed)  # the user's own draws go on as if nothing had been
        return torch.randn(*sizes, device=self.device, generator=generator)

    def behind(self, work: Callable[[], Any]) -> float:
        """Seconds of kernels on a GPU that is still busy while they are launched: the host runs ahead, as in a step."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        busy = self.numbers(8192, 8192)
        torch.mm(busy, busy)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def agreed(self, work: Callable[[], Any], seconds: float) -> float:
        """Median seconds of some computation on the slowest rank, repeated for about so many seconds."""
        work()
        once = self.ranks.slowest([self.timed(work)])[0]
        repeats = repeats_for(seconds, once)
        return self.ranks.slowest([statistics.median(self.timed(work) for _ in range(repeats))])[0]

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds until some work is done."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the computing stream only: what still travels has streams of its own."""
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()


def clocked(work: Callable[[], Any]) -> float:
    """Seconds until a function returns."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def repeats_for(seconds: float, once: float) -> int:
    """How often to repeat what takes `once` on the slowest rank, which all ranks know: the same number on all."""
    return max(_LEAST_REPEATS, min(_MOST_REPEATS, int(seconds / max(once, 1e-9))))
