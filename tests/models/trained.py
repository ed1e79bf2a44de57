"""Real architectures trained as their library means them to be: padded batches, ignored labels, dropout, attention of
either kind; by `compile_step` on any number of ranks, and by eager torch in one process.

    training = Training("bert", "sdpa")
    difference(train_compiled(training, ranks=1), train_eager(training))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import crossfade as cf
from tests.models import zoo

SAMPLES, LENGTH, STEPS = 4, 12, 3
LENGTHS = ((12, 7, 5, 10), (4, 12, 9, 12), (12, 12, 3, 6))
"""How much of each sample is not padding, in each step: the ranks' parts never have as many tokens."""

IGNORED = -100


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    name: str
    attention: str
    checkpointed: str = ""
    """Whether activations are computed again: "" not, or "reentrant" or "non-reentrant"."""
    adapted: bool = False
    """Whether low-rank adapters (LoRA) are trained, on a frozen base."""
    use_cache: bool | None = None
    """Whether the model also returns keys and values; None for the library's default."""
    dropout: float = 0.1
    """What dropout of attention is where the library's default is none."""

    def __str__(self) -> str:
        cache = "" if self.use_cache is None else f"use_cache={self.use_cache}"
        return ", ".join(
            filter(None, (self.name, self.attention, self.checkpointed, "adapted" if self.adapted else "", cache))
        )


@dataclass(frozen=True)
class Trained:
    """Losses of the steps, the parameters after them, the next random number, and what was warned of on this rank."""

    losses: list[float]
    parameters: dict[str, Tensor]
    next_number: float
    warned: str = ""


def trainings() -> Iterator[Training]:
    """Every architecture that has a loss, with every attention that it has."""
    for architecture in zoo.ARCHITECTURES:
        for attention in attentions(architecture):
            yield Training(architecture.name, attention)


def attentions(architecture: zoo.Architecture) -> tuple[str, ...]:
    """The implementations of attention that an architecture has, by the library's names."""
    return ("eager",) if architecture.attention == "eager" else ("sdpa", "eager")


def model_of(training: Training) -> nn.Module:
    """The model in training mode, with its library's defaults; attention drops out in any case."""
    transformers = zoo.library()
    architecture = zoo.architecture(training.name)
    config = getattr(transformers, architecture.configuration)(**architecture.options)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        for field in ("attention_dropout", "attention_probs_dropout_prob"):
            if getattr(part, field, None) == 0.0:
                setattr(part, field, training.dropout)
    config._attn_implementation = training.attention
    if training.use_cache is not None:
        config.use_cache = training.use_cache
    torch.manual_seed(0)
    model = getattr(transformers, architecture.model)(config).train()
    if training.checkpointed:
        reentrant = training.checkpointed == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return adapted(model) if training.adapted else model


def adapted(base: nn.Module) -> nn.Module:
    """A frozen model with adapters on its attention's projections; with dropout, and none of their weights zero."""
    import peft

    projections = [name for name in ("q_proj", "v_proj", "c_attn") if any(name in key for key in base.state_dict())]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=projections))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model.train()


def batch_of(name: str, step: int) -> dict[str, Any]:
    """A batch of padded samples with labels, of which padding and every fifth are ignored."""
    generator = torch.Generator().manual_seed(step)
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS[step % len(LENGTHS)])[:, None]).long()
    ids = torch.randint(4, zoo.VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels = ids.masked_fill((mask == 0) | (ids % 5 == 0), IGNORED)
    padded = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    size = zoo.PATCH * zoo.PATCHES
    images = torch.randn(SAMPLES, 3, size, size, generator=generator)
    match name:
        case "vit":
            return {"pixel_values": images, "labels": torch.randint(0, 8, (SAMPLES,), generator=generator)}
        case "clip":
            return {**padded, "pixel_values": images, "return_loss": True}
        case "whisper":
            return {"input_features": torch.randn(SAMPLES, 12, 64, generator=generator), "labels": labels}
        case _:
            return {**padded, "labels": labels}


def loss_of(output: Any) -> Tensor:
    return output.loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; of gradients that are zero but for rounding (biases of keys), its epsilon makes no steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def train_eager(training: Training) -> Trained:
    """In one process, by eager torch."""
    model = model_of(training)
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(training.name, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _trained(model, losses)


def train_compiled(training: Training, ranks: int, options: dict[str, Any] | None = None) -> Trained:
    """By `compile_step`, on so many ranks."""
    model = model_of(training)
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mesh = {"dp": ranks} if ranks > 1 else None
        step = cf.compile_step(model, loss_of, optimizer, mesh, timeout=300.0, **(options or {}))
        losses = [step(batch_of(training.name, index)).item() for index in range(STEPS)]
    unproved = [str(warning.message) for warning in said if "losses of parts" in str(warning.message)]
    return _trained(model, losses, "".join(unproved[:1]))


def _trained(model: nn.Module, losses: list[float], warned: str = "") -> Trained:
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
    return Trained(losses, whole, float(torch.rand(())), warned)


def difference(found: Trained, expected: Trained) -> float:
    """The largest difference of losses and parameters, relative to the largest of each; infinite for other numbers."""
    if found.next_number != expected.next_number:
        return float("inf")
    pairs = [(torch.tensor(found.losses), torch.tensor(expected.losses))]
    pairs += [(found.parameters[name], value) for name, value in expected.parameters.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs)
