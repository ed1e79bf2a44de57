"""The ranks that run a program together: they agree on it before, and find out who failed after.

They find each other through the key-value store once, and then ask each other's mailboxes, every time with a timeout,
and never through a collective: a check that two ranks are compatible must not itself hang when they are not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from crossfade.errors import CrossfadeError, RankFailedError, RankMismatchError
from crossfade.graph.launches import Launch, as_json, first_apart, from_json
from crossfade.ranks import mailbox
from crossfade.ranks.blame import and_now, failure, is_of_backend, named, sign_of, sign_of_leaving, suspects
from crossfade.ranks.call_within import within
from crossfade.ranks.mailbox import Card, Mailbox, Unreachable
from crossfade.ranks.one_at_a_time import CAPTURING

T = TypeVar("T")

_LOOK_SECONDS = 0.5
"""How long to wait for a member at a time where it may have gone elsewhere."""
_CONFIRMS_SECONDS = 0.3
"""How long to wait for confirmation that a letter was read: it is delivered either way."""
_READS_SECONDS = 0.3
"""How long a process that was paused may take to read the letters that came meanwhile."""


@dataclass
class Members:
    """The members of one group of ranks, as seen from one of them; `crossfade.ranks.meeting.meet` makes them.

    `ranks` are global ranks in group order, `rank` is this one's index among them, `timeout` is in seconds: no call
    here, and no collective of the group, takes longer than twice that to fail. `alone` says that the others do not
    exist, as in an emulated world: there is nobody to agree with, or to blame. `scope` begins all their keys.
    """

    ranks: Sequence[int]
    rank: int
    timeout: float
    alone: bool = False
    box: Mailbox | None = None
    cards: Mapping[int, Card] = field(default_factory=dict)
    scope: str = ""
    meetings: int = 0
    _shared_before: int = 0
    """The last meeting before which this member shared something."""

    def agree(
        self,
        fingerprint: str,
        text: str,
        offers: Sequence[str] = (),
        *,
        to: str = "compare programs",
        at: int | None = None,
        what: str = "programs",
        expected: str = "",
        remedy: str = "",
    ) -> list[str]:
        """Return when all members have brought the same fingerprint; otherwise raise, on every member.

        The first member collects and judges, the others wait for its word. `text` is compared to name the first line
        that differs; or an `account`, to name the first collective that does. `to` says what they meet for, `at` after
        how many calls of a step, if so; `what` they bring, what was `expected` and the `remedy` are for the error.
        Returns those of the first member's offers that all have made.
        """
        if self.alone:
            return list(offers)
        meeting = self._next_meeting()
        self._post(f"{meeting}/text", text)
        if self.rank == 0:
            word = self._judge(meeting, fingerprint, text, list(offers), to, at, what)
            self._send_all({f"{meeting}/word": json.dumps(word)})
        else:
            said = {"fingerprint": fingerprint, "offers": list(offers)}
            self._send(0, {f"{meeting}/member/{self.rank}": json.dumps(said)})
            word = json.loads(self._first_members(f"{meeting}/word", self.timeout * 1.5, to, at))
        return self._heard(word, to, expected, remedy)

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first member, on every member; once before each `agree`. It must fit JSON."""
        if self.alone:
            return make()
        assert self._shared_before <= self.meetings, "a second share before agree: others may not have read the first"
        key = f"meeting/{self.meetings + 1}/shared"
        if self.rank == 0:
            made = make()
            self._send_all({key: json.dumps({"made": made})})
            self._shared_before = self.meetings + 1
            return made
        word = json.loads(self._first_members(key, self.timeout, "compare programs"))
        if "failed" in word:
            raise self._failed(f"rank {self.ranks[0]}: {word['failed']}")
        self._shared_before = self.meetings + 1
        return word["made"]

    def fail(self, what: str) -> None:
        """Tell the others, who may be waiting in `agree` or `share`, that this member cannot go on."""
        if self.alone:
            return
        meeting = self._next_meeting()
        if self.rank != 0:
            self._send(0, {f"{meeting}/member/{self.rank}": json.dumps({"failed": what})})
        else:
            letters = {f"{meeting}/word": json.dumps({"kind": "failed", "found": f"rank {self.ranks[0]}: {what}"})}
            if self._shared_before < self.meetings:  # else they go on, and see for themselves
                letters[f"{meeting}/shared"] = json.dumps({"failed": what})
            self._send_all(letters)
        self.leave(what)

    def note(self, key: str, value: str) -> None:
        """Leave word of this member for whoever asks after it: the `step` it has reached, what it is `doing`."""
        self._has_not_left()
        self._post(key, value)

    def leave(self, why: str, because: Sequence[int] = ()) -> None:
        """Tell the others why this member ends, as long as it can: whoever finds it gone knows then.

        `because` names the ranks, if any, that it ends for.
        """
        said = json.dumps({"why": why[:500], "because": list(because)})
        self._post("left", said)
        self._send_all({f"left/{self.rank}": said})

    def exchanged(self, key: str, value: str) -> list[str]:
        """What each member says under a key, within the timeout: each tells the others before it goes on, or ends."""
        self._has_not_left()
        self._post(f"{key}/{self.rank}", value)
        self._send_all({f"{key}/{self.rank}": value})
        deadline = time.monotonic() + self.timeout
        return [self._received(index, f"{key}/{index}", deadline) for index in range(len(self.ranks))]

    def _received(self, index: int, key: str, deadline: float) -> str:
        gone = ""
        while (said := self._said(key)) is None and not gone and time.monotonic() < deadline:
            try:
                self._ask(index, "step")
            except Unreachable as error:  # its word may have come before it went
                gone = str(error)
            time.sleep(0.02)
        return said or self._said(key) or gone or "no word"

    def blame(self, step: int, collective: str, error: BaseException) -> RankFailedError:
        """The error to raise when a collective failed: name the members that failed, or fell behind, or went silent."""
        return self.blamed(f"a collective failed in step {step}: {collective or 'unknown'}", error, step)

    def blamed(self, what: str, error: BaseException | str, step: int | None = None) -> RankFailedError:
        """The error to raise when something that members do together failed, at a step if they were in one."""
        guilty = suspects({self.ranks[index]: sign for index, sign in self._signs(step).items()})
        self.leave(f"{what} ({named(guilty)})", list(guilty))
        return failure(what, guilty, error, self.timeout)

    def guard(self, what: str, function: Callable[[], T]) -> T:
        """Call something of torch's that all members take part in, and that may wait for its store for good."""
        if self.alone:
            return function()
        try:
            return within(self.timeout * 1.3, what, function)
        except (RuntimeError, OSError) as error:
            raise self.blamed(f"{what} failed", error) from error

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Do something in which all members take part, and that fails when one does not: say then who that was."""
        self.note("doing", f"about to {what}")
        try:
            yield
        except Exception as error:
            if isinstance(error, RankFailedError):
                raise
            # A named error is about this rank's own model or state.
            own = isinstance(error, CrossfadeError) and type(error) is not CrossfadeError
            if own or (not is_of_backend(error) and not self._others_failed()):
                self.leave(f"{type(error).__name__}: {error}")
                raise
            raise self.blamed(f"could not {what}", error) from error
        self.note("doing", "")

    def _others_failed(self) -> bool:
        """Whether another member has ended, does not answer, or has said that it failed."""
        return any(weight > 2 for _, weight in self._signs(None).values())

    def close(self) -> None:
        """Drop what this member has said; it is asked no more."""
        if self.box is not None:
            self.box.forget(self.scope)
            self.box = None
            mailbox.SHARED.release()

    def _signs(self, step: int | None) -> dict[int, tuple[str, int]]:
        """What there is to say of each other member, and how much it weighs against it."""
        if self.alone:
            return {}
        keys = [f"{self.scope}/{key}" for key in ("step", "doing", "left")]
        patience = self._patience
        answers = mailbox.ask_all(self.cards, lambda card: mailbox.ask(card, keys, patience=patience))
        if any(isinstance(answer, Unreachable) for answer in answers.values()):
            time.sleep(_READS_SECONDS)
        told = {index: self._said(f"left/{index}") for index in answers}
        return {index: sign_of(answer, told[index], step) for index, answer in answers.items()}

    @property
    def _patience(self) -> float:
        return min(5.0, max(0.5, self.timeout / 3))

    def _next_meeting(self) -> str:
        self.meetings += 1
        self._has_not_left()
        if self.box is not None:  # all have heard the word of the meeting before the last
            self.box.forget(f"{self.scope}/meeting/{self.meetings - 2}")
        return f"meeting/{self.meetings}"

    def _has_not_left(self) -> None:
        """Take back that it ends: whoever called it has gone on in spite of an error."""
        if self.box is not None:
            self.box.drop(f"{self.scope}/left")

    def _said(self, key: str) -> str | None:
        return self.box.get(f"{self.scope}/{key}") if self.box is not None else None

    def _post(self, key: str, value: str) -> None:
        if self.box is not None:
            self.box.put(f"{self.scope}/{key}", value)

    def _judge(
        self, meeting: str, fingerprint: str, text: str, offers: list[str], to: str, at: int | None, what: str
    ) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout
        for index, rank in enumerate(self.ranks):
            if index == self.rank:
                continue
            said = self._statement(meeting, index, deadline, to, at)
            if "failed" in said:
                return {"kind": "failed", "found": f"rank {rank}{said['failed']}"}
            if said["fingerprint"] != fingerprint:
                theirs = self._ask(index, f"{meeting}/text")[0] or ""
                return {"kind": "differs", "found": first_difference(text, theirs, self.ranks[0], rank, what)}
            offers = [offer for offer in offers if offer in said["offers"]]
        return {"kind": "agreed", "offers": offers}

    def _statement(self, meeting: str, index: int, deadline: float, to: str, at: int | None) -> dict[str, Any]:
        """What a member brings to a meeting; or `failed`, and why it brings nothing."""
        raw, where = self._wait_for(index, f"{meeting}/member/{index}", deadline - time.monotonic(), at)
        if raw is None:
            return {"failed": f" did not come to {to} within {self.timeout:g} s{where}"}
        said: dict[str, Any] = json.loads(raw)
        return {"failed": f": {said['failed']}"} if "failed" in said else said

    def _wait_for(self, index: int, key: str, wait: float, at: int | None = None) -> tuple[str | None, str]:
        """What a member sends under a key, once it does; and where it is if it does not in time, or if it has been
        called more often than `at` times by then, since it will not come back for this."""
        assert self.box is not None
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            with CAPTURING.handed_over():
                sent = self.box.wait(f"{self.scope}/{key}", min(left, _LOOK_SECONDS))
            if sent is not None:
                return sent, ""
            where, will_come = self._whereabouts(index, at, last=left <= _LOOK_SECONDS)
            if left <= _LOOK_SECONDS or not will_come:
                return self.box.wait(f"{self.scope}/{key}", _READS_SECONDS), where

    def _whereabouts(self, index: int, at: int | None, last: bool) -> tuple[str, bool]:
        """What a member that is waited for is about, in words; and whether it may still send something."""
        try:
            calls, step, doing, left = self._ask(
                index, "calls", "step", "doing", "left", patience=None if last else 1.0
            )
        except Unreachable as error:
            letter = self.box.wait(f"{self.scope}/left/{index}", _READS_SECONDS) if self.box is not None else None
            said = str(error) if letter is None else sign_of_leaving(letter)[0]
            return f": it {said}", isinstance(error, mailbox.Silent)
        if left is not None:
            return f": it {sign_of_leaving(left)[0]}", False
        went_on = at is not None and calls is not None and int(calls) > at
        return f": it {'went on to' if went_on else 'is in'} step {step}{and_now(doing)}" if step else "", not went_on

    def _heard(self, word: Mapping[str, Any], to: str, expected: str, remedy: str) -> list[str]:
        if word["kind"] == "differs" and expected:
            raise RankMismatchError(word["found"], expected=expected, remedy=remedy)
        if word["kind"] == "differs":
            raise self._mismatch(word["found"], to)
        if word["kind"] == "failed":
            raise self._failed(word["found"])
        return list(word["offers"])

    def _mismatch(self, found: str, to: str) -> RankMismatchError:
        if to == "compare programs":
            expected, remedy = "the same program", "build the same model, optimizer and batch shapes on every rank"
        else:
            expected, remedy = f"the same arguments to {to}", "pass the same on every rank"
        return RankMismatchError(found, expected=f"{expected} on every rank", remedy=remedy)

    def _first_members(self, key: str, wait: float, to: str, at: int | None = None) -> str:
        """What the first member sends, once it does."""
        raw, where = self._wait_for(0, key, wait, at)
        if raw is None:
            raise self._failed(f"no word from rank {self.ranks[0]} within {wait:g} s to {to}{where}")
        return raw

    def _failed(self, found: str) -> RankFailedError:
        return RankFailedError(found, remedy="see that rank's own error first, then restart all ranks")

    def _ask(self, index: int, *keys: str, patience: float | None = None) -> list[str | None]:
        """What a member says under some keys."""
        asked = [f"{self.scope}/{key}" for key in keys]
        return mailbox.ask(self.cards[index], asked, patience=self._patience if patience is None else patience)

    def _send(self, index: int, letters: Mapping[str, str]) -> None:
        """Put letters into a member's box; if that has ended, whoever waits for an answer will see."""
        addressed = {f"{self.scope}/{key}": value for key, value in letters.items()}
        with contextlib.suppress(Unreachable):
            mailbox.tell(self.cards[index], addressed, patience=_CONFIRMS_SECONDS)

    def _send_all(self, letters: Mapping[str, str]) -> None:
        """Put letters into the boxes of all that can be reached."""
        addressed = {f"{self.scope}/{key}": value for key, value in letters.items()}
        mailbox.ask_all(self.cards, lambda card: mailbox.tell(card, addressed, patience=_CONFIRMS_SECONDS))


_PARTS = "\x1e"
"""Between the parts of what ranks compare, and that no text has inside."""


def account(causes: Sequence[str], schedules: Sequence[Sequence[Launch]], rest: str) -> str:
    """What ranks compare to say how they differ: lines that explain the rest, what they communicate, the rest."""
    return _PARTS.join(["\n".join(causes), json.dumps([as_json(launches) for launches in schedules]), rest])


def first_difference(ours: str, theirs: str, our_rank: int, their_rank: int, what: str) -> str:
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
