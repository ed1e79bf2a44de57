"""Time on an emulated fabric: wires that are busy, collectives under way, threads that call back when they arrive.

On CPU tensors a collective's arrival is known when it is launched; waiting is sleeping until then. On CUDA tensors the
wire is a stream that is kept busy on the device, so that nothing here blocks the thread that launches.
"""

from __future__ import annotations

import atexit
import functools
import heapq
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.emulated.values import Write
from crossfade.errors import RankFailedError
from crossfade.graph.private import device_sleep, untraced

_SPIN = 1.5e-4
"""Seconds before an appointment at which sleeping gives way to looking at the clock: sleepers wake about this late."""

SMALL = 64 * 1024
"""Bytes of outputs up to which writing them costs less than handing that to a thread."""


def sleep_until(due: float) -> None:
    """Sleep until `time.perf_counter()` says `due`, then return within some microseconds."""
    while (left := due - time.perf_counter()) > 0:
        if left > _SPIN:
            time.sleep(left - _SPIN)


@dataclass
class Wire:
    """One physical link: what travels on it travels one after another."""

    free_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    lanes: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = field(default_factory=dict)

    def book(self, start: float, seconds: float) -> float:
        """Occupy the wire for so long from `start`, or as soon as it is free; returns when that ends."""
        with self.lock:
            self.free_at = max(start, self.free_at) + seconds
            return self.free_at

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """On one device: the stream that is busy while the wire is, and the one that writes values meanwhile."""
        index = _index(device)
        with self.lock:
            if index not in self.lanes:
                self.lanes[index] = torch.cuda.Stream(device), torch.cuda.Stream(device)
            return self.lanes[index]


@untraced
class HostTravel(dist.Work):
    """A collective on CPU tensors under way: it arrives when it is due and its values are written."""

    def __init__(self, due: float, results: Sequence[Tensor], write: Write | None, note_late: Callable[[float], None]):
        super().__init__()
        self.due, self.results = due, list(results)
        self._note_late = note_late
        self._written = _written(write, results)
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has arrived; raise if writing its values failed, or after `timeout` if given."""
        limit = timeout.total_seconds() if timeout else 0.0
        if limit and self.due > time.perf_counter() + limit:
            self._give_up(limit)
        sleep_until(self.due)
        if not self._written.done():
            futures.wait([self._written])
            self._note_late(time.perf_counter() - self.due)
        self._written.result()
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return time.perf_counter() >= self.due and self._written.done()

    def is_success(self) -> bool:
        """Whether it has arrived, and unharmed."""
        return self.is_completed() and self._written.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it has arrived harmed."""
        return self._written.exception() if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Its outputs."""
        return self.results

    def source_rank(self) -> int:
        """Where a message came from: the others are all alike, so the first one sent it."""
        return 0

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of its outputs, completed by a thread when it arrives."""
        if self._future is None:
            self._future = torch.futures.Future()
            _alarm().call_at(self.due, functools.partial(self._arrive, self._future))
        return self._future

    def _arrive(self, future: torch.futures.Future) -> None:
        in_time = self._written.done()
        self._written.add_done_callback(lambda written: self._complete(future, in_time))

    def _complete(self, future: torch.futures.Future, in_time: bool) -> None:
        if not in_time:
            self._note_late(time.perf_counter() - self.due)
        if error := self._written.exception():
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self.results)

    def _give_up(self, limit: float) -> None:
        left = self.due - time.perf_counter()
        sleep_until(time.perf_counter() + limit)
        raise RankFailedError(
            f"a collective takes {left:.3g} s more on the emulated fabric",
            expected=f"at most {limit:g} s",
            remedy="wait longer, or emulate a faster machine",
        )


@untraced
class DeviceTravel(dist.Work):
    """A collective on CUDA tensors under way: an event on a stream of the wire.

    What it reads and writes is held until someone waits for it.
    """

    def __init__(
        self,
        device: torch.device,
        arrivals: torch.cuda.Stream,
        sources: Sequence[Tensor],
        results: Sequence[Tensor],
        blocks: bool,
    ):
        super().__init__()
        self.device, self.arrivals, self.results, self.blocks = device, arrivals, list(results), blocks
        self.held = (*sources, *results)
        self._arrived = torch.cuda.Event()
        self._arrived.record(arrivals)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for it; a barrier holds up the thread as well."""
        torch.cuda.current_stream(self.device).wait_event(self._arrived)
        if self.blocks:
            self._arrived.synchronize()
        self.held = ()
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait for it."""
        torch.cuda.current_stream(self.device).wait_event(self._arrived)

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return self._arrived.query()

    def is_success(self) -> bool:
        """Whether it has arrived."""
        return self.is_completed()

    def exception(self) -> None:
        """Nothing: what goes wrong on a device is raised by CUDA."""

    def result(self) -> list[Tensor]:
        """Its outputs."""
        return self.results

    def source_rank(self) -> int:
        """Where a message came from: the others are all alike, so the first one sent it."""
        return 0

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of its outputs: complete at once, as CUDA futures are; whoever waits, waits on its stream."""
        return self._done(self.results)

    def holding_future(self) -> torch.futures.Future:
        """A future that holds all that the collective reads and writes, for works that are made of it."""
        return self._done(list(self.held))

    def _done(self, value: list[Tensor]) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future(devices=[torch.device("cuda", _index(self.device))])
        with torch.cuda.stream(self.arrivals):
            future.set_result(value)
        return future


@untraced
class Together(dist.Work):
    """Several collectives, waited for as one."""

    def __init__(self, works: Sequence[Any]):
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        for work in self.works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have arrived."""
        return all(work.is_completed() for work in self.works)

    def result(self) -> list[Tensor]:
        """The outputs of all."""
        return [tensor for work in self.works for tensor in work.result()]


