"""Time of our passes and of torch's on the same graphs, in one process: nodes, seconds, ratio, growth.

    python -m benchmarks.passes                    # 4, 16 and 64 layers
    python -m benchmarks.passes --layers 4,16      # quicker

Graphs are those of `benchmarks/graphs.py`. Each pass runs on a fresh copy; copying is not timed.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from torch import fx

from benchmarks import graphs
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.graph.passes import Pass
from crossfade.graph.program import from_graph_module

CAP_MB = 100.0
Timed = Callable[[fx.GraphModule], float]


def _ours(*passes: Pass) -> Timed:
    def run(module: fx.GraphModule) -> float:
        program = from_graph_module(module, groups={graphs.start_fake_world(): graphs.RANKS})
        start = time.perf_counter()
        for one in passes:
            one.run(program)
        return time.perf_counter() - start

    return run


def _torch_buckets(module: fx.GraphModule) -> float:
    from torch._inductor.fx_passes import bucketing

    module = copy.deepcopy(module)
    start = time.perf_counter()
    bucketing.bucket_all_reduce(module, lambda index: CAP_MB)
    return time.perf_counter() - start


def _torch_ddp_fusion(module: fx.GraphModule) -> float:
    from torch._inductor.fx_passes.ddp_fusion import fuse_ddp_communication
    from torch._inductor.virtualized import V

    module = copy.deepcopy(module)
    mode = next(node.meta["val"].fake_mode for node in module.graph.nodes if "val" in node.meta)
    start = time.perf_counter()
    with V.set_fake_mode(mode):
        fuse_ddp_communication(module.graph, ["fuse_ddp_with_concat_op", "schedule_comm_wait"], int(CAP_MB))
    return time.perf_counter() - start


CONTESTS: dict[str, tuple[Callable[[int], fx.GraphModule], Timed, Timed]] = {
    "all-reduce buckets": (graphs.ddp, _ours(BucketAllReduces(CAP_MB, CAP_MB)), _torch_buckets),
    "buckets and moved waits": (
        graphs.ddp,
        _ours(BucketAllReduces(CAP_MB, CAP_MB), RaiseLaunches(), SinkWaits()),
        _torch_ddp_fusion,
    ),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,16,64", help="sizes to try, smallest first")
    sizes = [int(size) for size in parser.parse_args().layers.split(",")]
    table = Table("pass", "layers", "nodes", "ours, s", "torch, s", "torch / ours", "our growth")
    modules: dict[tuple[str, int], fx.GraphModule] = {}
    for name, (make, ours, theirs) in CONTESTS.items():
        last: tuple[int, float] | None = None
        for layers in sizes:
            module = modules.get((make.__name__, layers)) or make(layers)
            modules[make.__name__, layers] = module
            nodes = len(module.graph.nodes)
            ours(module)  # operators are looked up at first use
            seconds, peer = ours(module), theirs(module)
            growth = f"{math.log(seconds / last[1]) / math.log(nodes / last[0]):.2f}" if last else ""
            table.add_row(
                name, str(layers), f"{nodes:,}", f"{seconds:.3f}", f"{peer:.2f}", f"{peer / seconds:.1f}", growth
            )
            last = nodes, seconds
    Console().print(table)


if __name__ == "__main__":
    main()
