"""The command line: `crossfade --help` lists its commands."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from crossfade.errors import CrossfadeError


class PlanCommands(TyperGroup):
    """The commands of `crossfade plan`, of which `find` is meant where the first word is none: it is a model then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["find", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="Make communication disappear under computation in distributed PyTorch programs, and see what was done.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
reports = typer.Typer(help="Show, draw and compare reports that were saved as JSON.", no_args_is_help=True)
app.add_typer(reports, name="report")
Everything = Annotated[bool, typer.Option("--all", help="Print every table, not the 25 lines that count most.")]
Saved = Annotated[Path, typer.Argument(help="A report saved with to_json.", exists=True, dir_okay=False)]
Trusted = Annotated[bool, typer.Option("--trusted", help="Run code that the file holds: you know where it comes from.")]


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Local rank processes to train on.", min=2)] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps of each contender.", min=1)] = 20,
    size: Annotated[str, typer.Option(help="Size of the GPT: tiny, demo, wide or deep.")] = "demo",
    report: Annotated[Path, typer.Option(help="Folder for index.html and report.json.")] = Path("crossfade-report"),
    everything: Everything = False,
) -> None:
    """Train a small GPT on local CPU ranks: one process, torch's DDP and Crossfade, side by side.

    Prints step times and losses from one run, what became of every collective, and writes an HTML report.
    Takes under two minutes on two cores.
    """
    from crossfade.demo import show
    from crossfade.demo.model import SIZES

    if size not in SIZES:
        raise typer.BadParameter(f"{size!r}: expected one of {', '.join(SIZES)}", param_hint="--size")
    show.run(ranks=ranks, steps=steps, size=size, folder=report, console=console, everything=everything)


@reports.command("show")
def show_report(report: Saved, everything: Everything = False) -> None:
    """Print a report: how long a step is, what is exposed and why, what to do, which passes fired."""
    from crossfade.report.report import Report

    Report.from_json(report).show(console, all=everything)


