"""Real models before and after simplification: nodes, peak memory, milliseconds.

    python -m benchmarks.simplify                         # all architectures of tests/models/zoo.py, and a wide Llama
    python -m benchmarks.simplify --only llama,bert
    python -m benchmarks.simplify --device cuda --save    # what is meant for CUDA: eager and compiled

Both programs run node by node in eager torch, on the same inputs, in turns; the median counts. Peak memory is what a
program makes and still holds at once, without its inputs. Where the transformers library is missing, the GPT of
`crossfade demo` stands for the models.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.figures import save
from crossfade.capture.exported import capture_exported
from crossfade.compile.pipeline import simplification
from crossfade.demo.model import SIZES, build
from crossfade.execute.executable import Executable
from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import InputKind, Program, from_graph_module
from crossfade.simplify.add_matmuls import AddMatmuls
from crossfade.simplify.build_on_device import BuildOnDevice
from crossfade.simplify.prepare_softmax_online import PrepareSoftmaxOnline
from crossfade.simplify.unfuse_bias import UnfuseBias


@dataclass
class Case:
    """A program, values for its inputs, and the passes to judge."""

    name: str
    program: Program
    values: list[Any]
    passes: Sequence[Pass]


@dataclass
class Judged:
    """One program before and after."""

    name: str
    way: str
    nodes: int
    nodes_after: int
    peak: int
    peak_after: int
    milliseconds: float
    milliseconds_after: float


def exported_case(name: str, exported: torch.export.ExportedProgram, inputs: dict[str, Any]) -> Case:
    """A case of an exported model and what it is called with."""
    program = capture_exported(exported)
    state = {**exported.state_dict, **exported.constants}
    values = [inputs[item.name] if item.kind is InputKind.INPUT else state[item.name] for item in program.inputs]
    return Case(name, program, [value.detach() for value in values], simplification())


def models(only: Sequence[str]) -> Iterator[Case]:
    """Tiny models of real architectures and one that is not tiny; without transformers, GPTs."""
    if importlib.util.find_spec("transformers") is None:
        for name in ("tiny", "wide"):
            tokens = torch.randint(0, SIZES[name].vocabulary, (SIZES[name].batch, SIZES[name].length))
            exported = torch.export.export(build(SIZES[name]).eval(), (tokens,))
            yield exported_case(f"gpt, {name}", exported, {"tokens": tokens})
        return
    from tests.models.zoo import ARCHITECTURES, architecture

    for listed in ARCHITECTURES:
        if not only or listed.name in only:
            yield exported_case(listed.name, listed.export(), listed.inputs())
    if not only or "llama" in only:
        llama = architecture("llama")
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
        more = {"num_hidden_layers": 4, "vocab_size": 4096, "max_position_embeddings": 256}
        wide = replace(llama, name="llama, 1024 wide", options={**llama.options, **sizes, **more})
        inputs = wide.inputs(1, 128)
        yield exported_case(wide.name, torch.export.export(wide.build(), (), inputs, strict=False), inputs)


def cuda_cases() -> Iterator[Case]:
    """One graph for each rule that is meant for CUDA, and a GPT with all of them."""

    def traced(name: str, function: Callable[..., Any], values: list[Tensor], passes: Sequence[Pass]) -> Case:
        module = make_fx(function, tracing_mode="fake")(*values)
        return Case(name, from_graph_module(module), values, passes)

    def softmax(x: Tensor) -> Tensor:
        exponentials = (x - x.amax(-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(-1, keepdim=True)

    def perceptron(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.gelu(torch.addmm(bias, x, weight))

    def masked(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1]).to(x.device)
        return torch.where(places[None] <= places[:, None], x, 0.0)

    def two_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a @ b + c @ d

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    wide = random(8192, 32768, dtype=torch.float32)
    yield traced("softmax in parts", softmax, [wide], [PrepareSoftmaxOnline()])
    yield traced("bias, gelu", perceptron, [random(4096), random(8192, 1024), random(1024, 4096)], [UnfuseBias()])
    yield traced("mask built on the CPU", masked, [random(4096, 4096)], [BuildOnDevice()])
    squares = [random(4096, 4096) for _ in range(4)]
    yield traced("two products added", two_products, squares, [AddMatmuls()])
    model = build(SIZES["wide"]).cuda().eval()
    tokens = torch.randint(0, SIZES["wide"].vocabulary, (8, SIZES["wide"].length), device="cuda")
    gpt = exported_case("gpt, wide", torch.export.export(model, (tokens,)), {"tokens": tokens})
    yield replace(gpt, passes=[*simplification(), BuildOnDevice(), UnfuseBias(), AddMatmuls(), PrepareSoftmaxOnline()])


def judge(case: Case, rounds: int, *, compiled: bool = False) -> Judged:
    """Run a case before and after its passes, in turns."""
    after = run_passes(case.program, case.passes, keep_text=False)
    runs = [_runner(program, compiled) for program in (case.program, after)]
    for run in runs:
        run(case.values)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for run, taken in zip(runs, times, strict=True):
            taken.append(_milliseconds(run, case.values))
    medians = [statistics.median(taken) for taken in times]
    sizes = [len(program.graph.nodes) for program in (case.program, after)]
    peaks = [memory_curve(program).peak for program in (case.program, after)]
    return Judged(case.name, "compiled" if compiled else "eager", *sizes, *peaks, *medians)


def _runner(program: Program, compiled: bool) -> Callable[[list[Any]], Any]:
    if compiled:
        whole = torch.compile(program.module(), fullgraph=True)
        return lambda values: whole(*values)
    executable = Executable(program, {})
    return lambda values: executable(list(values))


def _milliseconds(run: Callable[[list[Any]], Any], values: list[Any]) -> float:
    _synchronize()
    start = time.perf_counter()
    run(values)
    _synchronize()
    return 1000 * (time.perf_counter() - start)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures, comma-separated")
    parser.add_argument("--rounds", type=int, default=15, help="how often each program runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    judged = []
    with torch.no_grad():
        for case in cuda_cases() if given.device == "cuda" else models(only):
            judged.append(judge(case, given.rounds))
            if given.device == "cuda":
                judged.append(judge(case, given.rounds, compiled=True))
    _show(judged)
    if given.save:
        save(f"simplify-{given.device}", {"rounds": given.rounds, "cases": [asdict(case) for case in judged]})


def _show(judged: Sequence[Judged]) -> None:
    table = Table("model", "", "nodes", "after", "peak, KiB", "after", "ms", "after", "ratio")
    for case in judged:
        peaks = [f"{peak / 1024:,.0f}" for peak in (case.peak, case.peak_after)]
        times = [f"{value:.3f}" for value in (case.milliseconds, case.milliseconds_after)]
        ratio = f"{case.milliseconds / case.milliseconds_after:.2f}"
        table.add_row(case.name, case.way, f"{case.nodes:,}", f"{case.nodes_after:,}", *peaks, *times, ratio)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
