"""Seconds until the first step is done: of `compile_step` on two ranks, with and without the cache, of `torch.compile`.

    python -m benchmarks.first_step                # GPT-2 small: 12 layers of width 768
    python -m benchmarks.first_step --growth       # 3, 6, 12 and 24 layers of width 64, without torch.compile
    python -m benchmarks.first_step --save

Everything runs in processes of its own, one contender after the other, in as many rounds as are asked for. The clock
runs from the call that compiles to the end of the first step, without imports and without building the model. `again`
starts on the folder that the first process has left: Crossfade's cache, or that of Inductor. Times are those of the
slowest rank; `later` is the second step, which compiles nothing. The processor's seconds of a rank are printed too: on
a shared machine they say more than the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import save
from benchmarks.two_ranks import slowest
from crossfade import Ranks, compile_step

GPT2 = {"layers": 12, "width": 768, "vocabulary": 50257}
GROWTH = [{"layers": layers, "width": 64, "vocabulary": 1000} for layers in (3, 6, 12, 24)]
MODES = ("replicate", "zero2")
TORCH = "torch.compile"
LIMIT = 3600.0
"""Seconds that a contender may take."""


def main() -> None:
    """Parse the command line, measure in processes of their own and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true", help="smaller models of 3 to 24 layers")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--contenders", nargs="+", choices=(*MODES, TORCH), help="all, or some of them")
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_contender(json.loads(options.worker))))
        return
    contenders = options.contenders or [*MODES, *([] if options.growth else [TORCH])]
    figures = measure(GROWTH if options.growth else [GPT2], options, contenders)
    _show(figures)
    if options.save:
        save(f"first-step-{'growth' if options.growth else 'gpt2'}", figures)


def measure(models: list[dict[str, int]], options: argparse.Namespace, contenders: Sequence[str]) -> dict[str, Any]:
    """What each contender took on each model: medians over the rounds."""
    rows = []
    for model in models:
        shape = {**model, "batch": options.batch, "sequence": options.sequence}
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for contender in contenders:
                for start, times in _cold_and_again(contender, shape):
                    found.setdefault(f"{contender}, {start}", []).append(times)
                    print(json.dumps({"layers": model["layers"], contender: start, **times}), file=sys.stderr)
        rows.append({**shape, "times": {name: _medians(several) for name, several in found.items()}})
    return {"rounds": options.rounds, "models": rows}


def _cold_and_again(contender: str, shape: dict[str, int]) -> Iterator[tuple[str, dict[str, float]]]:
    """A contender on empty folders, and once more on what it has left there."""
    with tempfile.TemporaryDirectory() as folder:
        for start in ("cold", "again"):
            yield start, _in_process({"contender": contender, **shape}, folder)


def _in_process(given: dict[str, Any], folder: str) -> dict[str, float]:
    variables = {
        **os.environ,
        "CROSSFADE_CACHE": f"{folder}/crossfade",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.first_step", "--worker", json.dumps(given)]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _contender(given: dict[str, Any]) -> dict[str, float]:
    if given["contender"] == TORCH:
        return _of_torch(given)
    with Ranks(2, timeout=LIMIT) as ranks:
        return ranks.run(_of_crossfade, given)[0]


def _of_crossfade(given: dict[str, Any]) -> dict[str, float]:
    """On each rank: the first step and a later one."""
    model, optimizer, batch = _training(given)
    start, busy = time.perf_counter(), time.process_time()
    mode = given["contender"]
    step = compile_step(model, _loss, optimizer, {"dp": 2}, data_parallel=mode, timeout=LIMIT)
    step({"input_ids": batch, "labels": batch})
    first, processor = time.perf_counter() - start, time.process_time() - busy
    start = time.perf_counter()
    step({"input_ids": batch, "labels": batch})
    later = time.perf_counter() - start
    return {"first": slowest(first), "later": slowest(later), "processor": slowest(processor)}


def _of_torch(given: dict[str, Any]) -> dict[str, float]:
    """In this process: forward and loss compiled by Inductor, backward, and the optimizer's own step."""
    torch.set_num_threads(1)
    model, optimizer, batch = _training(given)
    times = []
    start, busy = time.perf_counter(), time.process_time()
    compiled = torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss)
    for _ in range(2):
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    return {"first": times[0], "later": times[1], "processor": time.process_time() - busy - times[1]}


def _training(given: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    vocabulary, width = given["vocabulary"], given["width"]
    last = vocabulary - 1
    config = GPT2Config(
        n_layer=given["layers"],
        n_embd=width,
        n_head=width // 64,
        vocab_size=vocabulary,
        bos_token_id=last,
        eos_token_id=last,
    )
    model = GPT2LMHeadModel(config)
    batch = torch.randint(0, vocabulary, (given["batch"], given["sequence"]))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch


def _loss(output: Any) -> torch.Tensor:
    return output.loss


def _medians(several: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(times[name] for times in several) for name in several[0]}


def _show(figures: dict[str, Any]) -> None:
    console = Console()
    for model in figures["models"]:
        times = model["times"]
        title = f"{model['layers']} layers of width {model['width']}, batch {model['batch']} x {model['sequence']}"
        table = Table("", "first step", "against torch.compile", "against cold", "later step", "processor", title=title)
        reference = times.get("torch.compile, cold", {}).get("first")
        for name, found in times.items():
            cold = times[f"{name.split(',')[0]}, cold"]["first"]
            against = f"{found['first'] / reference:.2f}x" if reference else ""
            row = f"{found['first']:.1f} s", against, f"{found['first'] / cold:.2f}x", f"{found['later']:.2f} s"
            table.add_row(name, *row, f"{found['processor']:.1f} s")
        console.print(table)
    _show_growth(console, figures["models"])


def _show_growth(console: Console, models: list[dict[str, Any]]) -> None:
    """Seconds of a further layer, from one depth to the next: the same again where growth is linear."""
    for name in models[0]["times"]:
        added = [
            (b["times"][name]["processor"] - a["times"][name]["processor"]) / (b["layers"] - a["layers"])
            for a, b in itertools.pairwise(models)
        ]
        if added:
            layers = ", ".join(str(model["layers"]) for model in models)
            seconds = ", ".join(f"{each:.2f} s" for each in added)
            console.print(f"{name}: a further layer between {layers} layers: {seconds} of the processor")


if __name__ == "__main__":
    main()
