"""docs/benchmarks.md from benchmarks/results/*.json: `python -m benchmarks.page` writes it, tests hold it to them.

Figures that have no file among the results stand in `figures_by_hand.md`, which is appended as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
BY_HAND = FOLDER / "figures_by_hand.md"

Figures = Mapping[str, Any]

HEAD = """# Benchmarks

Written by `python -m benchmarks.page` from `benchmarks/results/*.json`; each benchmark writes its file with `--save`.
Above each table: the command, the machine and the date. Contenders alternate in one run; times are medians, of the
slowest rank. Where a file does not hold its command, that is put together from its name and settings. A result holds
for its machine: run the command on yours.

**The reference** of a step is the larger of computation alone (eager torch, nothing exchanged) and communication alone
(one all-reduce of all gradients in pieces of 1 MB), both measured in the same run: what perfect overlap of these two
would take. It is not a bound, and steps beat it where they compute or send something else: Crossfade's computation is
faster than eager torch's (operators called once for many parameters, updates in place), the factors of a gradient can
be fewer bytes than the gradient (`exchange-factors`), and among many ranks larger pieces than 1 MB pay less latency.

`wide` is a GPT with 60 MB in 101 parameters, `deep` one with 11 MB in 293, both with AdamW. Besides taking turns, steps
were timed back to back, as in training; predictions are given as multiples of these: what was predicted when planning,
minutes before, and what was predicted again between the timed steps, since a shared machine's speed changes.
"""

NETWORKS = {
    "1gbit": "two hosts (network namespaces) with 1 Gbit/s between them",
    "loopback": "two ranks on loopback, where there is little to hide",
    "emulated-4": "rank 0 of 4 on an emulated fabric on which communication takes as long as computation",
    "emulated-8": "rank 0 of 8 on an emulated fabric on which communication takes as long as computation",
    "emulated-8-ethernet-10gbit": "rank 0 of 8 on the emulated fabric `ethernet-10gbit`",
    "emulated-64-ethernet-10gbit": "rank 0 of 64 on the emulated fabric `ethernet-10gbit`",
}


def main() -> None:
    PAGE.write_text(page())
    print(f"written: {PAGE}")


def page() -> str:
    """The text of docs/benchmarks.md; every file among the results has its table."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))}
    parts, shown = [HEAD], set()
    for title, prefix, write in SECTIONS:
        names = [name for name in results if name.startswith(prefix) and name not in shown]
        shown |= set(names)
        if names:
            parts += [f"\n## {title}\n", *(write(name, results[name]) for name in _in_order(names))]
    if missing := sorted(set(results) - shown):
        raise SystemExit(f"no section of the page is for {', '.join(missing)}: add one to SECTIONS")
    return "".join(parts) + "\n" + BY_HAND.read_text()


def readme_table() -> str:
    """The one table of the README: `wide` between two hosts."""
    figures = json.loads((FOLDER / "results" / "step-wide-1gbit.json").read_text())
    return _step_table(figures, brief=True)


