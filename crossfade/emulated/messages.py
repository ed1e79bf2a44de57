"""Messages on an emulated fabric: what another rank sends here is what this one sends there, at the same time.

Every other rank does what this one does. So a message that is expected here under a tag comes when this rank's own
message of that tag and size arrives where it goes, whichever of the two was asked for first; a ring of neighbours that
pass things on thus takes its true time. Where nothing like it is sent before somebody waits, it travels by itself from
when it was asked for, and leaves in its tensors what they held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.emulated.clock import DeviceTravel, HostTravel

Sent = HostTravel | DeviceTravel
Arrive = Callable[[Sent, Sequence[Tensor], Sequence[Tensor]], Sent]

_KEPT = 16
"""How many messages that nobody has asked for are kept: what is only ever sent must not fill the memory."""


class Messages:
    """The messages of one group that have no counterpart yet. `arrive` makes the arrival of tensors like those that
    were sent, with what carries them: called with that, the tensors to fill, and those that were sent."""

    def __init__(self, arrive: Arrive) -> None:
        self._arrive = arrive
        self._sent: deque[tuple[object, Sent, Sequence[Tensor]]] = deque(maxlen=_KEPT)
        self._expected: list[Receipt] = []
        self._lock = threading.Lock()

    def sent(self, tag: int, tensors: Sequence[Tensor], work: Sent) -> None:
        """This rank has sent tensors: those expected like that arrive with them."""
        likeness = _likeness(tag, tensors)
        with self._lock:
            receipt = next((receipt for receipt in self._expected if receipt.likeness == likeness), None)
            if receipt is None:
                self._sent.append((likeness, work, tensors))
            else:
                self._expected.remove(receipt)
                receipt.work = self._arrive(work, receipt.tensors, tensors)

    def expected(self, tag: int, tensors: Sequence[Tensor], alone: Callable[[], Sent]) -> Receipt:
        """This rank expects tensors; `alone` lets them travel by themselves, if nothing like them is sent."""
        receipt = Receipt(self, _likeness(tag, tensors), tensors, alone)
        with self._lock:
            for entry in self._sent:
                if entry[0] == receipt.likeness:
                    self._sent.remove(entry)
                    receipt.work = self._arrive(entry[1], tensors, entry[2])
                    return receipt
            self._expected.append(receipt)
        return receipt

    def settle(self, receipt: Receipt) -> Sent:
        """What brings a message that is asked about: from now on that is certain."""
        with self._lock:
            if receipt.work is None:
                self._expected.remove(receipt)
                receipt.work = receipt.alone()
            return receipt.work


class Receipt(dist.Work):
    """A message that is expected here; see `Messages`."""

    def __init__(
        self, messages: Messages, likeness: object, tensors: Sequence[Tensor], alone: Callable[[], Sent]
    ) -> None:
        super().__init__()
        self.likeness, self.tensors, self.alone = likeness, list(tensors), alone
        self.work: Sent | None = None
        self._messages = messages

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, as for any collective."""
        return self._messages.settle(self).wait(timeout)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait for it."""
        work = self._messages.settle(self)
        if isinstance(work, DeviceTravel):
            work.block_current_stream()
        else:
            work.wait()

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return self._messages.settle(self).is_completed()

    def is_success(self) -> bool:
        """Whether it has arrived, and unharmed."""
        return self._messages.settle(self).is_success()

    def exception(self) -> BaseException | None:
        """What went wrong, if it has arrived harmed."""
        return self._messages.settle(self).exception()

    def result(self) -> list[Tensor]:
        """What it is received into."""
        return self.tensors

    def source_rank(self) -> int:
        """Where it came from: the others are all alike, so the first one sent it."""
        return 0

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of its tensors."""
        return self._messages.settle(self).get_future()


def _likeness(tag: int, tensors: Sequence[Tensor]) -> Any:
    """What a message has in common with its counterpart."""
    return tag, [(tensor.dtype, tensor.numel(), tensor.device.type) for tensor in tensors]
