"""The ranks that run a program together: they agree on it before, and find out who failed after.

Everything here goes through the key-value store with a timeout, never through a collective: a check that two ranks
are compatible must not itself hang when they are not.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from crossfade.errors import RankFailedError, RankMismatchError
from crossfade.graph.launches import Launch, as_json, first_apart, from_json


@dataclass
class Members:
    """The members of one data-parallel group, as seen from one of them.

    `ranks` are global ranks in group order, `rank` is this one's index among them, `timeout` is in seconds: no call
    here, and no collective of the group, takes longer to fail. `alone` says that the others do not exist, as in an
    emulated world: there is nobody to agree with, or to blame.
    """

    store: Any
    ranks: Sequence[int]
    rank: int
    timeout: float
    alone: bool = False
    meetings: int = 0
    _shared_before: int = 0
    """The last meeting before which this member shared something."""

    def agree(
        self,
        fingerprint: str,
        text: str,
        *,
        what: str = "programs",
        expected: str = "the same program on every rank",
        remedy: str = "build the same model, optimizer and batch shapes on every rank",
    ) -> None:
        """Return when all members have brought the same fingerprint; otherwise raise, on every member.

        The first member collects and judges, the others wait for its word. `text` is compared to name the first line
        that differs; or an `account`, to name the first collective that does. `what` they bring, what was `expected`
        and the `remedy` are for the error.
        """
        if self.alone:
            return
        meeting = self._next_meeting()
        mine = json.dumps({"fingerprint": fingerprint})
        self.store.set(f"{meeting}/text/{self.rank}", zlib.compress(text.encode()))
        self.store.set(f"{meeting}/member/{self.rank}", mine)
        if self.rank == 0:
            self.store.set(f"{meeting}/word", json.dumps(self._judge(meeting, fingerprint, text, what)))
        self._hear(meeting, expected, remedy)

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first member, on every member; once before each `agree`. It must fit JSON."""
        if self.alone:
            return make()
        assert self._shared_before <= self.meetings, "a second share before agree: others may not have read the first"
        key = f"meeting/{self.meetings + 1}/shared"
        if self.rank == 0:
            made = make()
            self.store.set(key, json.dumps({"made": made}))
            self._shared_before = self.meetings + 1
            return made
        raw = self._peek(key, wait=self.timeout)
        if raw is None:
            raise self._failed(f"no word from rank {self.ranks[0]} within {self.timeout:g} s")
        word = json.loads(raw)
        if "failed" in word:
            raise self._failed(f"rank {self.ranks[0]}: {word['failed']}")
        self._shared_before = self.meetings + 1
        return word["made"]

    def fail(self, what: str) -> None:
        """Tell the others, who may be waiting in `agree` or `share`, that this member cannot go on."""
        meeting = self._next_meeting()
        if self.rank == 0 and self._shared_before < self.meetings:  # else they go on, and see for themselves
            self.store.set(f"{meeting}/shared", json.dumps({"failed": what}))
        self.store.set(f"{meeting}/member/{self.rank}", json.dumps({"failed": what}))
        if self.rank == 0:
            self.store.set(f"{meeting}/word", json.dumps({"kind": "failed", "found": f"rank {self.ranks[0]}: {what}"}))

    def note(self, key: str, value: str) -> None:
        """Leave word of this member for whoever asks after it, such as the step it has reached."""
        self.store.set(f"{key}/{self.rank}", value)

    def noted(self, key: str) -> list[str]:
        """What each member has left under a key, or within the timeout leaves there."""
        return [self._peek(f"{key}/{index}", wait=self.timeout) or "no word" for index in range(len(self.ranks))]

    def blame(self, step: int, collective: str, error: BaseException) -> RankFailedError:
        """The error to raise when a collective failed: name the members that failed, or fell behind, or went silent."""
        suspects = []
        for index, rank in enumerate(self.ranks):
            if index != self.rank and not self.alone and (sign := self._sign_of(index, step)):
                suspects.append(f"rank {rank} {sign}")
        who = "; ".join(suspects) or "no rank said why"
        reason = " ".join(str(error).split())[:300]
        return RankFailedError(
            f"a failed collective in step {step}: {collective or 'unknown'} ({who}; the backend said: {reason})",
            expected=f"every rank to take part within {self.timeout:g} s",
            remedy="see that rank's own error first, then restart all ranks from the last checkpoint",
        )

    def _sign_of(self, index: int, step: int) -> str:
        """What a member's last word says against it; empty if it is where this member is."""
        try:
            failed = self._peek(f"failed/{index}", wait=1.0)
            reached = self._peek(f"step/{index}", wait=0.2)
        except (RuntimeError, OSError):
            return "cannot be asked: the store does not answer (its host has probably died)"
        if failed is not None:
            return f"failed: {failed}"
        if reached is None or int(reached) < step:
            capturing = self._peek(f"capturing/{index}", wait=0.1)
            why = f"; it captures again, since {capturing}" if capturing else ""
            return f"has not reached step {step} (last seen in step {reached or 'none'}{why})"
        return ""

    def _next_meeting(self) -> str:
        self.meetings += 1
        return f"meeting/{self.meetings}"

    def _judge(self, meeting: str, fingerprint: str, text: str, what: str) -> dict[str, str]:
        deadline = time.monotonic() + self.timeout
        for index, rank in enumerate(self.ranks):
            raw = self._peek(f"{meeting}/member/{index}", wait=max(0.0, deadline - time.monotonic()))
            if raw is None:
                return {
                    "kind": "failed",
                    "found": f"rank {rank} did not come to compare programs within {self.timeout:g} s",
                }
            said = json.loads(raw)
            if "failed" in said:
                return {"kind": "failed", "found": f"rank {rank}: {said['failed']}"}
            if said["fingerprint"] != fingerprint:
                theirs = zlib.decompress(self.store.get(f"{meeting}/text/{index}")).decode()
                return {"kind": "differs", "found": _first_difference(text, theirs, self.ranks[0], rank, what)}
        return {"kind": "agreed"}

    def _hear(self, meeting: str, expected: str, remedy: str) -> None:
        raw = self._peek(f"{meeting}/word", wait=self.timeout * 1.5)
        if raw is None:
            raise self._failed(f"no word from rank {self.ranks[0]} within {self.timeout * 1.5:g} s")
        word = json.loads(raw)
        if word["kind"] == "differs":
            raise RankMismatchError(word["found"], expected=expected, remedy=remedy)
        if word["kind"] == "failed":
            raise self._failed(word["found"])

    def _failed(self, found: str) -> RankFailedError:
        return RankFailedError(found, remedy="see that rank's own error first, then restart all ranks")

    def _peek(self, key: str, *, wait: float) -> str | None:
        """A value of the store if it is, or within `wait` seconds gets, there."""
        try:
            self.store.wait([key], timedelta(seconds=max(wait, 0.01)))
        except RuntimeError as error:  # torch's stores have no one class for a timeout
            if isinstance(error, dist.DistStoreError) or "timeout" in str(error).lower():
                return None
            raise
        return self.store.get(key).decode()


