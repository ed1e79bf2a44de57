"""Time of our passes and of torch's on the same graphs, in one process: nodes, CPU seconds, ratio, growth.

    python -m benchmarks.passes                       # 4, 16 and 64 layers
    python -m benchmarks.passes --layers 4,16         # quicker
    python -m benchmarks.passes --layers 64,256 --save
    python -m benchmarks.passes --only simplified --layers 4,16,64,256

Graphs are those of `benchmarks/graphs.py` and `benchmarks/training_graphs.py`. Each pass runs on a fresh copy; copying
is not timed. Both have run before, on the smallest size at least. Ours is the best of three runs, torch's one run;
torch's is left out where it would take more than `--patience` seconds, as far as its smaller sizes tell. Beside the
seconds, how many nodes are gone.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import fx

from benchmarks import graphs, training_graphs
from benchmarks.figures import save
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.compile.pipeline import simplification
from crossfade.graph.passes import Pass
from crossfade.graph.program import from_graph_module

CAP_MB = 100.0


class Done(NamedTuple):
    """What passes took, and how many nodes they left."""

    seconds: float
    nodes: int


Timed = Callable[[fx.GraphModule], Done]


def _ours(*passes: Pass) -> Timed:
    def run(module: fx.GraphModule) -> Done:
        program = from_graph_module(module, groups={graphs.start_fake_world(): graphs.RANKS})
        start = time.process_time()
        for pass_ in passes:
            pass_.run(program)
        return Done(time.process_time() - start, len(program.graph.nodes))

    return run


def _torch_buckets(*names: str) -> Timed:
    def run(module: fx.GraphModule) -> Done:
        from torch._inductor.fx_passes import bucketing

        module = copy.deepcopy(module)
        start = time.process_time()
        for name in names:
            getattr(bucketing, name)(module, lambda index: CAP_MB)
        return Done(time.process_time() - start, len(module.graph.nodes))

    return run


def _torch_ddp_fusion(module: fx.GraphModule) -> Done:
    from torch._inductor.fx_passes.ddp_fusion import fuse_ddp_communication
    from torch._inductor.virtualized import V

    module = copy.deepcopy(module)
    mode = next(node.meta["val"].fake_mode for node in module.graph.nodes if "val" in node.meta)
    start = time.process_time()
    with V.set_fake_mode(mode):
        fuse_ddp_communication(module.graph, ["fuse_ddp_with_concat_op", "schedule_comm_wait"], int(CAP_MB))
    return Done(time.process_time() - start, len(module.graph.nodes))


def _torch_post_grad(module: fx.GraphModule) -> Done:
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    module = copy.deepcopy(module)
    mode = next(node.meta["val"].fake_mode for node in module.graph.nodes if "val" in node.meta)
    start = time.process_time()
    with V.set_fake_mode(mode):
        post_grad_passes(module, is_inference=False)
    return Done(time.process_time() - start, len(module.graph.nodes))


CONTESTS: dict[str, tuple[Callable[[int], fx.GraphModule], Timed, Timed]] = {
    "ddp: all-reduces": (graphs.ddp, _ours(BucketAllReduces(CAP_MB)), _torch_buckets("bucket_all_reduce")),
    "ddp gradients: all-reduces, waits": (
        graphs.ddp_gradients,
        _ours(BucketAllReduces(CAP_MB), RaiseLaunches(), SinkWaits()),
        _torch_ddp_fusion,
    ),
    "fsdp: all-gathers": (graphs.fsdp, _ours(BucketAllGathers(CAP_MB)), _torch_buckets("bucket_all_gather")),
    "fsdp: reduce-scatters": (
        graphs.fsdp,
        _ours(BucketReduceScatters(CAP_MB)),
        _torch_buckets("bucket_reduce_scatter"),
    ),
    "tp: all three, nothing to do": (
        graphs.tp,
        _ours(BucketAllGathers(CAP_MB), BucketReduceScatters(CAP_MB), BucketAllReduces(CAP_MB)),
        _torch_buckets("bucket_all_gather", "bucket_reduce_scatter", "bucket_all_reduce"),
    ),
    "gpt, simplified": (training_graphs.gpt, _ours(*simplification()), _torch_post_grad),
    "llama, simplified": (training_graphs.llama, _ours(*simplification()), _torch_post_grad),
}


@dataclass
class Timing:
    """One contest at one size."""

    contest: str
    layers: int
    nodes: int
    ours: float
    theirs: float | None
    growth: float | None
    our_nodes: int
    their_nodes: int | None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,16,64", help="sizes to try, smallest first")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds to wait for torch's passes, at most")
    parser.add_argument("--only", default="", help="the contests that have this in their name")
    given = parser.parse_args()
    contests = {name: contest for name, contest in CONTESTS.items() if given.only in name}
    sizes = [int(size) for size in given.layers.split(",")]
    timings: list[Timing] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("passes", total=len(contests) * len(sizes))
        for layers in sizes:
            modules: dict[Callable[[int], fx.GraphModule], fx.GraphModule] = {}
            for contest, (make, ours, theirs) in contests.items():
                progress.update(task, description=f"{contest}, {layers} layers", advance=1)
                if make not in modules:
                    modules = {make: make(layers)}  # one at a time: a graph of 100,000 nodes takes a gigabyte
                earlier = [timing for timing in timings if timing.contest == contest]
                timings.append(_contest(contest, layers, modules[make], ours, theirs, earlier, given.patience))
    _show(sorted(timings, key=lambda timing: (list(CONTESTS).index(timing.contest), timing.layers)))
    if given.save:
        version = torch.__version__.partition("+")[0]
        named = ["passes", *([given.only] if given.only else []), *([version] if version != "2.13.0" else [])]
        save("-".join(named), {"cap_mb": CAP_MB, "timings": [asdict(timing) for timing in timings]})


def _contest(
    contest: str,
    layers: int,
    module: fx.GraphModule,
    ours: Timed,
    theirs: Timed,
    earlier: list[Timing],
    patience: float,
) -> Timing:
    nodes = len(module.graph.nodes)
    ours(module)  # operators are looked up at first use
    if not earlier:
        theirs(module)  # so are patterns
    done = min(ours(module) for _ in range(3))
    growth, hopeless = None, False
    if earlier:
        last = earlier[-1]
        larger = nodes / last.nodes
        hopeless = last.theirs is None or last.theirs * larger**2 > patience
        growth = math.log(done.seconds / last.ours) / math.log(larger)
    other = None if hopeless else theirs(module)
    return Timing(
        contest,
        layers,
        nodes,
        done.seconds,
        other.seconds if other is not None else None,
        growth,
        done.nodes,
        other.nodes if other is not None else None,
    )


def _show(timings: list[Timing]) -> None:
    heads = ["layers", "nodes", "ours, s", "torch, s", "torch / ours", "our growth", "gone, ours", "gone, torch"]
    table = Table("graph and passes", *heads)
    for timing in timings:
        growth = f"{timing.growth:.2f}" if timing.growth is not None else ""
        theirs = f"{timing.theirs:.2f}" if timing.theirs is not None else "not awaited"
        ratio = f"{timing.theirs / timing.ours:.1f}" if timing.theirs is not None else ""
        gone = f"{timing.nodes - timing.our_nodes:,}"
        their_gone = f"{timing.nodes - timing.their_nodes:,}" if timing.their_nodes is not None else ""
        figures = [f"{timing.nodes:,}", f"{timing.ours:.3f}", theirs, ratio, growth, gone, their_gone]
        table.add_row(timing.contest, str(timing.layers), *figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
