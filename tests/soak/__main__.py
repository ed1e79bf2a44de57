"""Kill, pause and delay ranks at random: `python -m tests.soak --count 200`. Ends with a table; exit 1 if it is bad.

The timeout is chosen by what an undisturbed run takes on this machine at the moment.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.soak.job import MODES, Job, train_eagerly
from tests.soak.worlds import KINDS, STARTERS, Event, Result, _launched, disturbed


def soak(events: Sequence[Event], *, jobs: int, timeout: float, commands: bool) -> Iterator[Result]:
    """Let events happen, some at a time; each result as it comes."""
    torch.set_num_threads(1)  # before anything is copied: threads are not
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:  # autograd's threads are not copied either
        expected = pool.submit(train_eagerly).result()
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        waiting = [pool.submit(_one, event, timeout, expected, commands) for event in events]
        for done in as_completed(waiting):
            yield done.result()


def _one(event: Event, timeout: float, expected: list[list[float]], commands: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        result = disturbed(event, Path(folder), timeout, expected, commands=commands)
        if result.problems:
            log = Path(folder, "log")
            print(log.read_text()[-6000:] if log.exists() else "no log", file=sys.stderr)
        return result


def calibrated(jobs: int) -> float:
    """A timeout that ranks keep as long as nobody disturbs them: several times what a run of four takes here."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        if not (pid := os.fork()):
            _launched(Job("dp x tp", folder, 300.0))
            os._exit(0)
        os.waitpid(pid, 0)
        return max(4.0, round(0.7 * jobs * (time.monotonic() - start), 1))


def table(results: Sequence[Result]) -> str:
    """Counts by mode, kind and starter, and of outcomes."""
    lines = []
    for title, values, of in (
        ("mode", MODES, lambda event: event.mode),
        ("kind", KINDS, lambda event: event.kind),
        ("started by", STARTERS, lambda event: event.starter),
    ):
        lines.append(
            f"{title:<12} {'events':>7} {'went on':>8} {'restarted':>10} {'too late':>9} {'wrong':>6} {'longest':>8}"
        )
        for value in values:
            own = [result for result in results if of(result.event) == value]
            counts = Counter(result.outcome for result in own)
            wrong, longest = sum(bool(r.problems) for r in own), max((r.seconds for r in own), default=0.0)
            lines.append(
                f"{value:<12} {len(own):>7} {counts['went on']:>8} {counts['restarted']:>10}"
                f" {counts['came too late']:>9} {wrong:>6} {longest:>6.1f} s"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Run as many events as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first event")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="events at a time")
    parser.add_argument("--timeout", type=float, default=0.0, help="of the steps, in seconds; 0 measures one")
    parser.add_argument(
        "--torchrun", type=float, default=0.2, help="share of events under torchrun, which starts slowly"
    )
    parser.add_argument("--commands", action="store_true", help="start every rank by the command line, not as a copy")
    given = parser.parse_args()
    commands = given.commands or torch.backends.cuda.is_built()  # with CUDA, autograd's threads do not survive a copy
    timeout = given.timeout or calibrated(given.jobs)
    print(f"timeout {timeout:g} s", flush=True)
    events = [
        Event.drawn(number, given.seed, given.torchrun) for number in range(given.first, given.first + given.count)
    ]
    results: list[Result] = []
    for result in soak(events, jobs=given.jobs, timeout=timeout, commands=commands):
        results.append(result)
        said = "; ".join(result.problems) or f"{result.outcome}, {result.seconds:.1f} s"
        print(f"{len(results)}/{given.count} {'WRONG ' if result.problems else ''}{result.event}: {said}", flush=True)
    print(table(results))
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