_PARTS = "\x1e"
"""Between the parts of what ranks compare, and that no text has inside."""


def account(causes: Sequence[str], schedules: Sequence[Sequence[Launch]], rest: str) -> str:
    """What ranks compare to say how they differ: lines that explain the rest, what they communicate, the rest."""
    return _PARTS.join(["\n".join(causes), json.dumps([as_json(launches) for launches in schedules]), rest])


def _first_difference(ours: str, theirs: str, our_rank: int, their_rank: int, what: str) -> str:
    """The first difference of two texts, or of two accounts in the order of their parts."""
    (causes, schedules, rest), (their_causes, their_schedules, their_rest) = _parts(ours), _parts(theirs)
    for mine, other in zip(schedules, their_schedules, strict=False) if causes == their_causes else ():
        if (apart := first_apart(from_json(mine), from_json(other))) is not None:
            return f"different programs, first in {apart.said(our_rank, their_rank)}"
    pairs = zip([*causes, *rest], [*their_causes, *their_rest], strict=False)
    different = next(((number, a, b) for number, (a, b) in enumerate(pairs, 1) if a != b), None)
    if different is None:
        return f"{what} of different length on rank {our_rank} and rank {their_rank}"
    number, a, b = different
    return f"different {what}, first at line {number}: rank {our_rank} has `{a}`, rank {their_rank} has `{b}`"


def _parts(text: str) -> tuple[list[str], list[Any], list[str]]:
    if _PARTS not in text:
        return [], [], text.splitlines()
    causes, schedules, rest = text.split(_PARTS)
    return causes.splitlines(), json.loads(schedules), rest.splitlines()