def _in_order(names: Iterable[str]) -> list[str]:
    """Names with what was run between hosts first, then on the emulated fabric, then the rest."""
    return sorted(
        names, key=lambda name: (not name.endswith("1gbit") or "emulated" in name, "emulated" not in name, name)
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _origin(title: str, command: str, figures: Figures) -> str:
    """A table's heading, and where its figures come from."""
    machine = figures["machine"]
    device = figures.get("gpu") or (figures.get("device") if "NVIDIA" in str(figures.get("device")) else "")
    where = f"{device + ', ' if device else ''}{machine['cores']} {machine['processor']} cores"
    command = figures.get("command", command)
    needs_root = "sudo .venv/bin/" if "--network 1gbit" in command else ".venv/bin/"
    return f"\n### {title}\n\n`{needs_root}{command}`: {where}, torch {machine['torch']}, {figures['date']}.\n\n"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _step(name: str, figures: Figures) -> str:
    _, size, network = name.split("-", 2)
    option = network.replace("-", ":", 2) if network.startswith("emulated") else network
    command = f"python -m benchmarks.step --size {size} --network {option} --steps {figures['steps']}"
    return _origin(f"`{size}`, {NETWORKS[network]}", command, figures) + _step_table(figures)


def _step_table(figures: Figures, *, brief: bool = False) -> str:
    times, steady = figures["times"], figures.get("steady", {})
    reference = max(next(iter(times.values())), figures["communication"])
    best = min(seconds for contender, seconds in times.items() if contender.startswith("torch"))
    rows = []
    for contender, seconds in [*times.items(), ("one all-reduce of all gradients", figures["communication"])]:
        is_training = contender in times and not contender.startswith("compute")
        row = [contender, _ms(seconds), f"{seconds / reference:.2f}", _times(best / seconds) if is_training else ""]
        back_to_back = steady.get(contender)
        forecasts = [figures.get(key, {}).get(contender) for key in ("predicted", "beside")]
        accuracies = [_times(seconds / back_to_back if seconds and back_to_back else None) for seconds in forecasts]
        rows.append([*row, _ms(back_to_back), *accuracies])
    columns = ["contender", "ms a step", "of the reference", "speed against torch's best"]
    columns += ["ms, back to back", "predicted when planning", "predicted between steps"]
    return _table(columns[:4], [row[:4] for row in rows]) if brief else _table(columns, rows)


def _collective_matmul(name: str, figures: Figures) -> str:
    network = name.partition("backward-" if "backward" in name else "forward-")[2]
    options = {key: figures[key] for key in ("sequence", "batch", "width", "heads", "rounds")}
    given = " ".join(f"--{key} {value}" for key, value in options.items())
    compiled = " --compiled yes" if figures["compiled"] else ""
    option = network.replace("-", ":", 1)
    command = f"python -m benchmarks.collective_matmul --network {option} --what {figures['what']} {given}{compiled}"
    times, travel = figures["times"], figures["communication"]
    alone, plain = times["computation alone"], times["plain tensor parallelism"]
    rows = []
    for contender, seconds in [*times.items(), ("communication alone", travel)]:
        hidden = _ms(alone + travel - seconds) if contender.startswith("Crossfade") else ""
        rows.append([contender, _ms(seconds), f"{plain / seconds:.2f}x" if contender in times else "", hidden])
    said = f"\nOf the communication, {_ms(figures['can be hidden'])} ms can be hidden under its own matmuls.\n"
    columns = ["contender", "ms", "speed against plain", "ms hidden"]
    return _origin(f"{figures['what']}, {NETWORKS[network]}", command, figures) + _table(columns, rows) + said


def _forecasts(name: str, figures: Figures) -> str:
    network = name.removeprefix("collective-matmul-forecasts-")
    command = f"python -m benchmarks.collective_matmul_forecasts --network {network.replace('-', ':', 1)}"
    by_form: dict[tuple[str, str], list[str]] = {}
    pieces: dict[int, None] = {}
    for kind, form, chunks, measured, forecast, _ in figures["found"]:
        pieces[chunks] = None
        by_form.setdefault((kind, form), []).append(f"{_ms(measured)} ({measured / forecast:.2f}x)")
    columns = ["collective, form", *(f"in {number}" for number in pieces)]
    rows = [[f"{kind}, {form}", *cells] for (kind, form), cells in by_form.items()]
    title = f"Forecasts on {figures['ranks']} ranks, {network}: ms measured, and times the forecast"
    return _origin(title, command, figures) + _table(columns, rows)


def _pieces(name: str, figures: Figures) -> str:
    rows = []
    for matmul in figures["matmuls"]:
        cells = [f"{cost:.2f} ({matmul['forecast'][number]:.2f})" for number, cost in matmul["in pieces"].items()]
        rows.append([" x ".join(map(str, matmul["shape"])), f"{matmul['seconds'] * 1e6:.0f}", *cells])
    columns = ["rows x inner x columns", "us", *(f"in {number}" for number in figures["matmuls"][0]["in pieces"])]
    title = "What cutting a bfloat16 matmul into pieces costs: times the whole one, and as forecast"
    return _origin(title, "python -m benchmarks.collective_matmul --cuda", figures) + _table(columns, rows)


def _one_device(name: str, figures: Figures) -> str:
    size, device = name.removeprefix("one-device-").rsplit("-", 1)
    command = f"python -m benchmarks.one_device --size {size} --device {device} --steps {figures['steps']}"
    rows = [
        [contender, _ms(found["seconds"]), str(found.get("launches", ""))]
        for contender, found in figures["contenders"].items()
    ]
    return _origin(f"`{size}` on {device}", command, figures) + _table(["contender", "ms a step", "launches"], rows)


def _gpu_step(name: str, figures: Figures) -> str:
    size = name.removeprefix("gpu-step-")
    rows = [
        [
            contender,
            _ms(found["seconds"]),
            _ms(found["steady_s"]),
            _ms(found["predicted_s"]) if "predicted_s" in found else "",
            f"{found['first_s']:.0f} s",
            f"{found['peak_gib']:.1f}" if "peak_gib" in found else "",
            f"{found['launches']:.0f}",
        ]
        for contender, found in figures["contenders"].items()
    ]
    size, emulated, world = size.partition("-emulated-")
    ranks, _, machine = world.partition("-")
    title = f"`{size}`, {figures['layers']} layers"
    title += f", as rank 0 of {ranks} on an emulated {machine} (torch.compile exchanges nothing)" if emulated else ""
    columns = ["contender", "ms a step", "back to back", "predicted", "first step", "peak GiB", "launches"]
    return _origin(title, figures["command"], figures) + _table(columns, rows)


def _memory(name: str, figures: Figures) -> str:
    size = name.removeprefix("memory-")
    rows = [[contender, f"{size:.0f}"] for contender, size in figures["megabytes_above_the_start"].items()]
    title = f"Peak of a rank above its start, `{size}`"
    return _origin(title, f"python -m benchmarks.memory --size {size}", figures) + _table(["contender", "MB"], rows)


def _passes(name: str, figures: Figures) -> str:
    timings = figures["timings"]
    layers = ",".join(dict.fromkeys(str(row["layers"]) for row in timings))
    simplified = "our_nodes" in timings[0]
    only = "--only simplified " if simplified else ""
    largest = max(row["layers"] for row in timings)
    rows = []
    for row in (row for row in timings if row["layers"] == largest):
        gone = [f"{row['nodes'] - row[key]:,}" for key in ("our_nodes", "their_nodes") if simplified]
        ratio = row["theirs"] / row["ours"] if row["theirs"] else None
        cells = [_s(row["ours"]), _s(row["theirs"]), _times(ratio), f"{_growth(row, timings):.2f}"]
        rows.append([row["contest"].removesuffix(", simplified"), f"{row['nodes']:,}", *cells, *gone])
    columns = ["graph and pass", "nodes", "Crossfade", "torch", "torch / ours", "our growth (exponent)"]
    columns += ["nodes gone", "by torch"] if simplified else []
    title = "Simplification after autograd" if simplified else "Buckets, of whole steps traced for 64 ranks"
    command = f"python -m benchmarks.passes {only}--layers {layers}"
    return _origin(f"{title}, {largest} layers", command, figures) + _table(columns, rows)


def _overlap_order(name: str, figures: Figures) -> str:
    outcomes = figures["outcomes"]
    presets = list(outcomes[0]["predicted"])
    rows = []
    for row in outcomes:
        hidden = f"{row['hidden'] / max(1, row['bytes']):.0%}"
        times = [_ms(row["predicted"][machine]) for machine in presets]
        taken = "" if row["seconds"] is None else f"{row['seconds']:.3f} s"
        cells = [row["graph"], str(row["layers"]), f"{row['nodes']:,}", row["order"], hidden]
        rows.append([*cells, f"{row['peak'] / 2**20:,.0f}", *times, taken])
    columns = ["graph", "layers", "nodes", "order", "bytes hidden", "peak, MB", *(f"{m}, ms" for m in presets), "pass"]
    said = "Other work ran on this machine: the last column is the processor's time, and inflated for both.\n\n"
    title = f"Order without a machine, against `simple_overlap` of torch {name.rpartition('-')[2]}"
    return _origin(title, "", figures) + (said if figures["busy"] else "") + _table(columns, rows)


def _growth(row: Figures, timings: Sequence[Figures]) -> float:
    """The exponent with which our time grows by nodes, from the smallest graph to the largest; 1 is linear."""
    first = next(other for other in timings if other["contest"] == row["contest"])
    return math.log(row["ours"] / first["ours"]) / math.log(row["nodes"] / first["nodes"])


def _shard(name: str, figures: Figures) -> str:
    rows = [
        [row["program"], str(row["layers"]), f"{row['nodes']:,}", _s(row["ours"]), _s(row["torch"])]
        for row in figures["rows"]
    ]
    layers = ",".join(dict.fromkeys(str(row["layers"]) for row in figures["rows"]))
    title = "Splitting an exported program over 8 ranks, best of three"
    command = f"python -m benchmarks.shard --layers {layers}"
    return _origin(title, command, figures) + _table(["program", "layers", "nodes", "Crossfade", "torch's own"], rows)


def _simplify(name: str, figures: Figures) -> str:
    device = name.removeprefix("simplify-")
    rows = []
    for case in figures["cases"]:
        before, after = case["milliseconds"], case["milliseconds_after"]
        fewer = 1 - case["nodes_after"] / case["nodes"]
        cells = [
            f"{case['nodes']} / {case['nodes_after']}",
            f"{fewer:.0%}",
            f"{case['peak']:,} / {case['peak_after']:,}",
        ]
        rows.append([case["name"], *cells, f"{before:.2f} / {after:.2f}", _times(before / after)])
    command = f"python -m benchmarks.simplify --device {device} --rounds {figures['rounds']}"
    columns = ["model", "nodes before / after", "fewer", "peak bytes", "ms", "speed"]
    return _origin("Tiny models of the transformers library, run eagerly", command, figures) + _table(columns, rows)


def _buckets(name: str, figures: Figures) -> str:
    rows = []
    for case, found in figures["GB/s"].items():
        others = [f"{way} {speed:,.0f}" for way, speed in found.items() if way not in ("plain copy", "Crossfade")]
        rows.append([case, f"{found['Crossfade']:,.0f}", f"{found['plain copy']:,.0f}", ", ".join(others)])
    title = f"Copies in and out of a bucket, a Llama layer {figures['hidden']} wide, on {figures['device']}: GB/s"
    columns = ["copy", "Crossfade", "plain copy", "torch's ways"]
    return _origin(title, "python -m benchmarks.buckets", figures) + _table(columns, rows)


def _reduce_scatter(name: str, figures: Figures) -> str:
    network = name.removeprefix("reduce-scatter-")
    sizes = figures["seconds by MB"]
    ways = list(next(iter(sizes.values())))
    rows = [[size, *(f"{found[way] * 1e3:.2f}" for way in ways)] for size, found in sizes.items()]
    command = f"python -m benchmarks.reduce_scatter --network {network} --repeats {figures['repeats']}"
    return _origin(f"ms by MB, {NETWORKS[network]}", command, figures) + _table(["MB", *ways], rows)


def _first_step(name: str, figures: Figures) -> str:
    what = name.removeprefix("first-step-")
    command = f"python -m benchmarks.first_step{' --growth' if what == 'growth' else ''} --rounds {figures['rounds']}"
    rows = []
    for model in figures["models"]:
        reference = model["times"].get("torch.compile, cold", {}).get("first")
        for contender, times in model["times"].items():
            cold = model["times"][f"{contender.split(',')[0]}, cold"]["first"]
            against = times["first"] / reference if reference else None
            figures_of = [_s(times["first"]), _times(against), _times(times["first"] / cold), _s(times["processor"])]
            rows.append([str(model["layers"]), contender, *figures_of, _s(times["later"])])
    columns = ["layers", "", "first step", "of torch.compile", "of cold", "processor", "later step"]
    title = "GPT-2 small on two ranks" if what == "gpt2" else "Growth with layers, width 64, on two ranks"
    return _origin(title, command, figures) + _table(columns, rows)


def _on_mesh(name: str, figures: Figures) -> str:
    size = name.removeprefix("on-mesh-").removesuffix("-loopback")
    rows = [
        [contender, _ms(seconds), _ms(figures["steady"][contender]), str(figures["collectives"].get(contender, ""))]
        for contender, seconds in sorted(figures["times"].items(), key=lambda item: item[1])
    ]
    command = f"python -m benchmarks.step_on_mesh --size {size} --steps {figures['steps']}"
    columns = ["contender", "ms a step, in turns", "back to back", "collectives"]
    title = f"`{size}` on {figures['ranks']} ranks, dp=2 x tp=2, all on one machine's loopback"
    return _origin(title, command, figures) + _table(columns, rows)


def _frameworks(name: str, figures: Figures) -> str:
    rows = [
        [framework, _ms(found["ddp"]), _ms(found["crossfade"]), _times(found["ddp"] / found["crossfade"])]
        for framework, found in figures["seconds"].items()
    ]
    batches = figures["accumulate"]
    title = f"{NETWORKS[figures['network']]}; {batches} micro-batch{'es' if batches > 1 else ''} a step"
    command = f"python -m benchmarks.frameworks --network {figures['network']} --accumulate {batches}"
    return _origin(title, command, figures) + _table(["framework", "its DDP, ms", "Crossfade, ms", "speed"], rows)


def _published(name: str, figures: Figures) -> str:
    rows = [
        [group, str(found["rows"]), *(f"{found[key]:.1%}" for key in ("mean", "worst", "bias")),
         f"{found['rank_correlation']:.3f}"]
        for group, found in figures["groups"].items()
    ]  # fmt: skip
    columns = ["rows", "how many", "mean error", "worst", "bias", "rank correlation"]
    said = f"GPT on A100s: {figures['fitted_rows']} rows fitted, the others predicted"
    return f"\n### {said}\n\n`.venv/bin/{figures['command']}`: {figures['date']}.\n\n" + _table(columns, rows)


def _llama(name: str, figures: Figures) -> str:
    rows = [
        [found["row"], *(cell for key, digits in (("tokens", 0), ("gib", 1)) for cell in _beside(found, key, digits))]
        for found in figures["rows"]
    ]
    columns = ["", "tokens a second a GPU", "measured", "off", "GiB", "measured", "off"]
    return _origin("Llama 3.1 on H100", figures["command"], figures) + _table(columns, rows)


def _forecast_steps(name: str, figures: Figures) -> str:
    rows = []
    for found in figures["rows"]:
        off = f"{found['forecast_s'] / found['measured_s'] - 1:+.1%}"
        memory = [f"{found[key]:.2f}" if key in found else "" for key in ("forecast_gib", "measured_gib")]
        rows.append([found["model"], found["way"], _ms(found["forecast_s"]), _ms(found["measured_s"]), off, *memory])
    columns = ["model", "way", "forecast ms", "measured ms", "off", "GiB", "measured"]
    return _origin(name.removeprefix("forecast-steps-"), figures["command"], figures) + _table(columns, rows)


def _beside(found: Figures, key: str, digits: int) -> list[str]:
    """A forecast, what was measured, and the share by which it is missed."""
    value, measured = found[key], found.get(f"measured_{key}")
    if measured is None:
        return [f"{value:,.{digits}f}", "", ""]
    return [f"{value:,.{digits}f}", f"{measured:,.{digits}f}", f"{value / measured - 1:+.1%}"]


def _found_plans(name: str, figures: Figures) -> str:
    network, parts = name.removeprefix("find-plan-"), []
    command = f"python -m benchmarks.find_plan --network {network} --steps {figures['steps']}"
    for model, found in figures["models"].items():
        tried = sorted((each for each in found["candidates"] if "measured" in each), key=lambda each: each["measured"])
        rows = [[each["candidate"], _ms(each["predicted"]), _ms(each["measured"])] for each in tried]
        quality = f"chosen {found['chosen_longer']:+.1%}, rank correlation {found['rank_correlation']:.3f}"
        title = f"`{model}` on four ranks, {network}: {quality}; load {figures['load']:.0f}"
        parts.append(_origin(title, command, figures) + _table(["candidate", "predicted ms", "measured ms"], rows))
    return "".join(parts)


SECTIONS: list[tuple[str, str, Callable[[str, Figures], str]]] = [
    ("Step time against torch", "step-", _step),
    ("ZeRO with tensor parallelism against FSDP2 with DTensor's", "on-mesh-", _on_mesh),
    ("One device, nothing exchanged", "one-device-", _one_device),
    ("One GPU, against torch.compile", "gpu-step-", _gpu_step),
    ("Plans that are found, and every other candidate", "find-plan-", _found_plans),
    ("Until the first step is done", "first-step-", _first_step),
    ("In frameworks, against their DDP", "frameworks-", _frameworks),
    ("Memory", "memory-", _memory),
    ("Forecasts against published measurements", "forecasts-", _published),
    ("Forecasts of Llama against published measurements", "llama-forecasts", _llama),
    ("Forecasts of our own steps", "forecast-steps-", _forecast_steps),
    ("Collective matmul: a tensor-parallel transformer block", "collective-matmul-forward", _collective_matmul),
    ("Collective matmul: forecasts", "collective-matmul-forecasts", _forecasts),
    ("Collective matmul: pieces", "collective-matmul-pieces", _pieces),
    ("Time that passes take", "passes", _passes),
    ("Overlap without a machine", "overlap-order-", _overlap_order),
    ("The tensor-parallel transform", "shard", _shard),
    ("Simplified models", "simplify-", _simplify),
    ("Buckets", "buckets-", _buckets),
    ("Reduce-scatter on gloo, and as all-to-alls with a local sum", "reduce-scatter-", _reduce_scatter),
]


if __name__ == "__main__":
    main()
