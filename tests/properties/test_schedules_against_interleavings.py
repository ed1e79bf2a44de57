"""Random schedules of a few ranks, mutated, against every order in which the ranks could run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from crossfade.check.compatible import check_schedules
from crossfade.check.findings import FindingKind
from crossfade.graph.events import Events, Wait
from crossfade.graph.launches import Launch, Sent, TensorType

GROUPS = {"all": (0, 1, 2), "low": (0, 1), "high": (1, 2)}
Row = list[tuple[str, str, int]]
"""What a rank does: (launch, group, size), (send | recv, peer, size), or (wait, "", launch by number)."""


@st.composite
def schedules(draw: st.DrawFn) -> list[Row]:
    """Three ranks that do the same, each wait anywhere after its launch; then a few mutations."""
    rows: list[Row] = [[], [], []]
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            _collective(draw, rows)
        else:
            _message(draw, rows)
    if draw(st.booleans()):  # nobody waits: only launch orders can be wrong
        rows = [[one for one in row if one[0] != "wait"] for row in rows]
        shuffled = draw(st.integers(0, 2))
        rows[shuffled] = draw(st.permutations(rows[shuffled]))
        return rows
    for _ in range(draw(st.integers(0, 2))):
        _mutate(draw, rows[draw(st.integers(0, 2))])
    return rows


def _collective(draw: st.DrawFn, rows: list[Row]) -> None:
    group, size = draw(st.sampled_from(sorted(GROUPS))), draw(st.integers(1, 2))
    for rank in GROUPS[group]:
        _start(draw, rows[rank], ("launch", group, size))


def _message(draw: st.DrawFn, rows: list[Row]) -> None:
    source, target = draw(st.permutations([0, 1, 2]))[:2]
    size = draw(st.integers(1, 2))
    _start(draw, rows[source], ("send", str(target), size))
    _start(draw, rows[target], ("recv", str(source), size))


def _start(draw: st.DrawFn, row: Row, launch: tuple[str, str, int]) -> None:
    number = sum(one[0] != "wait" for one in row)
    row.append(launch)
    if draw(st.booleans()):
        row.append(("wait", "", number))


def _mutate(draw: st.DrawFn, row: Row) -> None:
    """Swap two neighbours, drop one, or change one; waits keep naming the launch that has their number."""
    if not row:
        return
    place = draw(st.integers(0, len(row) - 1))
    how = draw(st.sampled_from(["swap", "drop", "size", "group", "wait"]))
    kind, group, size = row[place]
    if how == "swap" and place + 1 < len(row):
        row[place], row[place + 1] = row[place + 1], row[place]
    elif how == "drop":
        row.pop(place)
    elif kind != "wait" and how == "size":
        row[place] = kind, group, 3 - size
    elif kind == "launch" and how == "group":
        row[place] = kind, draw(st.sampled_from(sorted(GROUPS))), size
    elif how == "wait":
        row.insert(place + 1, ("wait", "", 0))


def proper(rank: int, row: Row) -> Row:
    """A row without launches on groups that the rank is not in, and without waits for what is not started yet."""
    kept: Row = []
    for one in row:
        started = sum(other[0] != "wait" for other in kept)
        if (one[0] == "wait" and one[2] < started) or (one[0] != "wait" and _may(rank, one)):
            kept.append(one)
    return kept


def _may(rank: int, one: tuple[str, str, int]) -> bool:
    return one[0] != "launch" or rank in GROUPS[one[1]]


def as_events(row: Row) -> Events:
    found = Events()
    for number, (kind, name, size) in enumerate(row):
        tensor = TensorType("f32", (size,))
        if kind == "wait":
            found.events.append(Wait(f"n{number}", "", size))
        elif kind == "launch":
            found.start(Launch(f"n{number}", "", "all_reduce", name, (tensor,), "sum"))
        else:
            sent = Sent(kind == "send", int(name), 0, tensor)
            found.start(Launch(f"n{number}", "", "messages", "all", messages=(sent,)))
    return found


class Oracle:
    """Every interleaving, by search over what each rank has done; what it may reach is decided from the definition."""

    def __init__(self, rows: list[Row], *, serial: bool) -> None:
        self.rows = [list(self.spelled_out(row)) if serial else row for row in rows]

    def spelled_out(self, row: Row) -> Iterator[tuple[str, str, int]]:
        number = 0
        for one in row:
            yield one
            if one[0] != "wait":
                yield "wait", "", number
                number += 1

    def may_hang(self) -> bool:
        """Whether some interleaving ends with a rank that has not finished."""
        seen, stack = set(), [(0,) * len(self.rows)]
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            steps = [rank for rank, row in enumerate(self.rows) if state[rank] < len(row) and self.may_go(rank, state)]
            if not steps and any(done < len(row) for done, row in zip(state, self.rows, strict=True)):
                return True
            stack += [tuple(done + (rank == one) for rank, done in enumerate(state)) for one in steps]
        return False

    def may_go(self, rank: int, state: tuple[int, ...]) -> bool:
        kind, _, number = self.rows[rank][state[rank]]
        if kind != "wait":
            return True
        place = [index for index, one in enumerate(self.rows[rank]) if one[0] != "wait"][number]
        return all(self.count(other, want, state[other]) > nth for other, want, nth in self.partners(rank, place))

    def partners(self, rank: int, place: int) -> list[tuple[int, tuple[str, str], int]]:
        kind, name, _ = self.rows[rank][place]
        nth = self.count(rank, (kind, name), place)
        if kind == "launch":
            return [(other, (kind, name), nth) for other in GROUPS[name]]
        return [(int(name), ("recv" if kind == "send" else "send", str(rank)), nth)]

    def count(self, rank: int, what: tuple[str, str], done: int) -> int:
        return sum(one[:2] == what for one in self.rows[rank][:done])

    def differs(self) -> bool:
        """Whether the n-th launch of a group, or message of a pair, is not the same, or not there, on a member."""
        for rank, row in enumerate(self.rows):
            for place, one in enumerate(row):
                for other, want, nth in self.partners(rank, place) if one[0] != "wait" else ():
                    theirs = [item for item in self.rows[other] if item[:2] == want]
                    if len(theirs) <= nth or theirs[nth][2] != one[2]:
                        return True
        return False


@given(schedules())
def test_what_is_proved_holds_in_every_interleaving(rows: list[Row]) -> None:
    rows = [proper(rank, row) for rank, row in enumerate(rows)]
    groups = [{name: ranks for name, ranks in GROUPS.items() if rank in ranks} for rank in range(3)]
    found = check_schedules([as_events(row) for row in rows], groups, "gloo")
    plain, serial = Oracle(rows, serial=False), Oracle(rows, serial=True)
    wrong = plain.differs() or plain.may_hang()
    assert found.ok == (not wrong), str(found)
    if any(finding.problem is FindingKind.DEADLOCK for finding in found.findings):
        assert plain.may_hang()
    on_nccl = check_schedules([as_events(row) for row in rows], groups)
    assert on_nccl.ok == (not wrong and not serial.may_hang()), str(on_nccl)


def test_a_program_shared_by_all_ranks_is_judged_as_its_copies_are() -> None:
    one = as_events([("launch", "all", 1), ("wait", "", 0), ("launch", "all", 2), ("wait", "", 1)])
    copies = [Events([*one.events], [replace(launch) for launch in one.launches]) for _ in range(3)]
    groups = [{"all": (0, 1, 2)}] * 3
    assert check_schedules([one] * 3, groups) == check_schedules(copies, groups)
