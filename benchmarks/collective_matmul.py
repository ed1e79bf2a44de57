"""Step time of a tensor-parallel transformer block, plain and with matmuls that compute on pieces while others travel.

    python -m benchmarks.collective_matmul                            # two ranks on loopback
    python -m benchmarks.collective_matmul --network 1gbit            # two hosts in network namespaces, as root
    python -m benchmarks.collective_matmul --network emulated:8       # one process, rank 0 of 8, on a fabric on which
                                                                      # communication takes as long as computation
    python -m benchmarks.collective_matmul --network emulated:4:ethernet-10gbit# or as long as on a preset
    python -m benchmarks.collective_matmul --what forward --save      # also keep the figures in benchmarks/results/
    python -m benchmarks.collective_matmul --compiled yes             # also torch.compile with its own pass
    python -m benchmarks.collective_matmul --cuda                     # on a GPU: matmuls in pieces against whole ones

Contenders take turns in one run; times are medians, of the slowest rank. The reference is the larger of
computation alone and of communication alone, both measured in the same run: what perfect overlap would give. The last
two columns are the milliseconds of communication that are hidden, and the share they are of what could be: an exchange
can travel under its own matmuls at most (in a backward under the gradient of the weight too), and for as long as it
travels at most. Where both are carried by the same processors, as on loopback and between namespaces, hiding costs what
the network's software takes from computation.

Torch's pass (`_micro_pipeline_tp`) needs CUDA, NCCL and symmetric memory. On the CPU it changes nothing, and the row of
torch.compile shows what compiling gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade.collective_matmul
from benchmarks import network, two_ranks
from benchmarks.collective_matmul_forecasts import launch_seconds
from benchmarks.figures import save
from benchmarks.parallel_block import EXCHANGES, STEPS, Block, Collectives, Moves, Nothing, Pipelined
from benchmarks.two_ranks import seconds_of, slowest
from crossfade import emulated
from crossfade.compile import pipeline
from crossfade.cost.calibrate import calibrate
from crossfade.cost.collective_matmul import CHUNKS, call_seconds, forecast_gather, forecast_scatter
from crossfade.cost.fused import is_fused
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.cost.presets import preset
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.report.report import Report

Run = Callable[..., Any]
_GIVEN = ("what", "sequence", "batch", "width", "heads", "rounds", "form", "compiled", "network")
_CUDA_SHAPES = [(rows, inner, columns) for rows in (4096, 16384) for inner, columns in ((8192, 1024), (4096, 4096))]


def main() -> None:
    """Parse the command line, run on the ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=STEPS, default="forward+backward")
    for name, size in (("sequence", 512), ("batch", 8), ("width", 256), ("heads", 8), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--form", default="best", help="chunked:4 or ring:2 by hand; best: as forecast")
    parser.add_argument("--compiled", default="", help="anything: also torch.compile with its own pass, minutes")
    parser.add_argument("--cuda", action="store_true", help="time matmuls in pieces on this GPU, and nothing else")
    two_ranks.add_options(parser)
    options = parser.parse_args()
    if options.cuda:
        _finish_pieces(pieces(options.rounds), options)
        return
    _check_network(options)
    given = {key: getattr(options, key) for key in _GIVEN}
    if options.network.startswith("emulated:"):
        finish(_on_emulated_fabric(given), options)
    else:
        two_ranks.run("benchmarks.collective_matmul", work, given, finish, options)


def _check_network(options: argparse.Namespace) -> None:
    """Without the right to make hosts, ranks share this one: said, since loopback is another network."""
    real = options.network != "loopback" and not options.network.startswith("emulated:")
    if real and not options.worker and (reason := network.reason_against()) is not None:
        Console().print(f"[bold]no {options.network} network here: {reason}; on loopback instead[/]")
        options.network = "loopback"


def _on_emulated_fabric(given: dict[str, Any]) -> dict[str, Any]:
    """Run as one rank of a world that does not exist, on a preset's fabric or on a balanced one."""
    _, ranks, *machine = given["network"].split(":")
    torch.set_num_threads(1)
    with emulated.world(preset("ethernet-10gbit"), int(ranks)):
        chosen = preset(machine[0]) if machine else _balanced(given, int(ranks))
        chosen = dataclasses.replace(chosen, device="cpu", flops={"float32": _flops(_block(given, int(ranks)))})
        with emulated.use(chosen) as fabric:
            figures = work(**given, machine=chosen)
        return {**figures, "late": fabric.late}


def _block(given: dict[str, Any], ranks: int) -> Block:
    sizes = {name: given[name] for name in ("sequence", "batch", "width", "heads")}
    world = dist.group.WORLD
    assert world is not None
    return Block(**sizes, ranks=ranks, group=world.group_name)


def _balanced(given: dict[str, Any], ranks: int) -> Machine:
    """A machine on which the block's communication takes as long as its computation."""
    block, what = _block(given, ranks), given["what"]
    alone = _entered(block, what, Nothing())
    seconds = statistics.median(seconds_of(alone) for _ in range(7))
    moved = sum(EXCHANGES[what]) * block.exchanged_bytes * (ranks - 1) / ranks
    link = Link(latency=2e-5, bandwidth=moved / seconds)
    fabric = Fabric(dict.fromkeys(Kind, link), launch=launch_seconds(ranks, block.exchanged_bytes // 4))
    return dataclasses.replace(preset("loopback-gloo"), name="balanced", fabrics={"*": fabric}, source="")


def _flops(block: Block) -> float:
    """Operations a second of the block's first matmul here: what computes is no other machine than this."""
    left, right = torch.randn(block.sequence * block.batch, block.width), block.inputs()[1]
    seconds = statistics.median(seconds_of(lambda: torch.mm(left, right)) for _ in range(7))
    return 2 * left.numel() * right.shape[1] / seconds


def work(
    what: str,
    sequence: int,
    batch: int,
    width: int,
    heads: int,
    rounds: int,
    form: str,
    compiled: str,
    network: str,
    machine: Machine | None = None,
) -> dict[str, Any]:
    """What each rank does: enter the contenders, time them in turns, and communication alone."""
    assert crossfade.collective_matmul is not None  # runs the operators
    given = {"sequence": sequence, "batch": batch, "width": width, "heads": heads}
    block = _block(given, dist.get_world_size())
    if machine is None:
        machine = calibrate("here", {"*": dist.group.WORLD}, seconds=4.0).with_scatters_as_exchanges(["*"])
    runs = {"computation alone": _entered(block, what, Nothing())}
    runs["plain tensor parallelism"] = plain = _entered(block, what, Collectives())
    if compiled:
        runs["torch.compile, _micro_pipeline_tp"] = _compiled(block, what)
    runs["Crossfade, no pipelining"] = _optimized(plain)
    for name, moves in _by_hand(block, what, plain, machine, form).items():
        runs[name] = _entered(block, what, moves)
    runs["Crossfade, fused by passes"] = by_passes = _optimized(plain, machine)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    talking: list[float] = []
    for turn in range(rounds + 2):
        for name, run in runs.items():
            took = slowest(seconds_of(run))
            seconds[name] += [took] if turn >= 2 else []
        took = slowest(_communication(block, what))
        talking += [took] if turn >= 2 else []
    times = {name: statistics.median(some) for name, some in seconds.items()}
    return {
        "times": times,
        "communication": statistics.median(talking),
        "can be hidden": slowest(_can_be_hidden(block, what, statistics.median(talking))),
        "differences": {} if network.startswith("emulated:") else _differences(runs),
        "fused by passes": _pipelined(by_passes),
        "verdicts": _verdicts(plain, by_passes),
        "fabric": machine.name,
        "ranks": block.ranks,
    }


@dataclasses.dataclass(frozen=True)
class _Entered:
    """A contender's graph, what it is called with, and what our passes said if they made it."""

    module: Run
    inputs: list[Tensor]
    report: Report | None = None

    def __call__(self) -> Any:
        with torch.no_grad():
            return self.module(*self.inputs)


def _entered(block: Block, what: str, moves: Moves) -> _Entered:
    """The step as a graph of ATen operators: every contender has the same Python around its operators."""
    inputs = block.inputs()
    traced = make_fx(lambda *given: STEPS[what](block, moves, *given), tracing_mode="fake")(*inputs)
    return _Entered(traced, inputs)


def _optimized(plain: _Entered, machine: Machine | None = None) -> _Entered:
    """By Crossfade's passes; a machine adds collective matmuls where they pay on it."""
    assert isinstance(plain.module, fx.GraphModule)
    done = pipeline.optimize(plain.module, machine=machine)
    return _Entered(done.module, plain.inputs, done.report)


def _pipelined(entered: _Entered) -> int:
    """How many of a contender's matmuls travel in pieces."""
    assert isinstance(entered.module, fx.GraphModule)
    return sum(is_fused(node.target) for node in entered.module.graph.nodes)


def _verdicts(plain: _Entered, entered: _Entered) -> list[str]:
    """What the pipelining passes and the scheduler said of each exchange."""
    assert isinstance(plain.module, fx.GraphModule) and entered.report is not None
    exchanges = {collective.node.name for collective in collectives.find(plain.module.graph)}
    said = [(entry.pass_name, entry.verdict) for entry in entered.report.verdicts if entry.verdict.subject in exchanges]
    deciding = ("fuse-gathers-into-matmuls", "fuse-scatters-into-matmuls", "overlap-communication")
    return [
        f"{verdict.subject}: {verdict.outcome}, {verdict.reason}; {verdict.detail}"
        for name, verdict in said
        if name in deciding
    ]


def _by_hand(block: Block, what: str, plain: _Entered, machine: Machine, form: str) -> dict[str, Pipelined]:
    """The operators with what was asked for, or with the best forecast of each form for the first matmul."""
    if form != "best":
        name, _, chunks = form.partition(":")
        chosen = [Pipelined(name, int(chunks or 1))]
    else:
        flops = 2 * block.sequence * block.batch * block.width * 3 * block.width // block.ranks
        seconds, rows = flops / machine.flops["float32"], block.sequence // block.ranks
        chosen = []
        for way in ("chunked", "ring"):
            ask = (machine, "*", block.ranks, block.exchanged_bytes, seconds, rows, (way,), CHUNKS)
            total = dict.fromkeys(CHUNKS, 0.0)
            for forecasts in (forecast_gather(*ask), forecast_scatter(*ask)):
                for forecast in forecasts.considered:
                    total[forecast.chunks] += forecast.seconds
            chosen.append(Pipelined(way, min((seconds, chunk) for chunk, seconds in total.items() if seconds)[1]))
    return {f"Crossfade's operators by hand, {one.form} in {one.chunks}": one for one in chosen}


def _compiled(block: Block, what: str) -> _Entered:
    """Torch's own: on the CPU its pass does nothing."""
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = True
    if dist.get_rank() == 0 and block.device == "cpu":
        print("torch's _micro_pipeline_tp does nothing on the CPU: it needs CUDA, NCCL and symmetric memory")
    step, moves, inputs = STEPS[what], Collectives(), block.inputs()
    traced = make_fx(lambda *given: step(block, moves, *given), tracing_mode="fake")(*inputs)
    return _Entered(torch.compile(traced, fullgraph=True), inputs)


def _communication(block: Block, what: str) -> float:
    """Seconds of the step's gathers and scatters, one after another, with nothing to compute."""
    part, whole = torch.zeros(block.exchanged_bytes // 4 // block.ranks), torch.zeros(block.exchanged_bytes // 4)
    gathers, scatters = EXCHANGES[what]
    dist.barrier()
    start = time.perf_counter()
    for _ in range(gathers):
        collectives.wait(collectives.all_gather(part, block.ranks, block.group))
    for _ in range(scatters):
        # gloo's own reduce-scatter is slower than it need be; what every contender could use counts
        collectives.wait(collectives.all_to_all(whole, block.ranks, block.group))
    return time.perf_counter() - start


def _can_be_hidden(block: Block, what: str, communication: float) -> float:
    """Seconds of communication that matmuls can cover: each exchange its own, twice as many of them in a backward."""
    each, rows = communication / sum(EXCHANGES[what]), torch.randn(block.sequence * block.batch, block.width * 4)
    total = 0.0
    for weight in block.inputs()[1:]:
        left = rows[:, : weight.shape[0]].contiguous()
        seconds = statistics.median(
            seconds_of(lambda matrix=left, other=weight: torch.mm(matrix, other)) for _ in range(7)
        )
        total += min(each, seconds) + (min(each, 2 * seconds) if "backward" in what else 0.0)
    return total


def _differences(runs: dict[str, _Entered]) -> dict[str, float]:
    """By how much each contender's results differ from the plain ones', relative to the largest number."""
    expected = _tensors(runs["plain tensor parallelism"]())
    found = {}
    for name, run in runs.items():
        if name not in ("computation alone", "plain tensor parallelism"):
            pairs = zip(_tensors(run()), expected, strict=True)
            found[name] = max(float((result - other).abs().max() / other.abs().max()) for result, other in pairs)
    return found


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def finish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and keep the figures if asked."""
    times: dict[str, float] = figures["times"]
    plain, computing = times["plain tensor parallelism"], times["computation alone"]
    talking = figures["communication"]
    reference = max(computing, talking)
    sizes = f"{options.sequence}x{options.batch}x{options.width}, {options.heads} heads"
    table = Table(
        "contender",
        "ms",
        "x plain",
        "x reference",
        "ms hidden",
        "of what can be",
        title=f"{options.what}, {sizes}, {options.network}",
    )
    for name, seconds in [*times.items(), ("communication alone", talking)]:
        raced = name not in ("computation alone", "communication alone")
        hidden = computing + talking - seconds
        shares = [f"{hidden * 1e3:.1f}", f"{hidden / figures['can be hidden']:.0%}"] if raced else []
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{seconds / plain:.2f}", f"{seconds / reference:.2f}", *shares)
    Console(width=140).print(table)
    Console().print(f"passes fused {figures['fused by passes']} of {sum(EXCHANGES[options.what])} exchanges")
    for verdict in figures["verdicts"]:
        Console(width=140).print(f"  {verdict}", highlight=False)
    for name, difference in figures["differences"].items():
        Console().print(f"{name}: results differ from plain ones by at most {difference:.1e} of the largest")
    if figures.get("late"):
        Console().print(f"emulated values came {figures['late']:.3f} s late in all")
    if options.save:
        given = {name: getattr(options, name) for name in _GIVEN}
        kind = options.what.replace("+", "-")
        save(
            f"collective-matmul-{kind}-{options.network.replace(':', '-')}",
            {**given, **figures, "reference": reference},
        )


def pieces(rounds: int) -> list[dict[str, Any]]:
    """bfloat16 matmuls on this GPU, whole and in pieces, and what is forecast for the pieces."""
    machine = preset("h200-nvlink-node")
    return [_pieces_of(shape, rounds, machine) for shape in _CUDA_SHAPES]


def _pieces_of(shape: tuple[int, int, int], rounds: int, machine: Machine) -> dict[str, Any]:
    rows, inner, columns = shape
    draw = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    left, right, out = draw(rows, inner), draw(inner, columns), draw(rows, columns)
    seconds = {chunks: _timed_pieces(left, right, out, chunks, rounds) for chunks in (1, 2, 4, 8, 16)}
    whole = seconds[1]
    ratios = {chunks: one / whole for chunks, one in seconds.items() if chunks > 1}
    forecast = {chunks: chunks * call_seconds(machine, whole / chunks, rows / chunks) / whole for chunks in ratios}
    return {"shape": shape, "seconds": whole, "in pieces": ratios, "forecast": forecast}


def _timed_pieces(left: Tensor, right: Tensor, out: Tensor, chunks: int, rounds: int) -> float:
    pairs = list(zip(left.chunk(chunks), out.chunk(chunks), strict=True))
    found = []
    for _ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            for rows, place in pairs:
                torch.mm(rows, right, out=place)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 4e3)
    return statistics.median(found[2:])


def _finish_pieces(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    columns = [f"in {chunks} (forecast)" for chunks in found[0]["in pieces"]]
    table = Table("rows x inner x columns", "us", *columns, title="bfloat16 matmuls in pieces, in times of one")
    for matmul in found:
        ratios = [f"{ratio:.2f} ({matmul['forecast'][chunks]:.2f})" for chunks, ratio in matmul["in pieces"].items()]
        table.add_row(" x ".join(map(str, matmul["shape"])), f"{matmul['seconds'] * 1e6:.0f}", *ratios)
    Console(width=140).print(table)
    if options.save:
        save("collective-matmul-pieces-cuda", {"device": torch.cuda.get_device_name(), "matmuls": found})


if __name__ == "__main__":
    main()