@reports.command("page")
def report_page(
    report: Saved,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write a report as one self-contained HTML page."""
    from crossfade.report.report import Report

    console.print(f"HTML report: {Report.from_json(report).to_html(output)}", soft_wrap=True)


@reports.command("trace")
def report_trace(
    report: Saved,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write.")] = Path("trace.json"),
) -> None:
    """Write the timelines of all ranks as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""
    from crossfade.report.report import Report

    console.print(f"trace: {Report.from_json(report).to_trace(output)}", soft_wrap=True)


@reports.command("diff")
def diff_reports(
    before: Saved,
    after: Saved,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page here.")] = None,
) -> None:
    """Compare two reports: before and after a change, or of two machines."""
    from crossfade.report.page import render_comparison
    from crossfade.report.report import Report
    from crossfade.report.terminal import show_comparison

    comparison = Report.from_json(before).compared_with(Report.from_json(after))
    show_comparison(comparison, console)
    if html is not None:
        html.write_text(render_comparison(comparison), encoding="utf-8", errors="xmlcharrefreplace")
        console.print(f"HTML report: {html}", soft_wrap=True)


@app.command()
def explain(
    program: Annotated[
        Path, typer.Argument(help="A program in Crossfade's text form; see docs/architecture.md.", exists=True)
    ],
    passes: Annotated[str, typer.Option(help="Passes to run, e.g. 'bucket-all-reduces(cap_mb=2) sink-waits'.")] = "",
    group_size: Annotated[int, typer.Option(help="Ranks in each process group the program names.", min=1)] = 2,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML report here.")] = None,
    machine: Annotated[str, typer.Option(help="Plan for this machine: a preset's name or a JSON file.")] = "",
    strict: Annotated[str, typer.Option(help="What is expected, e.g. 'bucketed:all exposed<=5ms'.")] = "",
    everything: Everything = False,
) -> None:
    """Run passes over a program written as text, and say what became of each collective and why.

    Without --passes, runs what `crossfade.optimize` runs. Prints the improved program last. With --strict, exits with
    1 and lists what falls short; see docs/strict.md.
    """
    from crossfade.commands import whatif
    from crossfade.compile import catalogue, pipeline
    from crossfade.files.program_text import read_program_text
    from crossfade.graph import collectives
    from crossfade.graph.passes import run_passes
    from crossfade.report.expect import Expect
    from crossfade.report.report import Report
    from crossfade.report.strict import Judged, hold

    expect, found = Expect.of(strict or None), whatif.machine_of(machine) if machine else None
    before = read_program_text(program)
    before.groups = dict.fromkeys(collectives.group_sizes(before.graph), group_size)
    usual = pipeline.optimization(machine=found, groups=before.groups)
    chosen = list(map(catalogue.pass_from_spelling, catalogue.split_spellings(passes))) if passes else usual
    after = run_passes(before, chosen, context=pipeline.planning_for(found))
    report = Report.of(before, after, title=program.name)
    report = report.with_timelines(predicted=whatif.predicted(after, found)) if found is not None else report
    report.show(console, all=everything)
    for name, verdict in report.verdicts:
        console.print(f"[dim]{name}:[/] {escape(str(verdict))}", highlight=False, soft_wrap=True)
    console.print(str(after), highlight=False, markup=False, soft_wrap=True)
    if html is not None:
        console.print(f"HTML report: {report.to_html(html)}", soft_wrap=True)
    hold(expect, Judged(report, before, after))


@app.command()
def check(
    programs: Annotated[
        list[Path], typer.Argument(help="A program's text for each rank, by number; or one for all.", exists=True)
    ],
    mesh: Annotated[str, typer.Option(help="Axes and their ranks, row-major: dp=2,tp=4.")] = "",
    group: Annotated[
        list[str] | None, typer.Option(help="A group's ranks: pp=0,1; may be given several times, also per name.")
    ] = None,
    backend: Annotated[str, typer.Option(help="gloo, nccl, or any: whether launches may block each other.")] = "any",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Prove that the ranks' collectives fit together and no rank waits for ever, or print the shortest counter-example.

    Without --mesh and --group, every group has all ranks. Exits with 1 where it cannot be proved.
    """
    from crossfade.check.files import check_files

    found = check_files(programs, mesh, group or [], backend)
    console.print(found.to_json() if json else str(found), highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def calibrate(
    ranks: Annotated[int, typer.Option(help="Local rank processes; under torchrun, its ranks are taken.", min=2)] = 2,
    seconds: Annotated[float, typer.Option(help="About how long to measure.", min=1.0)] = 10.0,
    name: Annotated[str, typer.Option(help="What to call the machine.")] = "calibrated",
    save: Annotated[Path | None, typer.Option(help="Write it here as JSON, for machine=Machine.load(...).")] = None,
) -> None:
    """Measure what communication, computation and memory cost on the ranks that will run a program.

    Alone it starts local gloo ranks. On several hosts: torchrun ... -m crossfade calibrate --save machine.json
    """
    from rich.table import Table

    from crossfade.cost.calibrate import rows
    from crossfade.ranks.measure_ranks import measure_ranks

    machine = measure_ranks(name, ranks, seconds)
    if machine is None:  # another rank of torchrun's reports
        return
    table = Table("what", "axis or dtype", "latency", "rate", title=machine.name)
    for row in rows(machine):
        table.add_row(*row)
    console.print(table)
    if save is not None:
        console.print(f"machine: {machine.save(save)}", soft_wrap=True)


@app.command()
def simulate(
    program: Annotated[
        str, typer.Argument(help="A model (model.py:function, a config.json, llama3.1-8b), or a program as text.")
    ],
    machine: Annotated[
        list[str] | None, typer.Option(help="A preset's name or a JSON file; may be given several times.")
    ] = None,
    batch: Annotated[str, typer.Option(help="A rank's micro-batch of a model: samples by tokens.")] = "1x2048",
    mesh: Annotated[str, typer.Option(help="Axes of a model's ranks, the last inside nodes: dp=32,tp=8.")] = "dp=8",
    way: Annotated[
        list[str] | None,
        typer.Option(help="ddp, fsdp, fsdp-kept, megatron, megatron-bucketed, crossfade; several for a comparison."),
    ] = None,
    recompute: Annotated[str, typer.Option(help="Activation checkpointing: none, selective or full.")] = "none",
    float8: Annotated[bool, typer.Option("--float8", help="Products of weights in float8.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Elementwise operators fused, as Inductor does.")
    ] = False,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in a step.", min=1)] = 1,
    spread: Annotated[float, typer.Option(help="Standard deviation of a device's speed, as a share.", min=0)] = 0.0,
    expandable: Annotated[
        bool, typer.Option("--expandable", help="Memory as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
    ] = False,
    master: Annotated[
        bool, typer.Option(help="Whether parameters in half precision have copies in float32 that are updated.")
    ] = True,
    sweep: Annotated[str, typer.Option(help="gpus=8..16384, or bandwidth=0.25..4 times that between nodes.")] = "",
    scaling: Annotated[
        str, typer.Option(help="weak: each GPU keeps its batch; strong: the whole batch stays.")
    ] = "weak",
    json: Annotated[bool, typer.Option("--json", help="Print a model's forecasts as JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write a sweep here, as comma-separated values.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts and timelines here.")] = None,
    group_size: Annotated[int, typer.Option(help="Ranks in each process group a program names.", min=1)] = 2,
    memory_limit: Annotated[int | None, typer.Option(help="Bytes that may be alive beside a program's inputs.")] = None,
) -> None:
    """Forecast a model's training step on a cluster, or what a program in text form would do on machines.

    Needs neither devices nor weights. For a model: step time, tokens a second, memory, what it waits for, and what
    would help; see docs/forecasting.md. For a program: as it stands and as Crossfade would plan it.
    """
    from crossfade.commands import forecasts

    if not forecasts.is_model(program):
        _simulate_program(Path(program), machine, group_size, memory_limit, html)
        return
    asked = forecasts.Asked(program, batch, mesh, machine or (), way or (), recompute, float8, compiled, accumulate,
                            spread, sweep, scaling, expandable, master)  # fmt: skip
    answered = forecasts.answer(asked)
    if json:
        typer.echo("[" + ", ".join(each.to_json() for each in answered.forecasts) + "]")
    else:
        for each in answered.forecasts:
            console.print(str(each), highlight=False, markup=False, soft_wrap=True)
        for point in answered.points:
            found = point.forecast
            console.print(f"{point.curve}, {point.value:g} {answered.over}: {found.seconds * 1e3:,.1f} ms, "
                          f"{found.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, bound by {found.bound_by}",
                          highlight=False, soft_wrap=True)  # fmt: skip
    for line in answered.write(html, csv):
        Console(stderr=True).print(line, soft_wrap=True)


def _simulate_program(
    program: Path, machine: list[str] | None, group_size: int, memory_limit: int | None, html: Path | None
) -> None:
    from rich.table import Table

    from crossfade.commands import whatif

    found = [whatif.what_if(program, preset, group_size, memory_limit) for preset in machine or list(whatif.PRESETS)]
    columns = ("machine", "as it stands", "planned", "exposed", "peak bytes", "buckets up to")
    table = Table(*columns, title=f"{program.name}, groups of {group_size}")
    for answer in found:
        table.add_row(*answer.row())
    console.print(table)
    if html is not None:
        console.print(f"HTML report: {found[-1].report.to_html(html)}", soft_wrap=True)


@app.command()
def simplify(
    model: Annotated[Path, typer.Argument(help="A model saved with torch.export.save.", exists=True, dir_okay=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the simplified model here.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this pass, by its spelling, instead of all.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this pass out.")] = None,
    before: Annotated[list[str] | None, typer.Option(help="NAME=SPELLING: add a pass before another.")] = None,
    after: Annotated[list[str] | None, typer.Option(help="NAME=SPELLING: add a pass after another.")] = None,
    trusted: Trusted = False,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML report here.")] = None,
) -> None:
    """Make an exported model smaller, for inference, and say what each pass did.

    Each of --only, --without, --before and --after may be given several times; `crossfade passes` lists the names.
    """
    from rich.table import Table

    from crossfade.compile import pipeline, simplify_exported

    exported = simplify_exported.load(model, trusted=trusted)
    whole = pipeline.simplification()
    chosen = simplify_exported.choose(
        whole, only=only or (), without=without or (), before=before or (), after=after or ()
    )
    done = simplify_exported.simplify(exported, chosen, title=model.name)
    table = Table("pass", "nodes", "became", "applied", title=model.name)
    for record in done.report.records:
        applied = ", ".join(f"{name} {count}" for name, count in record.counts.items() if count)
        table.add_row(escape(record.spelling), str(record.nodes_before), str(record.nodes_after), escape(applied))
    console.print(table)
    if output is not None:
        simplify_exported.save(done.exported, output)
        console.print(f"simplified model: {output}", soft_wrap=True)
    if html is not None:
        console.print(f"HTML report: {done.report.to_html(html)}", soft_wrap=True)


@app.command()
def shard(
    model: Annotated[Path, typer.Argument(help="A model saved with torch.export.save.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    mesh: Annotated[str, typer.Option(help="The axis and its ranks; ep=2, or ep=2,tp=4, spreads experts.")] = "tp=2",
    plan: Annotated[
        str, typer.Option(help="A .yaml or .json plan, or megatron: what the graph suggests.")
    ] = "megatron",
    weights: Annotated[
        Path | None, typer.Option(help="A checkpoint to take weights from: safetensors, or a folder.", exists=True)
    ] = None,
    trusted: Trusted = False,
) -> None:
    """Split a model over ranks: one program for all, and a file of weights for each, which `crossfade run` runs.

    All ranks are written by this process, one after the other.
    """
    from rich.progress import Progress

    from crossfade.commands import shard_models
    from crossfade.compile import simplify_exported

    prepared = shard_models.shard_model(simplify_exported.load(model, trusted=trusted), mesh, plan)
    written = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("ranks written", total=prepared.places)
        for file in shard_models.write_ranks(prepared, weights, output):
            written.append(file)
            progress.advance(task)
    console.print(shard_models.summary(written))
    console.print(f"sharded model: {output}", soft_wrap=True)


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="What `crossfade shard` wrote.", exists=True, file_okay=False)],
    inputs: Annotated[Path, typer.Option(help="torch.save of a tuple of arguments, a dict, or a tensor.", exists=True)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="torch.save the outputs here.")] = None,
    trusted: Trusted = False,
) -> None:
    """Run a sharded model once, on as many local ranks as it was split over.

    On several hosts: torchrun ... -m crossfade run FOLDER --inputs inputs.pt
    """
    from crossfade.commands.run_sharded import run_folder

    ran = run_folder(folder, inputs, output, trusted=trusted)
    if ran is None:  # another rank of torchrun's reports
        return
    for position, described in enumerate(ran.outputs):
        console.print(f"output {position}: {described}", highlight=False, markup=False)
    console.print(f"{ran.ranks} ranks: loaded in {ran.loading:.2f} s, ran in {ran.seconds * 1e3:.1f} ms")
    if output is not None:
        console.print(f"outputs: {output}", soft_wrap=True)


plans = typer.Typer(
    cls=PlanCommands,
    help="Find the plan of a model's step: crossfade plan MODEL --ranks N; compare plan files of compiled steps.",
    no_args_is_help=True,
)
app.add_typer(plans, name="plan")


@plans.command()
def find(
    model: Annotated[str, typer.Argument(help="model.py:function, a config.json, or a name such as llama3.1-8b.")],
    ranks: Annotated[int, typer.Option(help="How many ranks there are.", min=1)],
    batch: Annotated[str, typer.Option(help="The batch of all ranks: samples by tokens; by default RANKSx2048.")] = "",
    machine: Annotated[str, typer.Option(help="A preset's name or a JSON file.")] = "h100-cluster",
    memory: Annotated[str, typer.Option(help="What each rank may use, such as 80GB; by default the machine's.")] = "",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or momentum.")] = "adamw",
    plan: Annotated[
        Path | None, typer.Option(help="A tensor-parallel plan, .yaml or .json; else what the graph suggests.")
    ] = None,
    accumulate: Annotated[
        str, typer.Option(help="Numbers of micro-batches to try, each: 1,2,4; by default the fewest that fit.")
    ] = "",
    in_full: Annotated[
        bool, typer.Option("--in-full", help="Simulate every candidate with all layers, not only the best.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Find the fastest way to lay a model's training step over ranks that fits their memory.

    Meshes, data-parallel modes, what stays whole and micro-batches are simulated, without devices and weights. Prints
    every candidate, why the losers lost, and the winner's compile_step call; see docs/find_plan.md.
    """
    from crossfade.commands import found_plans

    asked = found_plans.Asked(model, ranks, batch, machine, memory, optimizer, plan, accumulate, in_full)
    found = found_plans.find(asked)
    typer.echo(found.to_json() if json else str(found))


@plans.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan file.", exists=True)],
    after: Annotated[Path, typer.Argument(help="Another one.", exists=True)],
) -> None:
    """Show what two plan files choose differently; exits with 1 if anything."""
    from crossfade.compile.step_plan import StepPlan, differences

    found = differences(StepPlan.load(before).as_json(), StepPlan.load(after).as_json())
    console.print("\n".join(found) or "the same", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1 if found else 0)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The Python script; what follows are its own arguments.", exists=True)],
    ranks: Annotated[int, typer.Option(help="Local rank processes to start.", min=1)] = 2,
) -> None:
    """Start a script on several local ranks; when one fails, end all and name it.

    The script calls torch.distributed.init_process_group("gloo") as under torchrun, which works as well. Cores are
    shared out (OMP_NUM_THREADS), and memory is kept from step to step (MIMALLOC_PURGE_DELAY), unless these are set.
    """
    from crossfade.ranks.launch import launch as start

    start([str(script), *context.args], ranks=ranks)


