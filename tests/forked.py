"""Scripts on ranks that are forked from one process which has imported torch: each rank's own import takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["crossfade", "torch._dynamo"])  # as the pool of ranks has it, whose server this is


def run_script(path: Path, ranks: int, output: Path, timeout: float) -> list[int | None]:
    """The exit codes of a script on so many ranks of one world, None of one that had to be killed at the timeout.

    What the ranks print goes to files in the folder `output`, by number.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        _SERVER.Process(target=_be_rank, args=(path, {**world, "RANK": str(rank)}, output / str(rank)), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _be_rank(path: Path, variables: dict[str, str], output: Path) -> None:
    os.environ.update(variables)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
