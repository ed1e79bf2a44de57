"""A step of Hugging Face's Trainer, Accelerate and Lightning: by the framework's own DDP, and by Crossfade instead.

    python -m benchmarks.frameworks                                  # two ranks on loopback
    sudo .venv/bin/python -m benchmarks.frameworks --network 1gbit   # two hosts with a rate-limited link
    python -m benchmarks.frameworks --accumulate 4                   # four micro-batches a step

Both train the same small GPT-2 (8 layers of width 384 by default) in the same processes, in turns; the first steps of
each turn are not counted, since Crossfade captures there. Times are medians of the slower rank.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import network
from benchmarks.figures import save
from benchmarks.two_ranks import slowest

FRAMEWORKS = ("trainer", "accelerate", "lightning")
TURNS, UNCOUNTED = ("ddp", "crossfade", "ddp", "crossfade"), 3


def main() -> None:
    """Parse the command line, measure each framework in processes of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="loopback", help="loopback, or a rate such as 1gbit")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--steps", type=int, default=10, help="counted in each turn")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--save", action="store_true", help="keep the figures as JSON")
    parser.add_argument("--worker", metavar="FRAMEWORK", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return
    if options.network != "loopback" and (reason := network.reason_against()) is not None:
        raise SystemExit(f"found --network {options.network}, but {reason}. Remedy: run as root, or leave it out.")
    times = {framework: _measured(framework, options) for framework in options.frameworks}
    _show(times, options)
    if options.save:
        kept = {name: getattr(options, name) for name in ("network", "steps", "accumulate", "layers", "width")}
        save(f"frameworks-{options.network}-accumulate-{options.accumulate}", {**kept, "seconds": times})


def _measured(framework: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--worker", framework, "--into", folder, "--steps", str(options.steps)]
        arguments += ["--accumulate", str(options.accumulate), "--layers", str(options.layers)]
        arguments += ["--width", str(options.width)]
        if options.network == "loopback":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "benchmarks.frameworks", *arguments]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=1800)
        else:
            with network.two_hosts(options.network) as hosts:
                hosts.torchrun("benchmarks.frameworks", *arguments, timeout=1800)
        found: dict[str, float] = json.loads((Path(folder) / "0.json").read_text())
        return found


def _work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = {"trainer": _by_trainer, "accelerate": _by_accelerate, "lightning": _by_lightning}[options.worker]
    seconds: dict[str, list[float]] = {name: [] for name in TURNS}
    for name in TURNS:
        ticks = [time.perf_counter()]
        with contextlib.redirect_stdout(sys.stderr):
            train(name == "crossfade", options, lambda ticks=ticks: ticks.append(time.perf_counter()))
        seconds[name] += [after - before for before, after in itertools.pairwise(ticks)][UNCOUNTED:]
    found = {name: slowest(statistics.median(each)) for name, each in seconds.items()}
    if dist.get_rank() == 0:
        (Path(options.into) / "0.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _model(options: argparse.Namespace) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 64, "n_positions": 128}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=1024, **sizes, **plain))


def _texts(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """As many samples as both ranks need, two in a micro-batch."""
    generator = torch.Generator().manual_seed(1)
    count = 2 * 2 * options.accumulate * (options.steps + UNCOUNTED)
    ids = torch.randint(0, 1024, (count, 128), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def _by_trainer(ours: bool, options: argparse.Namespace, tick: Callable[[], None]) -> None:
    import transformers

    from crossfade.integrations.transformers import Trainer

    class Ticks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=2, gradient_accumulation_steps=options.accumulate, report_to=[],
            max_steps=options.steps + UNCOUNTED, use_cpu=True, ddp_backend="gloo", save_strategy="no",
            disable_tqdm=True, logging_strategy="no", max_grad_norm=0.0,
        )  # fmt: skip
        kind = Trainer if ours else transformers.Trainer
        kind(model=_model(options), args=arguments, train_dataset=_texts(options), callbacks=[Ticks()]).train()


def _by_accelerate(ours: bool, options: argparse.Namespace, tick: Callable[[], None]) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from crossfade.integrations.accelerate import compile_gradients

    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    model = _model(options)
    gradients = compile_gradients(accelerator, model) if ours else None
    prepared = model if ours else accelerator.prepare(model)
    loader = torch.utils.data.DataLoader(_texts(options), batch_size=2)  # type: ignore[arg-type]
    optimizer, loader = accelerator.prepare(torch.optim.AdamW(prepared.parameters()), loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = gradients(batch) if gradients else prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            tick()


def _by_lightning(ours: bool, options: argparse.Namespace, tick: Callable[[], None]) -> None:
    import lightning

    from crossfade.integrations.lightning import CrossfadeStrategy

    class Texts(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(options)

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % options.accumulate == 0:
                tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    strategy = CrossfadeStrategy(process_group_backend="gloo") if ours else "ddp"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2 // nodes, num_nodes=nodes, max_epochs=1,
        accumulate_grad_batches=options.accumulate, strategy=strategy, **quiet,
    )  # fmt: skip
    trainer.fit(Texts(), torch.utils.data.DataLoader(_texts(options), batch_size=2))  # type: ignore[arg-type]


def _show(times: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    title = f"{options.layers} layers of width {options.width}, {options.accumulate} micro-batches a step"
    table = Table("framework", "its DDP", "Crossfade", "ratio", title=f"{title}, {options.network}")
    for framework, found in times.items():
        row = (f"{1e3 * found[name]:.0f} ms" for name in ("ddp", "crossfade"))
        table.add_row(framework, *row, f"{found['ddp'] / found['crossfade']:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
