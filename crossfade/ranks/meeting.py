"""How ranks find each other: their mailboxes' addresses, through the store that the process group was made with."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from crossfade.errors import RankFailedError
from crossfade.graph.private import default_store
from crossfade.ranks import mailbox
from crossfade.ranks.call_within import within
from crossfade.ranks.mailbox import Card, Mailbox, Unreachable
from crossfade.ranks.members import Members

_LOOK_SECONDS = 0.02


class _Meetings:
    """How often each set of ranks has met: the same on all of them, since they meet in the same order."""

    def __init__(self) -> None:
        self._world: Any = None
        self._counts: Counter[tuple[int, ...]] = Counter()

    def next(self, ranks: tuple[int, ...]) -> str:
        """A name for their next meeting; counting begins again with a new default group."""
        if dist.group.WORLD is not self._world:
            self._world, self._counts = dist.group.WORLD, Counter()
        self._counts[ranks] += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep one store for all of them
        named = "-".join(map(str, ranks))
        short = named if len(named) < 40 else f"{len(ranks)}-{zlib.crc32(named.encode()):08x}"
        return f"crossfade/{attempt}/{short}/{self._counts[ranks]}"


_MEETINGS = _Meetings()


def meet(ranks: Sequence[int], index: int, timeout: float, *, alone: bool = False) -> Members:
    """The members of a group of ranks, of which this process is the one with that index, once all have come."""
    scope = _MEETINGS.next(tuple(ranks))
    if alone:
        return Members(ranks, index, timeout, alone=True, scope=scope)
    store = default_store()
    box = mailbox.SHARED.hold(_host_of(store))
    box.accept(scope)
    members = Members(ranks, index, timeout, box=box, scope=scope)
    try:
        members.cards = {at: card for at, card in enumerate(_cards(members, box, store)) if at != index}
    except BaseException:
        members.close()
        raise
    return members


def _cards(members: Members, box: Mailbox, store: Any) -> list[Card]:
    """Everybody's, in their order: the first member collects them from the store, the others ask it for them."""
    found: dict[int, Card] = {}
    try:
        within(members.timeout * 1.2, "looking for the other ranks", lambda: _exchange(members, box, store, found))
    except (RuntimeError, OSError) as error:  # a store that is gone, or does not answer
        raise _without_store(members, store, found, error) from error
    if members.rank == 0:
        return _collected(members, box, found)
    return _handed_out(members, box, found)


def _exchange(members: Members, box: Mailbox, store: Any, found: dict[int, Card]) -> None:
    """Leave this member's card in the store, and take out those that it needs, as they come."""
    store.set(f"{members.scope}/card/{members.rank}", box.card.text())
    deadline = time.monotonic() + members.timeout
    for index in range(len(members.ranks)) if members.rank == 0 else [0]:
        key = f"{members.scope}/card/{index}"
        while not (here := store.check([key])) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if here:  # the others too, once time is up: they hear who was missing
            found[index] = Card.of(store.get(key).decode())


def _collected(members: Members, box: Mailbox, found: dict[int, Card]) -> list[Card]:
    missing = [rank for index, rank in enumerate(members.ranks) if index not in found]
    word: dict[str, Any] = {"cards": [found[index].text() for index in range(len(members.ranks)) if index in found]}
    if missing:
        word = {"missing": f"rank {missing[0]} did not come to compare programs within {members.timeout:g} s"}
    letter = {f"{members.scope}/cards": json.dumps(word)}
    others = {index: card for index, card in found.items() if index != members.rank}
    mailbox.ask_all(others, lambda card: mailbox.tell(card, letter, patience=0.3))
    if missing:
        raise _failed(word["missing"])
    return [found[index] for index in range(len(members.ranks))]


def _handed_out(members: Members, box: Mailbox, found: dict[int, Card]) -> list[Card]:
    first = members.ranks[0]
    if 0 not in found:
        raise _failed(f"rank {first} did not come to compare programs within {members.timeout:g} s")
    raw = box.wait(f"{members.scope}/cards", members.timeout * 1.2)
    if raw is None:
        why = mailbox.ask_all({0: found[0]}, lambda card: mailbox.ask(card, [], patience=members.timeout / 2))[0]
        where = f": it {why}" if isinstance(why, Unreachable) else ""
        raise _failed(f"no word from rank {first} to compare programs within {members.timeout * 1.2:g} s{where}")
    word = json.loads(raw)
    if "missing" in word:
        raise _failed(word["missing"])
    return [Card.of(text) for text in word["cards"]]


def _without_store(members: Members, store: Any, found: dict[int, Card], error: BaseException) -> RankFailedError:
    """The error when the store fails: its host is to blame, whom we cannot ask; and those who do not answer."""
    asked = mailbox.ask_all(found, lambda card: mailbox.ask(card, [], patience=members.timeout / 3))
    lost = [f"rank {members.ranks[at]} {said}; " for at, said in asked.items() if isinstance(said, Unreachable)]
    reason = " ".join(str(error).split())[:200]
    return _failed(f"{''.join(lost)}{_said_of(store)} while ranks met to compare programs ({reason})")


def _said_of(store: Any) -> str:
    """What a store that fails says of the rank that hosts it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"no answer from the store, which torchrun keeps on {_host_of(store)}"
    return f"no answer from the store on {_host_of(store)}, which rank 0 keeps unless it was given another"


def _host_of(store: Any) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "localhost"))


def _failed(found: str) -> RankFailedError:
    return RankFailedError(found, remedy="see that rank's own error first, then restart all ranks")
