"""Writes the section "Optimizers" of docs/compatibility.md: each is trained for some steps beside eager torch.

python -m tests.capture.optimizer_table          # prints the section
python -m tests.capture.optimizer_table --write  # puts it between its markers, or at the page's end
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import crossfade as cf
from crossfade.capture.elementwise import reason_against_parts
from crossfade.capture.optimizer import parameter_names
from crossfade.capture.optimizer_state import ELEMENTWISE
from crossfade.errors import CrossfadeError
from tests.capture.test_any_optimizer import OF_TORCH, batches, eager, loss_of, matrices, model_of
from tests.capture.written_optimizers import WRITTEN

BEGIN, END = "<!-- optimizers: begin -->", "<!-- optimizers: end -->"
PAGE = Path(__file__).parent.parent.parent / "docs" / "compatibility.md"
MEANING = {
    "lion": "Lion, written by hand",
    "counting": "counts in Python, branches on them",
    "subclass": "AdamW with a step of its own",
    "slow": "a slow copy of each weight",
    "skips-first": "a first step unlike the others",
    "lamb": "LAMB, written by hand",
    "written-radam": "RAdam, written by hand",
    "averaging": "averages with sums in its group",
    "root-mean-square": "a number that becomes a tensor",
}


def muon(model: nn.Module) -> Optimizer:
    """Muon over the matrices; the other parameters are not trained."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return torch.optim.Muon(matrices(model), lr=0.02)  # type: ignore[arg-type]


def row(name: str, make: Any) -> str:
    """One optimizer: how far its weights are from eager torch's, and whether parts can be updated."""
    reference, model = model_of(), model_of()
    expected, optimizer = make(reference), make(model)
    kind = type(optimizer).__name__ if name not in MEANING else MEANING[name]
    try:
        step = cf.compile_step(model, loss_of, optimizer)
        for batch in batches():
            step(*batch)
    except CrossfadeError as error:
        return f"| {kind} | refused: {error.found} | | |"
    eager(reference, expected, batches())
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    apart = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    weight = model[0].weight
    known = type(optimizer) in ELEMENTWISE
    reason = "" if known else reason_against_parts(optimizer, parameter_names(model), weight, ((6, 5), (3, 5)))
    said = f"{apart:.0e}" if apart else "none"
    return f"| {kind} (`{name}`) | {said} | {step.captures} | {'refused' if reason else 'yes'} |"


def section() -> str:
    """The whole section, with its markers."""
    every = {**OF_TORCH, **{name: make for name, (make, _) in WRITTEN.items()}}
    every["lbfgs"] = lambda model: torch.optim.LBFGS(model.parameters())
    if hasattr(torch.optim, "Muon"):
        every["muon"] = muon
    rows = [row(name, make) for name, make in every.items()]
    return "\n".join(
        [
            BEGIN,
            "## Optimizers",
            "",
            "Seven steps beside eager torch on one device: the largest difference of a weight, how many programs were",
            "captured, and whether parts of parameters can be updated (ZeRO, tensor parallelism). With",
            '`data_parallel="replicate"` all work.',
            "",
            "| optimizer | difference | captures | in parts |",
            "|---|---|---|---|",
            *rows,
            "",
            f"With torch {torch.__version__}; `python -m tests.capture.optimizer_table --write` writes this.",
            END,
        ]
    )


def put(page: str, text: str) -> str:
    """A page with the section in the place of the old one, or at its end."""
    if BEGIN not in page:
        return (page.rstrip() or "# Compatibility") + "\n\n" + text + "\n"
    before, _, rest = page.partition(BEGIN)
    return before + text + rest.partition(END)[2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(put(PAGE.read_text() if PAGE.exists() else "", section()))
    else:
        print(section())
