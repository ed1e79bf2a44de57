"""Starting a script on several local ranks, as `torchrun` would, and ending all of them when one fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from crossfade.errors import MeshError, RankFailedError

_POLL_SECONDS = 0.05
KEEPS_MEMORY = {"MIMALLOC_PURGE_DELAY": "600000"}
"""Variables for processes that train: what a step frees is kept for the next, if that comes within ten minutes.

Where torch allocates by mimalloc (aarch64), memory goes back to the system after 10 ms and is faulted in again at each
step, 4 KB at a time."""


def launch(script: Sequence[str], *, ranks: int, grace: float = 10.0) -> None:
    """Run `python SCRIPT ARGS...` on `ranks` processes of one world; raise naming the rank that failed first.

    Scripts find their rank in the variables that `torch.distributed.init_process_group` reads. Threads are shared out
    and memory is kept (`KEEPS_MEMORY`), unless the environment says otherwise. When a rank fails the others have
    `grace` seconds to end by themselves, with their own errors, before they are killed.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared["OMP_NUM_THREADS"] = threads
    with _ended_by_signals():
        supervise(lambda rank: _start(script, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}), ranks, grace)


class Process(Protocol):
    """What is asked of a rank's process; as of `subprocess.Popen`."""

    returncode: Any

    def poll(self) -> int | None:
        """The exit code, if it has ended."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> int:
        """The exit code, once it has ended."""


def supervise(start: Callable[[int], Process], ranks: int, grace: float) -> None:
    """Start a process for each rank and see them end; none is left behind, whatever happens here."""
    processes: list[Process] = []
    try:
        for rank in range(ranks):
            processes.append(start(rank))
        failed = _first_failure(processes)
        if failed is not None:
            _wait_all(processes, grace)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        raise RankFailedError(
            f"rank {failed} ended with exit code {processes[failed].returncode}",
            remedy="see its error above, fix it and start again",
        )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an interrupt does, so that it can end its ranks first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _start(script: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {**KEEPS_MEMORY, **os.environ, **variables}
    return subprocess.Popen([sys.executable, *script], env=environment, preexec_fn=end_with_parent)


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent is gone, even if that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _first_failure(processes: Sequence[Process]) -> int | None:
    """The first rank seen to end badly, or None when all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_SECONDS)


def _wait_all(processes: Sequence[Process], grace: float) -> None:
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)


_PORTS = range(15_000, 32_000)
"""Below those that systems give to connections: what is free here is not taken by one before it is used."""


def free_port() -> int:
    """A port that nobody listens on.

    >>> free_port() in _PORTS
    True
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise MeshError("no free port among 100 tried", remedy="set MASTER_PORT and start the ranks with torchrun")
