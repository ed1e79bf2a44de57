"""What must be alike on all ranks, compared at every step by numbers that travel with the loss.

Each is summed up in a few small whole numbers. Their mean and the mean of their squares over all ranks tell every
rank whether all had the same: all find out in the same step, and all raise the same error. What differs is then said in
words, through the store.
"""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from crossfade.errors import RankMismatchError
from crossfade.graph.private import stored_values
from crossfade.ranks.members import Members

Batch = tuple[Any, ...]
Digest = int | Tensor
"""A whole number of at least 24 bits; of what is on a device, computed there."""

_CHUNKS = 3
"""Into how many small numbers a digest is cut."""
_SAMPLE = 4096
"""Elements of one tensor that are looked at in one step."""
_PATIENCE = 3
"""Steps in a row in which batches that should differ are the same, before it is said."""
_BEHIND = 2
"""Steps after which a device's numbers are read: by then it has them, and nothing waits for it."""


@dataclass(frozen=True)
class RankInvariant:
    """What must be alike on all ranks: how to sum it up, how to say it, and what to do where it is not.

    With `unless="warn"` a difference is warned of; with `"differ"` the ranks should have different ones, and are warned
    where they do not.
    """

    name: str
    digest: Callable[[Batch, int], Digest]
    words: Callable[[int], str]
    expected: str
    remedy: str
    unless: Literal["raise", "warn", "differ"] = "raise"


@dataclass
class RankComparison:
    """What the ranks of one group compare, every so many steps; `group` is the program's name for it."""

    group: str
    members: Members
    invariants: Sequence[RankInvariant]
    every: int = 1
    device: str = "cpu"
    reduce_op: str = "avg"
    _digests: list[Digest] = field(default_factory=list)
    _unread: deque[tuple[Tensor, int]] = field(default_factory=deque)
    _warned: set[str] = field(default_factory=set)
    _same: int = 0

    @property
    def name(self) -> str:
        """The program's name for its numbers."""
        return f"alike.{self.group}"

    @property
    def numbers(self) -> int:
        """How many numbers travel."""
        return 2 * _CHUNKS * len(self.invariants)

    @property
    def _bits(self) -> int:
        """So few that sums of squares over all ranks stay exact enough in float32 to tell a difference of one."""
        return max(1, (18 - math.ceil(math.log2(len(self.members.ranks)))) // 2)

    def given(self, batch: Batch, step: int) -> Tensor:
        """This rank's numbers for a step; zeros where it is not compared."""
        if step % self.every:
            return torch.zeros(self.numbers, device=self.device)
        digests = self._digests = [invariant.digest(batch, step) for invariant in self.invariants]
        if all(isinstance(digest, int) for digest in digests) and self.device == "cpu":
            chunks = [
                digest >> (self._bits * place) & (1 << self._bits) - 1 for digest in digests for place in range(_CHUNKS)
            ]
            return torch.tensor([float(chunk**power) for chunk in chunks for power in (1, 2)])
        whole = torch.stack([torch.as_tensor(digest, device=self.device) for digest in digests])
        shifts = torch.arange(_CHUNKS, device=self.device) * self._bits
        found = ((whole[:, None] >> shifts) & (1 << self._bits) - 1).float()
        return torch.stack([found, found.square()], dim=-1).flatten()

    def reduced(self, numbers: Tensor, step: int) -> None:
        """Take what came back for a step; raise, on all ranks alike, if something that must not differ does."""
        if step % self.every:
            return
        means = numbers / len(self.members.ranks) if self.reduce_op == "sum" else numbers
        if self.device == "cpu":
            self._judge(means, step)
            return
        self._unread.append((means.to("cpu", non_blocking=True), step))
        while len(self._unread) > _BEHIND:
            self._read_oldest()

    def finish(self) -> None:
        """Judge what has not been read yet."""
        while self._unread:
            self._read_oldest()

    def seconds(self, batch: Batch) -> float:
        """What it takes this rank to sum everything up once."""
        start = time.perf_counter()
        self.given(batch, 0)
        return time.perf_counter() - start

    def _read_oldest(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._judge(*self._unread.popleft())

    def _judge(self, means: Tensor, step: int) -> None:
        ranks = len(self.members.ranks)
        pairs = means.double().view(len(self.invariants), _CHUNKS, 2)
        spread = (pairs[..., 1] - pairs[..., 0].square()).amax(1)
        for invariant, found in zip(self.invariants, spread.tolist(), strict=True):
            differs = not found < (ranks - 1) / (2 * ranks**2)
            if invariant.unless == "differ":
                self._expect_difference(invariant, differs)
            elif differs and invariant.unless == "warn":
                self._warn(invariant, f"{invariant.name} differs between ranks in step {step}")
            elif differs:
                raise self._mismatch(invariant, step)

    def _expect_difference(self, invariant: RankInvariant, differs: bool) -> None:
        self._same = 0 if differs else self._same + 1
        if self._same == _PATIENCE:
            self._warn(invariant, f"the same {invariant.name} on every rank in {_PATIENCE} steps")

    def _warn(self, invariant: RankInvariant, found: str) -> None:
        if invariant.name not in self._warned and self.members.rank == 0:
            warnings.warn(f"{found}: expected {invariant.expected}. Remedy: {invariant.remedy}.", stacklevel=6)
        self._warned.add(invariant.name)

    def _mismatch(self, invariant: RankInvariant, step: int) -> RankMismatchError:
        """The error for what differs, with what each rank has, as its mailbox says."""
        key = f"alike/{self.group}/{invariant.name}/{step}"
        digest = self._digests[self.invariants.index(invariant)] if self.device == "cpu" else None
        own = invariant.words(step) + (f" {digest:08x}" if isinstance(digest, int) else "")
        each = zip(self.members.ranks, self.members.exchanged(key, own), strict=True)
        said = "; ".join(f"rank {rank}: {words}" for rank, words in each)
        return RankMismatchError(
            f"{invariant.name} differs between ranks in step {step} ({said})",
            expected=invariant.expected,
            remedy=invariant.remedy,
        )


def digest_of(tensors: Iterable[Tensor], step: int, most: int = _SAMPLE) -> Digest:
    """A number for a sample of each tensor's elements, another sample at each step; of small ones all are looked at.

    >>> digest_of([torch.ones(3)], 0) == digest_of([torch.ones(3)], 1) != digest_of([torch.zeros(3)], 0)
    True
    """
    found: Digest = 0
    for tensor in tensors:
        part = _sample(tensor, step, most)
        if part.device.type == "cpu":
            found = zlib.crc32(part.numpy().data, int(found))
        else:
            weights = torch.arange(1, 2 * part.numel(), 2, device=part.device)
            found = found * 31 + (part.long() * weights).sum()
    return found


def _sample(tensor: Tensor, step: int, most: int) -> Tensor:
    """Bytes of some of a tensor's elements."""
    value = tensor.detach()
    if value.layout is not torch.strided:
        value = stored_values(value)
    while value.dim() and value.numel() > most and not value.is_contiguous():
        value = value[step % value.shape[0]]
    flat = value.reshape(-1)
    stride = -(-flat.numel() // most) or 1
    return flat[step % stride :: stride].contiguous().view(torch.uint8)
