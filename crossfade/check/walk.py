"""All ranks walked through their events at once: every event is taken once, and whoever cannot go on is stuck.

The semantics. The k-th launch of a group on one rank belongs to the k-th on every other member; the k-th message from
one rank to another with one tag to the k-th that is received there. A launch goes on at once; a wait goes on when all
members have launched. What the members of a group do next never depends on who was faster, so one walk stands for all
interleavings: it ends where each of them ends.

Walked in `serial`, a launch too goes on only when all members have launched, as if a device ran one kernel of NCCL at a
time, and tags are ignored, as NCCL does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from crossfade.check.findings import Finding, FindingKind, RankPlace
from crossfade.check.groups import Groups
from crossfade.graph.events import Events, Wait
from crossfade.graph.launches import Launch, Sent, Size, difference, ordinal

Role = tuple[int, str]
"""A global rank and what it does in a channel: `member`, `send` or `recv`."""


Part = tuple[Hashable, tuple[Role, ...], Role, Sent | None]
"""A part that a launch takes in a channel: the channel's key and roles, the rank's own role, the message if any."""


@dataclass(slots=True)
class Arrival:
    """A role's part in an operation."""

    rank: int
    launch: Launch
    message: Sent | None = None

    def place(self) -> RankPlace:
        does = f"starts {self.message} of {self.launch.group}" if self.message is not None else ""
        return RankPlace.of(self.rank, self.launch, does)


@dataclass(slots=True)
class Operation:
    """One collective of a group, or one message: complete once every role of its channel has arrived."""

    channel: Channel
    number: int
    arrived: dict[Role, Arrival] = field(default_factory=dict)
    waiters: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.channel.roles)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [role[0] for role in self.channel.roles if role not in self.arrived]


@dataclass(slots=True)
class Channel:
    """What is matched in order: a group's collectives, or the messages from one rank to another with one tag."""

    group: str
    roles: tuple[Role, ...]
    operations: list[Operation] = field(default_factory=list)
    posted: dict[Role, int] = field(default_factory=dict)

    @property
    def carries_messages(self) -> bool:
        return self.roles[0][1] == "send"

    def post(self, role: Role, arrival: Arrival) -> Operation:
        """Take part in the next operation of this role."""
        number = self.posted.get(role, 0)
        self.posted[role] = number + 1
        if number == len(self.operations):
            self.operations.append(Operation(self, number))
        operation = self.operations[number]
        operation.arrived[role] = arrival
        return operation


