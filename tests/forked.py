"""Scripts on ranks that are forked from one process which has imported torch: each rank's own import takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

from crossfade.ranks.launch import free_port
from crossfade.ranks.local import PRELOADED

_SERVER = multiprocessing.get_context("forkserver")


def run_script(path: Path, ranks: int, output: Path, timeout: float) -> list[int | None]:
    """Exit codes of a script on so many ranks of one world; None of those killed, at the timeout or since one failed.

    What the ranks print goes to files in the folder `output`, by number.
    """
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    _SERVER.set_forkserver_preload(PRELOADED)
    processes = []
    for rank in range(ranks):
        variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(_SERVER.Process(target=_be_rank, args=(path, variables, output / str(rank)), daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
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
