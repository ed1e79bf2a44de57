"""One disturbed training run: start it, disturb it, let it go on from its checkpoint, and judge what it left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from crossfade.errors import RankFailedError
from crossfade.ranks.launch import end_with_parent, free_port, launch, supervise
from tests.soak.job import MODES, STEPS, Job, train

KINDS = ("kill", "pause", "short pause", "long pause", "raise")
STARTERS = ("launch", "torchrun")
PLACES = ("open", "capture", *(f"step {number}" for number in range(STEPS)), "save 2", "save 4", "save 6", "save 8")
_DOING = r"collective failed|checkpoint|compare programs|compile a step|open process groups|opening|gather the model"


@dataclass(frozen=True)
class Event:
    """What happens to whom, when, and who started the ranks."""

    mode: str
    kind: str
    starter: str
    rank: int
    place: str
    delay: float

    @classmethod
    def drawn(cls, number: int, seed: int, by_torchrun: float) -> Event:
        """The event of that number: every mode with every kind in turn, the rest by chance."""
        draw = random.Random(f"{seed} {number}")
        mode, kind = MODES[number % len(MODES)], KINDS[number % len(KINDS)]
        starter = "torchrun" if draw.random() < by_torchrun else "launch"
        rank = draw.randrange(Job(mode, "", 0.0).ranks)
        return cls(mode, kind, starter, rank, draw.choice(PLACES), draw.choice((0.0, draw.uniform(0.0, 0.1))))

    def __str__(self) -> str:
        return (
            f"{self.kind} of rank {self.rank} at {self.place} +{self.delay * 1e3:.0f} ms, {self.mode}, {self.starter}"
        )


@dataclass(frozen=True)
class Result:
    """How one event ended: `outcome` in a word or two, `problems` for whatever should not be."""

    event: Event
    outcome: str
    problems: tuple[str, ...]
    seconds: float
    """Until the last survivor had ended; 0 where nobody was to end."""


class Forked:
    """A rank as a copy of this process, which has imported everything: as `subprocess.Popen` to `supervise`."""

    def __init__(self, job: Job, variables: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(job, variables)

    def _run(self, job: Job, variables: dict[str, str]) -> None:
        code = 1
        try:
            end_with_parent()
            os.environ.update(variables)
            log = os.open(Path(job.folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            train(job)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def disturbed(event: Event, folder: Path, timeout: float, expected: list[list[float]], *, commands: bool) -> Result:
    """Let an event happen to a run, and judge it; `commands` starts ranks by the command line, not as copies."""
    raises = f"{event.rank} {event.place}" if event.kind == "raise" else ""
    job = Job(event.mode, str(folder), timeout, raises=raises)
    hand = threading.Thread(target=_disturb, args=(event, job), daemon=True)
    hand.start()
    run = _under_torchrun if event.starter == "torchrun" else _launched_by_command if commands else _launched
    try:
        run(job)
    except subprocess.TimeoutExpired as error:
        return Result(event, "hung", (f"torchrun had not ended after {error.timeout:.0f} s",), error.timeout)
    hand.join(4 * timeout)
    if event.starter == "launch" and not _ends(job, 1 if job.attempt else 0, "done"):
        run(replace(job, attempt=1, raises=""))
    return _judged(event, job, expected)


def _launched(job: Job) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.ranks)}

    def start(rank: int) -> Forked:
        return Forked(job, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    _tolerating(lambda: supervise(start, job.ranks, grace=2 * job.timeout))


def _launched_by_command(job: Job) -> None:
    _tolerating(lambda: launch(["-m", "tests.soak.job", job.text()], ranks=job.ranks, grace=2 * job.timeout))


def _tolerating(run: Callable[[], None]) -> None:
    try:
        run()
    except RankFailedError:
        return  # what became of the ranks is judged by what they left


def _under_torchrun(job: Job) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
    command += ["--max-restarts=1", "--monitor-interval=0.2", "-m", "tests.soak.job", job.text()]
    # torch 2.13 lets all attempts share one store, in which gloo then finds the addresses of the ranks that have died.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Path(job.folder, "log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            process.wait(120 + 10 * job.timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _disturb(event: Event, job: Job) -> None:
    """Wait until the rank is where it is to be, and do it."""
    deadline = time.monotonic() + 120 + 4 * job.timeout
    # All must be there: torch waits half an hour for a rank that ends while others are in init_process_group.
    while not (
        event.place in _trail(job, event.rank) and all("open" in _trail(job, rank) for rank in range(job.ranks))
    ):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    if event.kind == "raise":
        return
    time.sleep(event.delay)
    pid = int(_trail(job, event.rank)[0].split()[1])
    Path(job.folder, "event").write_text(str(time.time()))
    _signal(pid, signal.SIGKILL if event.kind == "kill" else signal.SIGSTOP)
    if event.kind in ("short pause", "long pause"):
        time.sleep(job.timeout * (0.2 if event.kind == "short pause" else 1.8))
        _signal(pid, signal.SIGCONT)
    elif event.kind == "pause" and _nobody_needs(event.rank, job, deadline):
        _signal(pid, signal.SIGCONT)


def _nobody_needs(paused: int, job: Job, deadline: float) -> bool:
    """Whether the others end well without a rank, once they have ended: torchrun would wait for it for ever."""
    ended: dict[int, dict] = {}
    while len(ended) < job.ranks - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        ended = {rank: end for rank, end in _ends(job, 0).items() if rank != paused}
        if any(end["kind"] != "done" for end in ended.values()):
            return False
    return len(ended) == job.ranks - 1


def _trail(job: Job, rank: int) -> list[str]:
    """Where a rank of the first attempt has been."""
    path = Path(job.folder, f"trail.0.{rank}")
    return path.read_text().splitlines() if path.exists() else []


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended, as is seen later


def _ends(job: Job, attempt: int, kind: str = "") -> dict[int, dict]:
    """How the ranks of an attempt have ended, as far as they could say; of one kind only, if that is all of them."""
    paths = {rank: Path(job.folder, f"end.{attempt}.{rank}") for rank in range(job.ranks)}
    found = {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}
    if kind and (len(found) < job.ranks or any(end["kind"] != kind for end in found.values())):
        return {}
    return found


def _judged(event: Event, job: Job, expected: list[list[float]]) -> Result:
    problems = [*_orphans(job)]
    first, second = _ends(job, 0), _ends(job, 1, "done")
    moment = Path(job.folder, "event")
    happened = float(moment.read_text()) if moment.exists() else None
    seconds, outcome = 0.0, "went on"
    if _ends(job, 0, "done"):
        last = first
        outcome = "went on" if event.kind == "short pause" else "came too late"
    else:
        last, outcome = second, "restarted"
        found, seconds = _survivors(event, job, first, happened)
        problems += found
        problems += [] if second else ["the second attempt did not end"]
    if last and not all(
        end["parameters"] == [pytest.approx(values, rel=1e-4, abs=1e-6) for values in expected] for end in last.values()
    ):
        problems.append("other numbers than single-device training")
    if event.kind == "short pause" and outcome == "restarted":
        said = "; ".join(f"rank {rank}: {end.get('text', '')[:400]}" for rank, end in first.items())
        problems.append(f"a pause shorter than the timeout ended the run: {said}")
    return Result(event, outcome, tuple(problems), seconds)


def _survivors(event: Event, job: Job, ends: dict[int, dict], happened: float | None) -> tuple[list[str], float]:
    """What is wrong with how the others ended, and how long the last took."""
    problems, seconds = [], 0.0
    for rank in [rank for rank in range(job.ranks) if rank != event.rank]:
        end = ends.get(rank)
        if end is None:
            if event.starter == "launch":  # torchrun ends all ranks as soon as one has ended
                problems.append(f"rank {rank} said nothing after {_trail(job, rank)[-1]}")
            continue
        seconds = max(seconds, end["time"] - (happened or end["time"]))
        if not end.get("ours"):
            problems.append(f"rank {rank} ended with {end['kind']}: {end.get('text', '')[:200]}")
        elif not re.search(rf"rank {event.rank}\b", end["text"]) or not re.search(_DOING, end["text"]):
            problems.append(f"rank {rank} names neither rank {event.rank} nor what failed: {end['text'][:400]}")
    if event.rank in ends and ends[event.rank]["kind"] != "ValueError" and not ends[event.rank].get("ours", True):
        problems.append(f"rank {event.rank} ended with {ends[event.rank]['kind']}: {ends[event.rank]['text'][:200]}")
    if seconds > 2 * job.timeout:
        problems.append(f"the last survivor ended after {seconds:.1f} s, with a timeout of {job.timeout:g} s")
    return problems, seconds


def _orphans(job: Job) -> list[str]:
    """Ranks that still live."""
    pids = [int(path.read_text().split()[1]) for path in Path(job.folder).glob("trail.*")]
    return [f"process {pid} left behind" for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
