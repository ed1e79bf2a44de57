"""Steps of all kinds, each trained for a while: what is said of them is compared between processes that share a cache.

python -m tests.compile.cached_steps lion replicate@2    # prints JSON, by name
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import crossfade as cf
from crossfade.compile.step import Step
from tests.capture.written_optimizers import WRITTEN, Counting, Noisy, Rooted

OF_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adadelta": ("Adadelta", {"lr": 1.0}),
    "nadam": ("NAdam", {"lr": 0.01}),
    "radam": ("RAdam", {"lr": 0.01}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "asgd": ("ASGD", {"lr": 0.1}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "adafactor": ("Adafactor", {"lr": 0.01}),
}
STEPS = 6


class Net(nn.Module):
    """Two layers, dropout, and numbers of batches that went by."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """What is compared with the target."""
        hidden: Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return hidden


class WithOutputs(Net):
    """Computes its own loss, and gives something beside it."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """The loss and what was predicted."""
        output = super().forward(x)
        return {"loss": nn.functional.mse_loss(output, target), "predicted": output.argmax(1)}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squares."""
    return nn.functional.mse_loss(output, target)


def batches() -> list[tuple[Tensor, Tensor]]:
    """As many as there are steps."""
    torch.manual_seed(7)
    return [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(STEPS)]


def account(step: Any, model: nn.Module, losses: list[float], captures: int) -> dict[str, Any]:
    """What a process says of a step that it has trained with."""
    held = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in model.parameters()
    ]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in held)
    facts = {
        name: text for name, text in step.report.facts.items() if name not in ("cache", "capture", "ranks compared")
    }
    return {
        "losses": losses,
        "weights": hashlib.sha256(weights).hexdigest(),
        "hit": step.pipeline.names()[0] == "cache",
        "cache": step.report.facts.get("cache", ""),
        "captures": captures,
        "program": str(step.program),
        "facts": facts,
        "verdicts": str(step.report.verdicts),
        "timeline": str(step.report.predicted),
        "passes": [record.spelling for record in step.report.records],
        "pipeline": [name for name in step.pipeline.names() if name != "cache"],
    }


def trained(optimizer_of: Callable[[nn.Module], Any], *, kind: Any = Net, mesh: Any = None, dropout: float = 0.0,
            after: Callable[[Step, int], None] = lambda step, index: None, plan: Any = None,
            **options: Any) -> dict[str, Any]:  # fmt: skip
    """A net trained for some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)) if plan else kind(dropout)
    chosen = {"tensor_parallel": plan} if plan else {}
    step = cf.compile_step(model, loss_of if kind is Net else None, optimizer_of(model), mesh, **chosen, **options)
    losses = []
    for index, batch in enumerate(batches()):
        losses.append(float(step(*batch)))
        after(step, index)
    with step.gathered():
        found = account(step, model, losses, step.captures)
    if step.outputs:
        found["outputs"] = {name: value.tolist() for name, value in step.outputs.items() if value.numel() < 99}
    step.close()
    return found


def gradients(mesh: Any = None, **options: Any) -> dict[str, Any]:
    """The same with an optimizer outside."""
    torch.manual_seed(0)
    model = Net()
    compiled = cf.compile_gradients(model, loss_of, mesh, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches():
        optimizer.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    found = account(compiled, model, losses, compiled.captures)
    compiled.close()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups."""
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "weight_decay": 0.0}, {"params": rest}], lr=0.01)


def decays(step: Step, index: int) -> None:
    """Change a rate, as schedulers do."""
    step.optimizer.param_groups[0]["lr"] *= 0.5


def of_torch(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """One of torch's."""
    kind, options = OF_TORCH[name]
    made: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: getattr(torch.optim, kind)(  # noqa: E731
        model.parameters(), **options
    )
    return made


PLAN = {"0": "colwise", "2": "rowwise"}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda name=name: trained(of_torch(name)) for name in OF_TORCH},
    **{name: lambda make=make: trained(make) for name, (make, _) in WRITTEN.items()},
    "noisy": lambda: trained(lambda model: Noisy(model.parameters())),
    "rooted": lambda: trained(lambda model: Rooted(model.parameters())),
    "groups": lambda: trained(adamw, after=decays),
    "clipped": lambda: trained(adamw, clip_grad_norm=0.1),
    "accumulated": lambda: trained(adamw, accumulate=2),
    "dropout": lambda: trained(adamw, dropout=0.5),
    "outputs": lambda: trained(adamw, kind=WithOutputs),
    "strict": lambda: trained(adamw, strict={"collectives": 4}),
    "gradients": gradients,
}
ON_RANKS: dict[str, Callable[[], dict[str, Any]]] = {
    "replicate@2": lambda: trained(adamw, mesh={"dp": 2}),
    "planned@2": lambda: trained(adamw, mesh={"dp": 2}, machine="loopback-gloo", dropout=0.5),
    "zero1@2": lambda: trained(adamw, mesh={"dp": 2}, data_parallel="zero1"),
    "zero2@2": lambda: trained(adamw, mesh={"dp": 2}, data_parallel="zero2"),
    "zero3@2": lambda: trained(adamw, mesh={"dp": 2}, data_parallel="zero3", accumulate=2, clip_grad_norm=0.1),
    "auto@2": lambda: trained(adamw, mesh={"dp": 2}, data_parallel="zero2", keep_whole="auto"),
    "counting@2": lambda: trained(lambda model: Counting(model.parameters()), mesh={"dp": 2}),
    "gradients@2": lambda: gradients({"dp": 2}),
    "gradients-zero2@2": lambda: gradients({"dp": 2}, data_parallel="zero2"),
    "plan@2": lambda: trained(adamw, mesh={"tp": 2}, plan=PLAN),
    "per-rank@2": lambda: trained(adamw, mesh={"dp": 2}, semantics="per-rank", dropout=0.5),
}


def on_rank(names: list[str]) -> dict[str, Any]:
    """Some cases, on a rank."""
    return {name: ON_RANKS[name]() for name in names}


def main(names: list[str]) -> dict[str, Any]:
    """Some cases in this process, others on two ranks that it starts."""
    found: dict[str, Any] = {name: CASES[name]() for name in names if name in CASES}
    if several := [name for name in names if name in ON_RANKS]:
        with cf.Ranks(2, timeout=300.0) as ranks:
            first, second = ranks.run(on_rank, several)
        for name in several:
            assert first[name]["losses"] == second[name]["losses"]
            found[name] = first[name] | {"hits": [first[name]["hit"], second[name]["hit"]]}
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
