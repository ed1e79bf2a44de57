"""Mailboxes: who answers, who has ended and who is paused are told apart, and letters reach only open scopes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from crossfade.ranks import mailbox
from crossfade.ranks.mailbox import Mailbox, Silent, Unreachable, ask, ask_all, tell


@pytest.fixture
def box() -> Iterator[Mailbox]:
    made = Mailbox("localhost")
    made.accept("us")
    yield made
    made.close()


def test_a_process_that_has_ended_is_not_silent(box: Mailbox) -> None:
    box.close()
    with pytest.raises(Unreachable, match="has ended, or has dropped the step") as caught:
        ask(box.card, ["us/a"], patience=2.0)
    assert not isinstance(caught.value, Silent)
    with pytest.raises(Unreachable, match="has ended"):
        tell(box.card, {"us/a": "1"}, patience=2.0)


def test_a_process_that_is_paused_is_silent_and_may_be_sent_letters() -> None:
    with socket.create_server(("127.0.0.1", 0)) as paused:  # accepts, as the kernel does, and never answers
        card = mailbox.Card(("127.0.0.1",), paused.getsockname()[1], "word")
        with pytest.raises(Silent, match=r"does not answer within 0.2 s: it is paused, or cut off"):
            ask(card, ["us/a"], patience=0.2)
        tell(card, {"us/a": "1"}, patience=0.2)


def test_without_the_word_nothing_is_answered_or_kept(box: Mailbox) -> None:
    stranger = replace(box.card, word="guess")
    with pytest.raises(Unreachable):
        ask(stranger, ["us/a"], patience=1.0)
    with pytest.raises(Unreachable):
        tell(stranger, {"us/a": "1"}, patience=1.0)
    assert box.get("us/a") is None


def test_the_next_address_is_tried_where_something_else_listens(box: Mailbox) -> None:
    box.put("us/a", "1")
    card = replace(box.card, hosts=("no.such.host.invalid", "127.0.0.1"))
    assert ask(card, ["us/a"], patience=5.0) == ["1"]


def test_letters_are_kept_for_open_scopes_until_these_are_forgotten(box: Mailbox) -> None:
    letters = {"us/a": "1", "using/a": "2"}
    tell(box.card, letters, patience=5.0)
    assert (box.get("us/a"), box.get("using/a")) == ("1", None)
    box.put("using/b", "3")
    box.forget("us")
    tell(box.card, letters, patience=5.0)
    assert (box.get("us/a"), box.get("using/b")) == (None, "3")


def test_waiting_ends_with_the_letter_or_with_the_time(box: Mailbox) -> None:
    threading.Timer(0.05, lambda: tell(box.card, {"us/a": "1"}, patience=5.0)).start()
    assert box.wait("us/a", 5.0) == "1"
    assert box.wait("us/b", -1.0) is None


def test_all_are_asked_and_those_without_an_answer_say_why(box: Mailbox) -> None:
    gone = Mailbox("localhost")
    gone.close()
    box.put("us/a", "1")
    answers = ask_all({7: box.card, 2: gone.card}, lambda card: ask(card, ["us/a"], patience=2.0))
    assert list(answers) == [7, 2] and answers[7] == ["1"] and isinstance(answers[2], Unreachable)
    assert ask_all({}, lambda card: None) == {}


def test_the_shared_box_closes_with_its_last_holder() -> None:
    shared = mailbox._Shared()
    first, second = shared.hold("localhost"), shared.hold("localhost")
    assert first is second
    shared.release()
    assert ask(first.card, ["us/a"], patience=5.0) == [None]
    shared.release()
    with pytest.raises(Unreachable):
        ask(first.card, ["us/a"], patience=1.0)
    again = shared.hold("localhost")
    assert again is not first
    shared.release()