@app.command()
def passes(
    name: Annotated[str, typer.Argument(help="Show only this pass, in full; or the passes of this stage.")] = "",
    markdown: Annotated[
        Path | None, typer.Option(help="Write all of them in full into this folder, a page for each stage.")
    ] = None,
) -> None:
    """List the passes: options, what they do to the numbers, whether they run by default; with a name, the example."""
    from crossfade.compile import catalogue

    known, stages = catalogue.known_passes(), catalogue.STAGES
    if name and name not in known and name not in stages:
        raise typer.BadParameter(f"{name!r}: expected one of {', '.join((*stages, *known))}", param_hint="name")
    if markdown is not None:
        markdown.mkdir(parents=True, exist_ok=True)
        for page, text in catalogue.pages().items():
            (markdown / page).write_text(text)
        return
    for pass_ in [known[name]] if name in known else catalogue.known_passes(name).values():
        document = inspect.cleandoc(pass_.__doc__ or "")
        when = escape(catalogue.when_it_runs(pass_))
        console.print(f"[bold]{pass_.name}[/]  [dim]{pass_.numerics}, {when}[/]", highlight=False)
        for option in catalogue.options_of(pass_):
            console.print(f"    {option}", markup=False, highlight=False)
        console.print(document if name in known else document.splitlines()[0], markup=False, highlight=False)
        console.print()


def main() -> None:
    """Run the command line; our own errors print as one paragraph, not as a traceback."""
    try:
        app()
    except CrossfadeError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        raise SystemExit(1) from None
