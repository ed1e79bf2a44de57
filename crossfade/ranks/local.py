"""Local rank processes: started once, given functions to run, ended together. Nobody is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist

from crossfade.errors import CrossfadeError, RankFailedError
from crossfade.tracebacks import formatted, users_frames

PRELOADED = ["crossfade", "torch._dynamo"]
"""What a fork server imports: torch's tracing brings in the compiler's front end."""
_GRACE_SECONDS = 3.0
"""How long the other ranks may take to say what they saw, after one failed, before they are ended."""


class Ranks:
    """`count` processes of one gloo world on this machine, kept for many calls.

    `run(function, *args)` calls `function(*args)` on every rank and returns the results in rank order. If a rank
    raises, dies, or exceeds `timeout` seconds, all are ended and `RankFailedError` names it. `threads` is the number of
    torch threads of each rank. `start` is how processes start: `"spawn"`, each afresh, or `"forkserver"`, as copies of
    one process that has imported Crossfade, which saves every rank the seconds that takes. Copies hash alike, print to
    where that process prints, and know of variables that are read at import what it knew; it ends with its last rank.

        >>> with Ranks(2) as ranks:
        ...     ranks.run(os.path.join, "a", "b")
        ['a/b', 'a/b']
    """

    def __init__(
        self,
        count: int,
        *,
        threads: int = 1,
        timeout: float = 120.0,
        backend: str = "gloo",
        start: Literal["spawn", "forkserver"] = "spawn",
    ) -> None:
        possible = [method for method in multiprocessing.get_all_start_methods() if method != "fork"]
        if start not in possible:
            raise RankFailedError(
                f"start={start!r}", expected=f"one of {', '.join(possible)} on this system", remedy="pass one of them"
            )
        self.count, self.threads, self.timeout, self.backend, self.start = count, threads, timeout, backend, start
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @users_frames
    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a function, given by module and name, on every rank; see the class."""
        self._start()
        limit = timeout or self.timeout
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            return self._collect(time.monotonic() + limit, limit)
        except BaseException:  # an interrupt too: answers still on their way must not be taken for the next call's
            self._end(0.0)
            raise

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self._end(_GRACE_SECONDS)

    def _start(self) -> None:
        if self._processes:
            return
        context: Any = multiprocessing.get_context(self.start)
        if self.start == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        # The store lives here, not on a rank: it must answer when any of them has died.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.count), "LOCAL_RANK": str(rank)}
            arguments = (rank, self.count, self.threads, self.backend, self._store.port, variables, theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float, limit: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.count:
            waiting = {self._pipes[rank]: rank for rank in range(self.count) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._give_up(f"rank {min(waiting.values())} is still running after {limit:g} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                results[rank] = self._receive(pipe, rank, results)  # type: ignore[arg-type]
        return [results[rank] for rank in range(self.count)]

    def _receive(self, pipe: Connection, rank: int, results: dict[int, Any]) -> Any:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE_SECONDS)
            code = self._processes[rank].exitcode
            others = self._errors_of_others(rank, results)
            raise self._give_up(f"rank {rank} died (exit code {code}){others}") from None
        if kind == "returned":
            return value
        error, trace = value
        others = self._errors_of_others(rank, results)
        self._end(_GRACE_SECONDS)
        if isinstance(error, CrossfadeError):
            error.add_note(f"raised on rank {rank}{others}\nOn rank {rank}:\n{trace.rstrip()}")
            raise error
        raise RankFailedError(
            f"{error} on rank {rank}{others}\nOn rank {rank}:\n{trace.rstrip()}\n", remedy="fix that, then start again"
        )

    def _errors_of_others(self, first: int, results: dict[int, Any]) -> str:
        """One line for each other rank that raises soon after: the first to be read is not always the culprit."""
        lines = []
        deadline = time.monotonic() + _GRACE_SECONDS
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(EOFError, OSError):
                patience = max(0.0, deadline - time.monotonic())
                if rank != first and rank not in results and pipe.poll(patience):
                    kind, value = pipe.recv()
                    lines += [f"\nrank {rank} also raised: {value[0]}"] if kind == "raised" else []
        return "".join(lines)

    def _give_up(self, found: str) -> RankFailedError:
        self._end(0.0)
        return RankFailedError(found, expected="every rank to answer", remedy="see its output above, then start again")

    def _end(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None


def _serve(
    rank: int, count: int, threads: int, backend: str, port: int, variables: dict[str, str], pipe: Connection
) -> None:
    """The life of one rank process: meet the others, then run what is sent until told to stop."""
    os.environ.clear()  # of a fork server's, as they were when it started
    os.environ.update(variables)
    torch.seed()  # copies of one process would draw alike
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    for function, args in _requests(pipe):
        try:
            pipe.send(("returned", function(*args)))
        except Exception as error:
            kept = error if isinstance(error, CrossfadeError) else f"{type(error).__name__}: {error}"
            pipe.send(("raised", (kept, formatted(error))))
    os._exit(0)  # no farewell: destroying a group waits for peers that may be gone


def _requests(pipe: Connection) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        if request is None:
            return
        yield request
