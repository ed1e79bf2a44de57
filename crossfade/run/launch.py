"""Starting a script on several local ranks, as `torchrun` would, and ending all of them when one fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from crossfade.errors import RankFailedError

_POLL_SECONDS = 0.05
KEEPS_MEMORY = {"MIMALLOC_PURGE_DELAY": "600000"}
"""Variables for processes that train: what a step frees is kept for the next, if that comes within ten minutes.

Where torch allocates by mimalloc (aarch64), memory goes back to the system after 10 ms and is faulted in anew at each
step, 4 KB at a time."""


def launch(script: Sequence[str], *, ranks: int, grace: float = 5.0) -> None:
    """Run `python SCRIPT ARGS...` on `ranks` processes of one world; raise naming the rank that failed first.

    Scripts find their rank in the variables that `torch.distributed.init_process_group` reads. Threads are shared out
    and memory is kept (`KEEPS_MEMORY`), unless the environment says otherwise. When a rank fails the others have
    `grace` seconds to end by themselves, with their own errors, before they are killed.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared["OMP_NUM_THREADS"] = threads
    processes = [_start(script, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    try:
        failed = _first_failure(processes)
        if failed is not None:
            _wait_all(processes, grace)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        raise RankFailedError(
            f"rank {failed} ending with exit code {processes[failed].returncode}",
            remedy="see its error above, correct it and start again",
        )


def _start(script: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *script], env={**KEEPS_MEMORY, **os.environ, **variables})


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank seen to end badly, or None when all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_SECONDS)


def _wait_all(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)


def free_port() -> int:
    """A port of this machine that nobody listens on now.

    >>> free_port() > 0
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
