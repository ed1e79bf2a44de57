"""How ranks find each other through a store: two of them in threads here, and what is said where one does not come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from crossfade.errors import RankFailedError
from crossfade.ranks import meeting
from crossfade.ranks.mailbox import Mailbox
from crossfade.ranks.members import Members


def come(store: Any, index: int, box: Mailbox, timeout: float) -> list[int] | str:
    """The ports of everybody's mailboxes, as one of ranks 3 and 5 finds them; or the error."""
    box.accept("us")
    try:
        return [card.port for card in meeting._cards(Members((3, 5), index, timeout, box=box, scope="us"), box, store)]
    except RankFailedError as error:
        return str(error)


def met(*comers: Callable[[Mailbox], Any]) -> tuple[list[Any], list[int]]:
    """What each finds, all at the same time, and the ports of their mailboxes."""
    boxes = [Mailbox("localhost") for _ in comers]
    with ThreadPoolExecutor(len(comers)) as pool:
        found = list(pool.map(lambda comer, box: comer(box), comers, boxes))
    for box in boxes:
        box.close()
    return found, [box.card.port for box in boxes]


def test_all_find_the_same_cards_in_their_order() -> None:
    store = dist.HashStore()
    found, ports = met(lambda box: come(store, 0, box, 5.0), lambda box: come(store, 1, box, 5.0))
    assert found == [ports, ports]


def test_who_does_not_come_is_named() -> None:
    remedy = ". Remedy: see that rank's own error first, then restart all ranks."
    found, _ = met(lambda box: come(dist.HashStore(), 0, box, 0.2))
    assert found == [f"rank 5 did not come to compare programs within 0.2 s{remedy}"]
    found, _ = met(lambda box: come(dist.HashStore(), 1, box, 0.2))
    assert found == [f"rank 3 did not come to compare programs within 0.2 s{remedy}"]


class Gone(dist.Store):
    """A store whose host has died."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken   pipe")


@pytest.mark.parametrize(
    ("by_torchrun", "keeper"),
    [
        ("", "on localhost, which rank 0 keeps unless it was given another"),
        ("True", "which torchrun keeps on localhost"),
    ],
)
def test_a_store_that_fails_is_named_by_its_keeper(
    monkeypatch: pytest.MonkeyPatch, by_torchrun: str, keeper: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", by_torchrun)
    (said,), _ = met(lambda box: come(Gone(), 0, box, 1.0))
    assert said.startswith("no answer from the store")
    assert keeper in said and "while ranks met to compare programs (Broken pipe). Remedy" in said


def test_meetings_are_counted_for_each_set_of_ranks_and_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = meeting._Meetings()
    assert [meetings.next(ranks) for ranks in ((0, 1), (0, 1), (1, 2))] == [
        "crossfade/0/0-1/1", "crossfade/0/0-1/2", "crossfade/0/1-2/1",
    ]  # fmt: skip
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert meetings.next((0, 1)) == "crossfade/2/0-1/3"
    names = [meetings.next(tuple(range(first, first + 20))) for first in (0, 1)]
    assert [name.split("/")[2].split("-")[0] for name in names] == ["20", "20"] and names[0] != names[1]


def test_who_is_alone_waits_for_nobody() -> None:
    members = meeting.meet((0, 1), 1, 1.0, alone=True)
    assert members.alone and members.cards == {} and members.scope.startswith("crossfade/0/0-1/")
