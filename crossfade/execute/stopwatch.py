"""The measured timeline of one run: when each node computed, when each collective was launched, arrived and was needed.

Nodes are timed by one stamp after each line of the generated function, so the computing lane has no holes: what is no
computation is standing still. Python cannot see when an asynchronous collective arrives, and asking for it (`wait`)
takes it off torch's books. So threads do the waiting and note the time, and the program's own wait waits for them. What
is measured is therefore:

- `launch`: when the launching call had returned (its time is computation: it may copy its input first).
- `finish`: when the thread that waited for it saw it arrive: never too early, too late by that thread's waking up (well
  below a millisecond unless all processors are busy). Until a peer that is late has come, a collective is under way.
- `start`: not measured. It is the later of the launch and the arrival before it in the same group, as on a link that
  carries one at a time: the parts of one group never overlap and add up to the time in which that group was under way.
- `exposed`: how long the program stood still in its wait, if the collective had not arrived when it came there.

A stamp also notes how long the computing thread has had a processor (`Computed.on_core`): with fewer cores than threads
those that carry a collective take it from the computation beside them, which hides them only in appearance: it is
stretched.

On CUDA all stamps are events: a node's time is the computing stream's, including its idling until the node was
launched. One side stream a group waits for each collective and notes its end; the computing stream waits for that. An
event costs about 2 us a node: nothing where kernels are long, but a step that only launches gets longer by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.timeline import Computed, Timeline, Travelled
from crossfade.errors import NotYetError
from crossfade.execute.codegen import Views, Writer, compile_written
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.program import Program


def profile(executable: Executable, inputs: list[Any]) -> tuple[tuple[Any, ...], Timeline]:
    """Run once on the inputs, in the program's order, and time it; the list is emptied, as in a plain run.

    The results are those of a plain run, bit by bit: the same calls are made in the same order.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[2] = input("x")
        ... y: f32[2] = aten.neg(x)
        ... return output("y", y)
        ... ''')
        >>> results, timeline = profile(Executable(program, {}), [torch.ones(2)])
        >>> results, [computed.name for computed in timeline.computation], timeline.source
        ((tensor([-1., -1.]),), ['y'], 'measured')
    """
    stopwatch = Stopwatch(executable)
    results = stopwatch(inputs)
    return results, stopwatch.timeline


class Stopwatch(Executable):
    """An executable that times itself: after each call, `timeline` is that of the call. One call at a time."""

    def __init__(self, executable: Executable) -> None:
        self.program, self.groups, self.device = executable.program, executable.groups, executable.device
        self._watch = _Watch(_clock(self.device), collectives.group_sizes(self.program.graph))
        self.compiled = compile_written(_TimedWriter(self.program, self._watch, executable.compiled.views))
        self._watch.lines = len(self.compiled.node_at)
        self._timeline: Timeline | None = None
        self.started = 0.0
        """When the last call began, by this host's clock: what lays the timelines of several ranks side by side."""

    @property
    def timeline(self) -> Timeline:
        """What the last call did when; put together when first asked for."""
        if self._timeline is None:
            if not self._watch.stamps:
                raise RuntimeError("nothing timed yet: call the stopwatch, then ask for its timeline")
            reading = _Reading(self._watch.times(), self._watch.arrivals(), self.groups, self._watch.on_core())
            self._timeline = reading.timeline(self.compiled.node_at.values())
        return self._timeline

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run on the inputs, in the program's order, and time it; the list is emptied."""
        self._timeline = None
        self.started = time.time()
        with self._watch.running():
            return super().__call__(inputs)


class _TimedWriter(Writer):
    """Writes the same calls with a stamp after each line, and hands what is in flight to its watchers."""

    def __init__(self, program: Program, watch: _Watch, views: Views) -> None:
        super().__init__(program, views)
        self._stamp = f"{self.bind(watch.stamps.append, 'stamp')}({self.bind(watch.clock.now, 'now')}())"
        self._launched = self.bind(watch.launched, "launched")
        self._arrive = self.bind(watch.arrive, "arrive")

    def statements(self, node: fx.Node, freed: list[str]) -> list[str]:
        call, *rest = super().statements(node, freed)
        if collectives.is_wait(node) and (start := collectives.started_by(node)) is not None:
            call = f"{self._arrive}({start.name!r}); {call}"
        elif (found := collectives.view(node)) is not None:
            sent = "".join(f"{tensor.name}," for tensor in found.inputs)
            call = f"{call}; {self._launched}({node.name!r}, {found.group!r}, {node.name}, ({sent}))"
        return [call, *rest, self._stamp]


class _HostClock:
    """Stamps are the host's seconds."""

    watchers = 2
    """Threads that wait for one group's collectives: gloo carries out two at a time, which may arrive in any order."""

    holds_inputs = False

    noticed = staticmethod(time.perf_counter)

    @staticmethod
    def now() -> tuple[float, float]:
        """The time, and for how long this thread has had a processor."""
        return time.perf_counter(), time.thread_time()

    def wind(self, stamps: int) -> None:
        """Get ready for a run of so many stamps."""

    def watching(self) -> AbstractContextManager[Any]:
        """Around what a watcher does."""
        return nullcontext()

    def follow(self, stamp: float) -> None:
        """Compute no further before `stamp`: it has passed already when the host holds it."""

    def seconds(self, stamps: Sequence[tuple[float, float]]) -> list[float]:
        """Stamps as seconds since the first."""
        return [at - stamps[0][0] for at, _ in stamps]

    def arrivals(self, noticed: Sequence[float], since: tuple[float, float]) -> list[float]:
        """When watchers saw something, as seconds since a stamp."""
        return [at - since[0] for at in noticed]

    def on_core(self, stamps: Sequence[tuple[float, float]]) -> list[float] | None:
        """For how long the computing thread had a processor between each stamp and the next."""
        return [after - before for (_, before), (_, after) in pairwise(stamps)]


class _StreamClock:
    """Stamps are events of the computing stream, or of the one that watches."""

    # NCCL carries out a group's collectives in order. More side streams would compete for the hardware's few queues.
    watchers = 1
    # Waiting on another stream lets go of the inputs while they are being read: we hold them as the program would have.
    holds_inputs = True

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()
        self._events: list[torch.cuda.Event] = []
        self._next: Iterator[torch.cuda.Event] = iter(())
        self._stream: torch.cuda.Stream | None = None

    def wind(self, stamps: int) -> None:
        """Get ready for a run of so many stamps: making an event costs more than launching a small kernel."""
        self._stream = torch.cuda.current_stream(self.device)
        while len(self._events) < stamps:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record(self._stream)  # it is really made when first recorded
        self._next = iter(self._events)

    def now(self) -> torch.cuda.Event:
        """A stamp of the computing stream."""
        event = next(self._next)
        event.record(self._stream)
        return event

    def noticed(self) -> torch.cuda.Event:
        """A stamp of the stream that watches."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around what a watcher does: on a stream of its own, where its waiting holds up nobody."""
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream()):
            yield

    def follow(self, stamp: torch.cuda.Event) -> None:
        """Compute no further before `stamp`."""
        torch.cuda.current_stream().wait_event(stamp)

    def seconds(self, stamps: Sequence[torch.cuda.Event]) -> list[float]:
        """Stamps as seconds since the first."""
        return self.arrivals(stamps, stamps[0])

    def arrivals(self, noticed: Sequence[torch.cuda.Event], since: torch.cuda.Event) -> list[float]:
        """When watchers saw something, as seconds since a stamp."""
        torch.cuda.synchronize(self.device)
        return [since.elapsed_time(stamp) / 1e3 for stamp in noticed]

    def on_core(self, stamps: Sequence[torch.cuda.Event]) -> None:
        """Unknown: the device does not say what else ran beside a kernel."""


_Clock = _HostClock | _StreamClock


def _clock(device: str) -> _Clock:
    if device not in ("cpu", "cuda"):
        raise NotYetError(f"a program on device {device!r}", expected="cpu or cuda", remedy="time it by hand")
    return _StreamClock() if device == "cuda" else _HostClock()


class _Flight:
    """A collective under way, the inputs held for it, and the flights before it on the same memory."""

    def __init__(self, results: list[Tensor], held: tuple[Tensor, ...], before: list[_Flight]) -> None:
        self.results, self.held, self.before = results, held, before
        self.under_way = threading.Lock()
        self.under_way.acquire()
        self.finish: Any = None
        self.error: BaseException | None = None

    def watch(self, clock: _Clock) -> None:
        """Wait for the collective. Torch's books go by memory: of two flights on the same, the later may find nothing
        to wait for because the earlier waits for both, so it waits for the earlier."""
        try:
            for earlier in self.before:
                earlier.stand_still()
            for result in self.results:
                collectives.wait(result)
            self.finish = clock.noticed()
        except BaseException as error:
            self.error = error  # raised where the program waits for it
        self.before = []
        self.under_way.release()

    def stand_still(self) -> None:
        """Until it has arrived."""
        with self.under_way:
            pass

    def land(self, clock: _Clock) -> None:
        """Let the program have it: not before it has arrived."""
        self.stand_still()
        if self.error is not None:
            raise self.error
        clock.follow(self.finish)
        self.held, self.results = (), []


class _Watch:
    """The stamps and flights of a run of `lines` nodes. The generated function calls `launched` and `arrive`."""

    def __init__(self, clock: _Clock, groups: Iterable[str]) -> None:
        self.clock, self.groups, self.lines = clock, tuple(groups), 0
        self.stamps: list[Any] = []
        self.flights: dict[str, _Flight] = {}
        self._last_on: dict[int, _Flight] = {}
        self._queues: dict[str, SimpleQueue[_Flight | None]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """From the first stamp until everything launched has arrived, waited for by the program or not."""
        self.stamps.clear()
        self.flights.clear()
        self.clock.wind(self.lines + 1)
        self._queues = {group: self._watched_queue() for group in self.groups}
        self.stamps.append(self.clock.now())
        try:
            yield
            for flight in self.flights.values():
                flight.land(self.clock)
        except BaseException:
            self.stamps.clear()  # half a run has no timeline
            raise
        finally:
            # After an error a watcher may be stuck until the group's timeout: it is asked to end, and not waited for.
            for queue in self._queues.values():
                for _ in range(self.clock.watchers):
                    queue.put(None)
            self._last_on.clear()

    def launched(self, name: str, group: str, result: Tensor | list[Tensor], sent: tuple[Tensor, ...]) -> None:
        results = [result] if isinstance(result, Tensor) else list(result)
        memory = {tensor.untyped_storage().data_ptr() for tensor in results}
        before = [self._last_on[place] for place in memory if place in self._last_on]
        flight = _Flight(results, sent if self.clock.holds_inputs else (), before)
        self._last_on.update(dict.fromkeys(memory, flight))
        self.flights[name] = flight
        self._queues[group].put(flight)

    def arrive(self, name: str) -> None:
        self.flights[name].land(self.clock)

    def times(self) -> list[float]:
        return self.clock.seconds(self.stamps)

    def on_core(self) -> list[float] | None:
        return self.clock.on_core(self.stamps)

    def arrivals(self) -> dict[str, float]:
        finishes = self.clock.arrivals([flight.finish for flight in self.flights.values()], self.stamps[0])
        return dict(zip(self.flights, finishes, strict=True))

    def _watched_queue(self) -> SimpleQueue[_Flight | None]:
        queue: SimpleQueue[_Flight | None] = SimpleQueue()
        for _ in range(self.clock.watchers):
            threading.Thread(target=self._serve, args=(queue,), name="crossfade stopwatch", daemon=True).start()
        return queue

    @torch.no_grad()
    def _serve(self, queue: SimpleQueue[_Flight | None]) -> None:
        with self.clock.watching():
            while (flight := queue.get()) is not None:
                flight.watch(self.clock)


class _Reading:
    """Turns times into a timeline. `times` are those after each node, with the first before all; `finishes` are those
    of the collectives, by name."""

    def __init__(
        self,
        times: list[float],
        finishes: dict[str, float],
        groups: dict[str, str],
        on_core: list[float] | None = None,
    ) -> None:
        self.times, self.finishes, self.groups = times, finishes, groups
        self.on_core: Sequence[float | None] = on_core or [None] * (len(times) - 1)
        self.computed: list[Computed] = []
        self.launches: dict[str, tuple[fx.Node, float]] = {}
        self.needed: dict[str, float] = {}
        self.exposed: dict[str, float] = {}

    def timeline(self, nodes: Iterable[fx.Node]) -> Timeline:
        for node, (start, finish), on_core in zip(nodes, pairwise(self.times), self.on_core, strict=True):
            self._read(node, start, finish, on_core)
        end = self.times[-1]
        for name in sorted(self.launches.keys() - self.needed.keys(), key=lambda name: self.finishes[name]):
            self.exposed[name] = max(0.0, self.finishes[name] - end)
            end += self.exposed[name]
        return Timeline(tuple(self.computed), tuple(self._travelled()), end, "measured")

    def _read(self, node: fx.Node, start: float, finish: float, on_core: float | None) -> None:
        awaited = collectives.started_by(node) if collectives.is_wait(node) else None
        if awaited is not None:
            self.needed.setdefault(awaited.name, start)
            if self.finishes[awaited.name] > start:
                self.exposed[awaited.name] = self.exposed.get(awaited.name, 0.0) + finish - start
                return
        if collectives.is_collective(node):
            self.launches[node.name] = node, finish
        on_core = None if on_core is None else min(on_core, finish - start)  # two clocks, read one after the other
        self.computed.append(Computed(node.name, start, finish, on_core))

    def _travelled(self) -> Iterator[Travelled]:
        free_at: dict[str, float] = {}
        for name, (node, launched) in self.launches.items():
            found = collectives.view(node)
            assert found is not None
            finish = self.finishes[name]
            launch = min(launched, finish)  # one that is over before its call returns
            start = min(finish, max(launch, free_at.get(found.group, 0.0)))
            free_at[found.group] = max(finish, free_at.get(found.group, 0.0))
            group = self.groups.get(found.group, found.group)
            yield Travelled(
                name, str(found.kind), group, found.bytes, launch, start, finish, self.needed.get(name),
                self.exposed.get(name, 0.0),
            )  # fmt: skip
