"""Who waits for whom among ranks that are stuck, as the shortest circle; and who has ended too early."""

from __future__ import annotations

from collections import deque

from crossfade.check.findings import Finding, FindingKind, RankPlace
from crossfade.check.walk import Operation, ScheduleWalk
from crossfade.graph.events import Wait
from crossfade.graph.launches import ordinal


def deadlocks(walk: ScheduleWalk) -> list[Finding]:
    """The shortest circle of ranks that wait for each other; nothing if there is none."""
    circle = shortest_circle(walk.stuck)
    return [_circle_found(walk, circle)] if circle else []


def shortest_circle(stuck: dict[int, Operation]) -> list[int]:
    """The fewest ranks that wait for each other, each for the next; empty if all chains end at a rank that ended."""
    best = [[rank] for rank, operation in stuck.items() if rank in operation.missing][:1]
    for rank in stuck:
        if best and len(best[-1]) <= 2:
            break
        best += [circle] if (circle := _circle_from(rank, stuck, len(best[-1]) if best else len(stuck) + 1)) else []
    return best[-1] if best else []


def _circle_from(start: int, stuck: dict[int, Operation], shorter_than: int) -> list[int]:
    """The shortest way from a rank back to itself, if it has fewer ranks than that; breadth first."""
    before: dict[int, int] = {}
    looked: set[int] = set()
    queue = deque([(start, 1)])
    while queue:
        rank, length = queue.popleft()
        operation = stuck[rank]
        if length >= shorter_than:
            return []
        if id(operation) in looked:
            continue
        looked.add(id(operation))
        for other in operation.missing:
            if other == start:
                return _way(before, start, rank)
            if other in stuck and other not in before:
                before[other] = rank
                queue.append((other, length + 1))
    return []


def _way(before: dict[int, int], start: int, last: int) -> list[int]:
    way = [last]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


def _circle_found(walk: ScheduleWalk, circle: list[int]) -> Finding:
    pairs = list(zip(circle, circle[1:] + circle[:1], strict=True))
    places = tuple(_stuck_place(walk, rank, after) for rank, after in pairs)
    group = walk.stuck[circle[0]].channel.group
    who = _ranks(circle)
    if walk.serial:
        what = f"{who} start communication in opposite orders, and a device may run it one after the other"
        return Finding(FindingKind.NCCL, group, what, places)
    what = f"{who} wait for each other" if len(circle) > 1 else f"{who} waits for itself"
    return Finding(FindingKind.DEADLOCK, group, what, places)


def _stuck_place(walk: ScheduleWalk, rank: int, other: int) -> RankPlace:
    operation, event = walk.stuck[rank], walk.event_of(rank)
    launch = walk.launches_of(rank, event)
    later = _start_of(walk, other, operation)
    when = f"{'whose other end' if operation.channel.carries_messages else 'which'} rank {other} {later}"
    if isinstance(event, Wait):
        return RankPlace(rank, event.node, event.source, f"waits for {launch}, {when}")
    return RankPlace(rank, event.node, event.source, f"starts {launch}, {when}")


def _start_of(walk: ScheduleWalk, rank: int, operation: Operation) -> str:
    """Where a rank would take part in an operation that it has not come to."""
    roles = [role for role in operation.channel.roles if role[0] == rank and role not in operation.arrived]
    number = operation.channel.posted.get(roles[0], 0)
    for event in walk.schedules[rank].events[walk.cursor[rank] :]:
        if isinstance(event, Wait):
            continue
        for key, _, role, _ in walk.roles_of(rank, event):
            if walk.channels.get(key) is operation.channel and role == roles[0]:
                if number == operation.number:
                    return f"starts only later, at {event.where}"
                number += 1
    return "never starts"


def too_few(walk: ScheduleWalk) -> list[Finding]:
    """Operations that a member never comes to, since its program ends before; the first of each channel."""
    found = []
    stuck = walk.stuck
    for channel in walk.channels.values():
        first = next((operation for operation in channel.operations if not operation.complete), None)
        ended = [rank for rank in first.missing if rank not in stuck] if first is not None else []
        if first is not None and ended:
            before = sum(walk.cursor[arrival.rank] for arrival in first.arrived.values())
            found.append((before, _ends_early(walk, first, ended[0])))
    return [finding for _, finding in sorted(found, key=lambda item: item[0])]


def _ends_early(walk: ScheduleWalk, operation: Operation, rank: int) -> Finding:
    channel = operation.channel
    arrival = next(iter(operation.arrived.values()))
    if channel.carries_messages:
        sends = arrival.message is not None and arrival.message.sends
        does = f"ends without the {'receive' if sends else 'send'} that it needs"
        return Finding(
            FindingKind.NUMBER, channel.group, "a message without its other end", (arrival.place(), _end(rank, does))
        )
    done = operation.number
    does = f"ends after {done} on {channel.group}"
    starts = RankPlace.of(arrival.rank, arrival.launch, f"starts a {ordinal(done + 1)} collective, {arrival.launch}")
    return Finding(FindingKind.NUMBER, channel.group, "different numbers of collectives", (starts, _end(rank, does)))


def _end(rank: int, does: str) -> RankPlace:
    return RankPlace(rank, "", "", does)


def _ranks(ranks: list[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"rank {names[0]}"
