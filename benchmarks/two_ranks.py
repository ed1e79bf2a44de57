"""Where a benchmark's two ranks run: on loopback, or on two hosts with a rate-limited link between them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import network
from crossfade import Ranks

Finish = Callable[[Any, argparse.Namespace], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark on two ranks takes beside its own options."""
    parser.add_argument("--network", default="loopback", help="loopback, or a rate such as 1gbit")
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def run(
    module: str, work: Callable[..., Any], given: Mapping[str, Any], finish: Finish, options: argparse.Namespace
) -> None:
    """Call `work` on both ranks with the options `given`, and `finish` once with what rank 0 found."""
    if options.worker:
        _under_torchrun(work, given, finish, options)
    elif options.network == "loopback":
        with Ranks(2, timeout=900) as ranks:
            finish(ranks.run(work, *given.values())[0], options)
    elif (reason := network.reason_against()) is not None:
        raise SystemExit(f"found --network {options.network}, but {reason}. Remedy: run as root, or leave it out.")
    else:
        arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        arguments += ["--network", options.network, *(["--save"] if options.save else [])]
        with network.two_hosts(options.network) as hosts:
            hosts.torchrun(module, "--worker", *arguments)


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds that a call takes on this rank, once every rank is about to make it."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def slowest(seconds: float) -> float:
    """What the slowest rank took."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _under_torchrun(
    work: Callable[..., Any], given: Mapping[str, Any], finish: Finish, options: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = work(*given.values())
    if dist.get_rank() == 0:
        finish(figures, options)
    dist.barrier()
    dist.destroy_process_group()
