"""Whether the schedules of all ranks fit together, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import fx

from crossfade.check.deadlocks import deadlocks, too_few
from crossfade.check.findings import Compatibility, Finding, FindingKind, RankPlace
from crossfade.check.groups import Groups, Meshes, groups_of_ranks
from crossfade.check.walk import ScheduleWalk, splits
from crossfade.errors import CrossfadeError, MeshError
from crossfade.graph.events import Events, events_of
from crossfade.graph.launches import Launch
from crossfade.graph.program import Program, from_graph_module, paused_garbage_collection

Backend = Literal["any", "gloo", "nccl"]


def check_compatible(
    programs: Program | fx.GraphModule | Sequence[Program | fx.GraphModule],
    meshes: Meshes = None,
    *,
    backend: Backend = "any",
) -> Compatibility:
    """Prove that the ranks' programs communicate compatibly, or find the shortest counter-example.

    Proved is, for each process group and across all of them: the k-th collective of a group is the same one on every
    member (kind, reduction, dtypes, sizes, root, splits); every message is received by whom it is sent to; and no rank
    waits for ever, whatever the others' speed. It takes time in proportion to what is started and waited for.

    Args:
        programs: one for each rank, by number, or a single one that all ranks run; also as graphs of ATen operators.
        meshes: who is in which group: sizes of a mesh's axes (`{"dp": 2, "tp": 4}`, row-major), a torch `DeviceMesh`,
            the ranks of each group (`{"pp": (0, 1)}`, a list of groups under one name), or such a mapping for each
            rank. None: every group has all ranks.
        backend: `"gloo"`: a launch never blocks. `"nccl"` or `"any"`: kernels of different groups may also run one
            after the other on a device, so that opposite launch orders are found, as "may deadlock on NCCL".

    Returns:
        What was looked at and found: true if all of it is proved. Print it, or read `findings`.

        >>> from crossfade.graph.text import parse
        >>> def rank(sizes):
        ...     return parse(f'''
        ... x: f32[{sizes}] = input("x")
        ... start = c10d.all_reduce(x, "sum", "dp")
        ... done = c10d.wait_tensor(start)
        ... return output("y", done)
        ... ''')
        >>> print(check_compatible(rank(4), {"dp": 2}))
        1 collective of 1 group on 2 ranks: every wait is met.
        >>> print(check_compatible([rank(4), rank(8)], {"dp": 2}))
        1 collective of 1 group on 2 ranks:
          mismatch: different sizes in the 1st collective of dp: rank 0 starts all_reduce(sum) of f32[4] on dp
          (node start); rank 1 starts all_reduce(sum) of f32[8] on dp (node start)
    """
    if backend not in ("any", "gloo", "nccl"):
        raise CrossfadeError(f"backend={backend!r}", expected="'any', 'gloo' or 'nccl'", remedy="pass one of them")
    given = _programs([programs] if isinstance(programs, Program | fx.GraphModule) else programs)
    with paused_garbage_collection():
        read = {id(program): events_of(program) for program in given}
        schedules = [read[id(program)] for program in given]
        groups = _groups(schedules, meshes, given)
        if len(given) == 1:
            schedules = schedules * len(groups)
        return check_schedules(schedules, groups, backend)


def _programs(given: Sequence[Any]) -> list[Program]:
    """Programs, also where graphs were given; one that is given several times stays one."""
    read: dict[int, Program] = {}
    for graph in given:
        if not isinstance(graph, Program | fx.GraphModule):
            raise CrossfadeError(
                f"a {type(graph).__name__} to check", expected="a Program or an FX graph", remedy="pass what ranks run"
            )
        if id(graph) not in read:
            read[id(graph)] = graph if isinstance(graph, Program) else from_graph_module(graph)
    if not read:
        raise CrossfadeError("no programs to check", expected="one for each rank", remedy="pass at least one")
    return [read[id(graph)] for graph in given]


def check_schedules(schedules: Sequence[Events], groups: Sequence[Groups], backend: Backend = "any") -> Compatibility:
    """`check_compatible` on what was read of the programs already."""
    wrong = [*_unknown(schedules, groups), *_misfits(schedules, groups)]
    unread = list(_unread(schedules))
    if wrong:
        return _result(schedules, groups, [*wrong, *unread])
    if len(_distinct(schedules)) == 1 and not _depends_on_rank(schedules[0]):
        return _result(schedules, groups, unread)
    walk = ScheduleWalk(schedules, groups)
    findings = walk.findings or [*deadlocks(walk), *too_few(walk)]
    if not findings and backend != "gloo":
        serial = ScheduleWalk(schedules, groups, serial=True)
        findings = serial.findings or deadlocks(serial)
    return _result(schedules, groups, [*findings, *unread], walk)


def _distinct(schedules: Sequence[Events]) -> list[Events]:
    return list({id(schedule): schedule for schedule in schedules}.values())


def _groups(schedules: Sequence[Events], meshes: Meshes, given: Sequence[Program]) -> list[Groups]:
    ranks = len(given) if len(given) > 1 else None
    if meshes is not None:
        return groups_of_ranks(meshes, ranks)
    if ranks is None:
        sizes = {name: size for name, size in given[0].groups.items() if size}
        if len(sizes) != 1 and schedules[0].launches:
            raise MeshError(
                f"one program for all ranks, with groups {', '.join(sizes) or 'of unknown sizes'}",
                expected="a mesh that says which ranks are in them",
                remedy='pass meshes={"dp": 2, "tp": 4}, or the ranks of each group',
            )
        return groups_of_ranks(sizes or {"": 1})
    everyone = tuple(range(ranks))
    found = dict.fromkeys((launch.group for schedule in schedules for launch in schedule.launches), everyone)
    return [found] * ranks


def _unknown(schedules: Sequence[Events], groups: Sequence[Groups]) -> Iterator[Finding]:
    """Groups that a rank is not in, or that their members see differently."""
    names = {id(events): dict.fromkeys(launch.group for launch in events.launches) for events in _distinct(schedules)}
    seen = set()
    for rank, (events, own) in enumerate(zip(schedules, groups, strict=True)):
        for name in names[id(events)]:
            if name not in own:
                raise MeshError(
                    f"the group {name!r} in rank {rank}'s program",
                    expected=f"one of the mesh's: {', '.join(own) or 'none'}",
                    remedy="say who is in it, in meshes (--mesh, --group)",
                )
            if (name, own[name]) not in seen or rank not in own[name]:
                seen.add((name, own[name]))
                yield from _misfit_group(rank, events, name, own[name], groups)


def _misfit_group(
    rank: int, events: Events, name: str, ranks: tuple[int, ...], groups: Sequence[Groups]
) -> Iterator[Finding]:
    launch = next(launch for launch in events.launches if launch.group == name)
    place = RankPlace.of(rank, launch)
    if rank not in ranks:
        yield Finding(
            FindingKind.MEMBERS, name, f"rank {rank} is not in {name}, which has ranks {_listed(ranks)}", (place,)
        )
        return
    for other in ranks:
        theirs = groups[other].get(name) if other < len(groups) else None
        if theirs != ranks:
            said = f"ranks {_listed(theirs)}" if theirs else "nothing"
            what = f"{name} has ranks {_listed(ranks)} on rank {rank}, and {said} on rank {other}"
            yield Finding(FindingKind.MEMBERS, name, what, (place,))
            return


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _misfits(schedules: Sequence[Events], groups: Sequence[Groups]) -> Iterator[Finding]:
    """The first launch of each group that no group of its size can carry out."""
    seen: set[object] = set()
    for rank, (events, own) in enumerate(zip(schedules, groups, strict=True)):
        sizes = tuple((name, len(ranks)) for name, ranks in own.items())
        if (id(events), sizes) in seen:
            continue
        seen.add((id(events), sizes))
        for launch in events.launches:
            if launch.group in own and own[launch.group] not in seen and (what := _misfit(launch, own[launch.group])):
                seen.add(own[launch.group])
                yield Finding(FindingKind.MISMATCH, launch.group, what, (RankPlace.of(rank, launch),))


def _misfit(launch: Launch, ranks: tuple[int, ...]) -> str:
    """Why a launch does not fit its group; empty if it does."""
    size = len(ranks)
    peers = [message.peer for message in launch.messages if not 0 <= message.peer < size]
    rows = launch.tensors[0].shape[:1] if launch.tensors else ()
    if launch.members not in (None, size):
        return f"a group of {size} ranks, where the operator says {launch.members}"
    if launch.root is not None and not 0 <= launch.root < size:
        return f"root {launch.root} in a group of {size} ranks"
    if peers:
        return f"a message with rank {peers[0]} of a group of {size}"
    for part in (launch.sent, launch.received):
        if part and len(part) != size:
            return f"{len(part)} splits in a group of {size} ranks"
    whole = [n for n in (*launch.sent, *rows) if isinstance(n, int)]
    if launch.sent and len(whole) == size + 1 and sum(whole[:-1]) != whole[-1]:
        return f"splits that add up to {sum(whole[:-1])} of {whole[-1]} rows"
    if launch.kind == "all_to_all" and not launch.sent and isinstance(rows[0], int) and rows[0] % size:
        return f"{rows[0]} rows to divide among {size} ranks"
    return ""


def _depends_on_rank(events: Events) -> bool:
    """Whether ranks that run the same program may still not fit: messages, and exchanges of unequal parts."""
    return any(launch.messages or _is_uneven(launch) for launch in events.launches)


def _is_uneven(launch: Launch) -> bool:
    if launch.kind != "all_to_all":
        return False
    sent, received = splits(launch, len(launch.sent or launch.received) or 1)
    return len({*sent, *received}) > 1


def _unread(schedules: Sequence[Events]) -> Iterator[Finding]:
    for events in _distinct(schedules):
        rank = next(rank for rank, schedule in enumerate(schedules) if schedule is events)
        for unread in events.unread:
            place = RankPlace(rank, unread.node, unread.source, "communicates in a way that the graph does not show")
            yield Finding(FindingKind.UNPROVED, "", unread.reason, (place,))


def _result(
    schedules: Sequence[Events],
    groups: Sequence[Groups],
    findings: list[Finding],
    walk: ScheduleWalk | None = None,
) -> Compatibility:
    counts = {id(schedule): _counted(schedule) for schedule in _distinct(schedules)}
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for own, events in zip(groups, schedules, strict=True):
        for name, number in counts[id(events)].items():
            known[name, own[name]] = max(number, known.get((name, own[name]), 0))
    channels = walk.channels.values() if walk is not None else ()
    messages = sum(len(channel.operations) for channel in channels if channel.carries_messages)
    collectives = sum(known.values())
    return Compatibility(len(schedules), len(known), collectives, messages, tuple(findings), _assumed(schedules))


def _counted(events: Events) -> dict[str, int]:
    """How many collectives a program starts in each of the groups it uses."""
    found: dict[str, int] = {}
    for launch in events.launches:
        found[launch.group] = found.get(launch.group, 0) + (not launch.messages)
    return found


def _assumed(schedules: Sequence[Events]) -> tuple[str, ...]:
    """What the proof takes for granted: symbols, which are compared as expressions."""
    sizes = {
        size
        for events in _distinct(schedules)
        for launch in events.launches
        for tensor in launch.tensors
        for size in tensor.shape
        if isinstance(size, str)
    }
    return (f"{', '.join(sorted(sizes))} is the same number on every rank",) if sizes else ()
