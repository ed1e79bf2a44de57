"""A mailbox a process: what it has to say to other ranks, which they ask for over a connection of their own.

Torch's key-value store lives in one process, by default rank 0's: when that is paused, every call of the store blocks
for good. Here each process answers for itself, so that asking tells the three apart that matter: one that answers, one
whose process has ended (the connection is refused) and one that is paused (it is accepted, and nothing comes).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

Values = list[str | None]
_LONGEST = 2**28
"""Bytes of a letter at most."""


class Unreachable(Exception):
    """A mailbox could not be asked; the text says what that means for its process."""


class Silent(Unreachable):
    """A connection was accepted, and nothing came."""


@dataclass(frozen=True)
class Card:
    """Where a process can be asked, and the word without which it does not answer."""

    hosts: tuple[str, ...]
    port: int
    word: str

    def text(self) -> str:
        """As it goes through a store.

        >>> Card.of(Card(("a",), 1, "x").text())
        Card(hosts=('a',), port=1, word='x')
        """
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Card:
        """The card of which this is the text."""
        given = json.loads(text)
        return cls(tuple(given["hosts"]), given["port"], given["word"])


class Mailbox:
    """What this process says, by key, and a thread that answers whoever asks for it.

    Keys begin with a scope, of those that it takes letters for.

        >>> box = Mailbox("localhost")
        >>> box.accept("us")
        >>> box.put("us/step", "3")
        >>> ask(box.card, ["us/step", "us/other"], patience=5.0)
        ['3', None]
        >>> tell(box.card, {"us/news": "from afar", "them/news": "for others"}, patience=5.0)
        >>> box.wait("us/news", 5.0), box.wait("them/news", 0.0)
        ('from afar', None)
        >>> box.close()
        >>> ask(box.card, ["us/step"], patience=5.0)
        Traceback (most recent call last):
        crossfade.ranks.mailbox.Unreachable: has ended, or has dropped the step
    """

    def __init__(self, near: str) -> None:
        """`near` is a host that others are reached by as well, such as the store's."""
        self._values: dict[str, str] = {}
        self._scopes: set[str] = set()
        self._news = threading.Condition()
        self._listening = _listening_socket()
        port = int(self._listening.getsockname()[1])
        self.card = Card(_own_addresses(near), port, secrets.token_hex(16))
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="crossfade mailbox", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    def accept(self, scope: str) -> None:
        """Take letters from others for this scope from now on."""
        self._scopes.add(scope)

    def put(self, key: str, value: str) -> None:
        """Say something, to whoever asks, or keep what another has sent."""
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def get(self, key: str) -> str | None:
        """What is here under a key."""
        return self._values.get(key)

    def wait(self, key: str, seconds: float) -> str | None:
        """What is here under a key within some seconds."""
        with self._news:
            self._news.wait_for(lambda: key in self._values, max(seconds, 0.0))
        return self.get(key)

    def drop(self, key: str) -> None:
        """Say this no more."""
        self._values.pop(key, None)

    def forget(self, prefix: str) -> None:
        """Drop all keys that begin so; if it is a scope, take no more letters for it."""
        self._scopes.discard(prefix)
        for key in [key for key in list(self._values) if key.startswith(f"{prefix}/")]:
            self._values.pop(key, None)

    def close(self) -> None:
        """Answer no more; the thread and the port are given back."""
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, sock=self._listening, limit=_LONGEST))
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        server.close()
        waiting = asyncio.all_tasks(self._loop)
        for task in waiting:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError, asyncio.CancelledError
        ):
            line = await asyncio.wait_for(reader.readline(), 30.0)
            request = json.loads(line)
            if secrets.compare_digest(str(request["word"]), self.card.word):
                writer.write(json.dumps(self._answer_to(request)).encode() + b"\n")
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    def _answer_to(self, request: Mapping[str, Any]) -> Values:
        for key, value in request.get("told", {}).items():
            if any(key.startswith(f"{scope}/") for scope in list(self._scopes)):
                self.put(str(key), str(value))
        return [self.get(str(key)) for key in request.get("keys", ())]


def ask(card: Card, keys: Sequence[str], *, patience: float) -> Values:
    """What a process says under some keys now; it may take `patience` seconds before it counts as paused."""
    return _exchange(card, {"keys": list(keys)}, patience)


def tell(card: Card, letters: Mapping[str, str], *, patience: float) -> None:
    """Put something into another process's box. One that is paused reads it when it goes on."""
    with contextlib.suppress(Silent):
        _exchange(card, {"told": dict(letters)}, patience)


def ask_all(cards: Mapping[int, Card], question: Callable[[Card], Any]) -> dict[int, Any]:
    """The answers of several processes, asked at the same time; an `Unreachable` in the place of those without."""

    def answer(card: Card) -> Any:
        try:
            return question(card)
        except Unreachable as error:
            return error

    with ThreadPoolExecutor(max_workers=min(64, max(1, len(cards)))) as pool:
        return dict(zip(cards, pool.map(answer, cards.values()), strict=True))


class _Shared:
    """The one mailbox of this process, open while anybody holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._box: Mailbox | None = None
        self._holders = 0

    def hold(self, near: str) -> Mailbox:
        """The mailbox; `release` it once."""
        with self._lock:
            self._box = self._box or Mailbox(near)
            self._holders += 1
            return self._box

    def release(self) -> None:
        """Close the mailbox with its last holder."""
        with self._lock:
            self._holders -= 1
            if not self._holders and self._box is not None:
                self._box.close()
                self._box = None


SHARED = _Shared()


def _exchange(card: Card, request: Mapping[str, Any], seconds: float) -> Values:
    deadline = time.monotonic() + seconds
    silent, ended = Silent(f"does not answer within {seconds:.1f} s: it is paused, or cut off"), None
    for host in card.hosts:
        try:
            with socket.create_connection((host, card.port), timeout=seconds / len(card.hosts)) as connection:
                return _exchange_over(connection, {"word": card.word, **request}, deadline)
        except ConnectionError:
            ended = Unreachable("has ended, or has dropped the step")
        except TimeoutError:
            raise silent from None
        except (OSError, ValueError):  # no way to this address, or something else there
            continue
    raise ended or silent


def _exchange_over(connection: socket.socket, request: Mapping[str, Any], deadline: float) -> Values:
    connection.sendall(json.dumps(request).encode() + b"\n")
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.02, deadline - time.monotonic()))
        piece = connection.recv(2**16)
        if not piece:
            raise ConnectionResetError("closed without an answer")
        received += piece
    answer: Values = json.loads(received)
    return answer


def _listening_socket() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _own_addresses(near: str) -> tuple[str, ...]:
    """Addresses that others may reach this host by, the likeliest first; loopback, for those on this host, last."""
    found = [*_addresses_towards(near)]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    far = [address for address in found if not address.startswith(("127.", "::1", "::ffff:127."))]
    return tuple(dict.fromkeys([*far, "127.0.0.1"]))


def _addresses_towards(host: str) -> list[str]:
    """This host's address on the way to another; asking for the way sends nothing."""
    found = []
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]))
    return found