def travel_on_device(
    wire: Wire,
    device: torch.device,
    seconds: float,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    write: Write | None,
    blocks: bool,
) -> DeviceTravel:
    """Start a collective on the wire's streams, when what the current stream has been given is done.

    The values are written beside the wire's stream, not on it: writing is part of the time, not added to it.
    """
    busy, writing = wire.streams(device)
    cycles = round(seconds * cycles_per_second(_index(device)))
    current = torch.cuda.current_stream(device)
    for stream in (busy, writing):
        stream.wait_stream(current)
    with torch.cuda.stream(busy):
        device_sleep(cycles)
    if write is not None:
        with torch.cuda.stream(writing):
            _write(write)
        _keep_from_others((*inputs, *results), writing)
    writing.wait_stream(busy)
    return DeviceTravel(device, writing, inputs, results, blocks)


def arrive_on_device(
    sent: DeviceTravel, sources: Sequence[Tensor], results: Sequence[Tensor], write: Write | None
) -> DeviceTravel:
    """The arrival of something else with what has been sent: its values are written when that has arrived."""
    if write is not None:
        with torch.cuda.stream(sent.arrivals):
            _write(write)
        _keep_from_others((*sources, *results), sent.arrivals)
    return DeviceTravel(sent.device, sent.arrivals, sources, results, blocks=False)


def _keep_from_others(tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
    """Do not give memory away before a stream has read and written it, whether anybody waits or not.

    While a CUDA graph is recorded, it would never be given away again, and a step would hold all its buckets at once:
    there the work holds it until the wait, which has to be in the graph as well.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    for tensor in tensors:
        tensor.record_stream(stream)


@functools.cache
def cycles_per_second(index: int) -> float:
    """How many clock cycles one second of sleep on a CUDA device has, measured once it runs at full clock.

    A device that slows its clock under load sleeps longer than it was asked to, by as much.
    """
    cycles, rates = 20_000_000, []
    with torch.cuda.stream(torch.cuda.Stream(index)):
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            device_sleep(cycles)
            end.record()
            end.synchronize()
            rates.append(cycles / (start.elapsed_time(end) / 1e3))
    return statistics.median(rates[3:])


class _Alarm:
    """A thread that calls functions at their times."""

    def __init__(self) -> None:
        self._appointments: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="emulated fabric: arrivals", daemon=True)
        self._thread.start()

    def call_at(self, when: float, function: Callable[[], Any]) -> None:
        """Call a function when `time.perf_counter()` says `when`."""
        with self._changed:
            heapq.heappush(self._appointments, (when, next(self._numbers), function))
            self._changed.notify()

    def close(self) -> None:
        """Make no more calls, and end."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            function()

    def _next(self) -> Callable[[], Any] | None:
        with self._changed:
            while self._open:
                left = self._appointments[0][0] - time.perf_counter() if self._appointments else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._appointments)[2]
                self._changed.wait(left)
        return None


@functools.cache
def _alarm() -> _Alarm:
    alarm = _Alarm()
    atexit.register(alarm.close)  # while torch is still there: a callback may hold its tensors
    return alarm


class _Writer(futures.ThreadPoolExecutor):
    """One thread that writes values while they travel, with one core at most."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="emulated fabric: values")
        before = torch.get_num_threads()
        super().submit(torch.set_num_threads, 1).result()
        torch.set_num_threads(before)  # threads yet to come inherit what was said last, by whomever

    def submit(self, write: Callable[[], Any]) -> futures.Future:  # type: ignore[override]
        """Write soon."""
        return super().submit(_write, write)


def _written(write: Write | None, results: Sequence[Tensor]) -> futures.Future:
    """The writing of values; done already if there are none, or so few that another thread would begin too late."""
    if write is not None and sum(result.nbytes for result in results) > SMALL:
        return _writer().submit(write)
    if write is not None:
        _write(write)
    done: futures.Future = futures.Future()
    done.set_result(None)
    return done


def _write(write: Write) -> None:
    with torch.inference_mode():  # lets tensors made in inference mode be written too
        write()


@functools.cache
def _writer() -> _Writer:
    return _Writer()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