class ScheduleWalk:
    """A walk of all ranks: `findings` are what does not match; `stuck` are the ranks that wait for ever."""

    def __init__(self, schedules: Sequence[Events], groups: Sequence[Groups], *, serial: bool = False) -> None:
        self.schedules, self.groups, self.serial = schedules, groups, serial
        self.channels: dict[Hashable, Channel] = {}
        self.cursor = [0] * len(schedules)
        self.pending: list[list[Operation]] = [[] for _ in schedules]
        self.operations: list[list[list[Operation]]] = [[] for _ in schedules]
        self.ready = deque(range(len(schedules)))
        self._parts: dict[tuple[int, str], list[Part]] = {}
        self._roles: dict[tuple[int, ...], tuple[Role, ...]] = {}
        self._found: dict[int, tuple[int, Finding]] = {}
        while self.ready:
            self._advance(self.ready.popleft())

    @property
    def findings(self) -> list[Finding]:
        """What does not match, the first in each channel; the fewest events before it come first."""
        return [finding for _, finding in sorted(self._found.values(), key=lambda item: item[0])]

    @property
    def stuck(self) -> dict[int, Operation]:
        """The ranks that cannot go on, and the operation each waits for."""
        return {rank: waiting[-1] for rank, waiting in enumerate(self.pending) if waiting}

    def event_of(self, rank: int) -> Launch | Wait:
        """The event at which a rank is stuck."""
        return self.schedules[rank].events[self.cursor[rank] - 1]

    def launches_of(self, rank: int, event: Launch | Wait) -> Launch:
        """The launch that an event is, or waits for."""
        return event if isinstance(event, Launch) else self.schedules[rank].launches[event.launch]

    def roles_of(self, rank: int, launch: Launch) -> list[Part]:
        """The parts that a launch takes."""
        ranks = self.groups[rank][launch.group]
        if not launch.messages:
            return self._member_of(rank, launch.group, ranks)
        found: list[Part] = []
        for message in launch.messages:
            peer = ranks[message.peer]
            source, target = (rank, peer) if message.sends else (peer, rank)
            tag = None if self.serial else message.tag
            roles = (source, "send"), (target, "recv")
            found.append(((launch.group, ranks, source, target, tag), roles, roles[not message.sends], message))
        return found

    def _member_of(self, rank: int, group: str, ranks: tuple[int, ...]) -> list[Part]:
        """A rank's part in a group's collectives, remembered: groups may be large."""
        if (rank, group) not in self._parts:
            roles = self._roles.setdefault(ranks, tuple((member, "member") for member in ranks))
            self._parts[rank, group] = [((group, ranks), roles, (rank, "member"), None)]
        return self._parts[rank, group]

    def _advance(self, rank: int) -> None:
        events, waiting = self.schedules[rank].events, self.pending[rank]
        while True:
            while waiting and waiting[-1].complete:
                waiting.pop()
            if waiting:
                waiting[-1].waiters.append(rank)
                return
            if self.cursor[rank] == len(events):
                return
            event = events[self.cursor[rank]]
            self.cursor[rank] += 1
            waiting += self._launch(rank, event) if isinstance(event, Launch) else self._awaited(rank, event)

    def _launch(self, rank: int, launch: Launch) -> list[Operation]:
        """Take part in what is launched; returns what must be complete before the rank goes on."""
        started = []
        for key, roles, role, message in self.roles_of(rank, launch):
            channel = self.channels.get(key)
            if channel is None:
                channel = self.channels[key] = Channel(launch.group, roles)
            operation = channel.post(role, Arrival(rank, launch, message))
            started.append(operation)
            self._compare(operation, operation.arrived[role])
        self.operations[rank].append(started)
        for operation in started:
            if operation.complete:
                self._finish(operation)
        return list(started) if self.serial else []

    def _awaited(self, rank: int, wait: Wait) -> list[Operation]:
        started = self.operations[rank][wait.launch]
        return [started[wait.message]] if wait.message is not None else list(started)

    def _finish(self, operation: Operation) -> None:
        self.ready.extend(operation.waiters)
        operation.waiters.clear()
        arrivals = list(operation.arrived.values())
        if arrivals[0].launch.kind == "all_to_all" and not self._known(operation):
            self._compare_splits(operation)

    def _known(self, operation: Operation) -> bool:
        return id(operation.channel) in self._found

    def _compare(self, operation: Operation, arrival: Arrival) -> None:
        first = next(iter(operation.arrived.values()))
        if first is arrival or self._known(operation):
            return
        if first.message is not None and arrival.message is not None:
            what = self._unlike(first.message, arrival.message)
        else:
            what = difference(first.launch, arrival.launch)
        if what is not None:
            self._report(operation, FindingKind.MISMATCH, f"different {what}", [first, arrival])

    def _unlike(self, first: Sent, second: Sent) -> str | None:
        if self.serial and first.tag != second.tag:
            return "tags (which NCCL ignores)"
        if first.tensor == second.tensor:
            return None
        return "dtypes" if first.tensor.dtype != second.tensor.dtype else "sizes"

    def _compare_splits(self, operation: Operation) -> None:
        """What each member sends to another must be what that one receives from it."""
        members = [operation.arrived[role] for role in operation.channel.roles]
        rows = [splits(arrival.launch, len(members)) for arrival in members]
        for i, (sent, _) in enumerate(rows):
            for j, (_, received) in enumerate(rows):
                if sent[j] != received[i]:
                    self._splits_differ(operation, members[i], members[j], sent[j], received[i])
                    return

    def _splits_differ(self, operation: Operation, sender: Arrival, receiver: Arrival, sent: Size, got: Size) -> None:
        said = f"rank {sender.rank} sends {sent} to rank {receiver.rank}, which expects {got}"
        arrivals = [sender, receiver] if sender is not receiver else [sender]
        if isinstance(sent, int) and isinstance(got, int):
            self._report(operation, FindingKind.MISMATCH, f"different splits ({said})", arrivals)
        else:
            self._report(operation, FindingKind.UNPROVED, f"splits that depend on data ({said})", arrivals)

    def _report(self, operation: Operation, problem: FindingKind, what: str, arrivals: list[Arrival]) -> None:
        kind = "message" if operation.channel.carries_messages else "collective"
        said = f"{what} in the {ordinal(operation.number + 1)} {kind} of {operation.channel.group}"
        places = tuple(arrival.place() for arrival in sorted(arrivals, key=lambda arrival: arrival.rank))
        finding = Finding(problem, operation.channel.group, said, places)
        before = sum(self.cursor[arrival.rank] for arrival in arrivals)
        self._found[id(operation.channel)] = before, finding


def splits(launch: Launch, members: int) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """The rows that an exchange sends to each member and receives from it; where none are said, equal parts."""
    rows = launch.tensors[0].shape[0] if launch.tensors[0].shape else 0
    equal: tuple[Size, ...] = (rows // members if isinstance(rows, int) else f"{rows}/{members}",) * members
    return launch.sent or equal, launch.received or equal
