"""One rank of the frameworks' loops, each by the framework's own DDP and by Crossfade; under torchrun."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH = 64, 12


def language_model() -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, **plain))


def texts(count: int, shortest: int = 3) -> list[dict[str, Tensor]]:
    """Padded samples, of which some have far fewer labels than others."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(count):
        length = int(torch.randint(shortest, LENGTH + 1, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def as_long_as_their_own(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest sample, as collators of the library pad it: of another length on each rank."""
    longest = max(int(sample["attention_mask"].sum()) for sample in samples)
    return {name: torch.stack([sample[name][:longest] for sample in samples]) for name in samples[0]}


def with_own_loss(kind: type) -> type:
    """A Trainer that adds a term to its model's loss, in the way of the library's guide."""

    class OwnLoss(kind):  # type: ignore[misc]
        weight = 0.01

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            loss = self.weight * outputs.logits.float().logsumexp(-1).square().mean()
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def trained_by(kind: type, folder: str, *, resume: bool = False, collator: Any = None, **more: Any) -> Any:
    """What a Trainer logs: accumulation, clipping, a schedule, bf16, evaluation, and checkpoints to resume from."""
    from transformers import TrainingArguments

    every_two = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1}
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, bf16=True,
        learning_rate=1e-2, lr_scheduler_type="cosine", max_grad_norm=0.5, use_cpu=True, ddp_backend="gloo",
        **every_two, **quiet, **more,
    )  # fmt: skip
    data = texts(16)
    trainer = kind(
        model=language_model(), args=arguments, train_dataset=data, eval_dataset=data[:4], data_collator=collator
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    logged = [
        [entry.get(key) for key in ("loss", "grad_norm", "eval_loss")] for entry in trainer.state.log_history[:-1]
    ]
    return logged, getattr(trainer, "gradients", None) and trainer.gradients.captures


def not_exchanged(kind: type, folder: str) -> str:
    """What a Trainer says whose training step computes a loss past `compute_loss`."""

    class Past(kind):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = model(**self._prepare_inputs(inputs)).loss
            self.accelerator.backward(loss)
            return loss.detach()

    try:
        trained_by(Past, folder)
    except Exception as error:
        return str(error)
    return ""


def trainer_job(folder: Path) -> Any:
    from transformers import Trainer as Plain

    from crossfade.integrations.transformers import Trainer

    return {
        "ddp": trained_by(Plain, f"{folder}/plain"),
        "crossfade": trained_by(Trainer, f"{folder}/ours"),
        "resumed": trained_by(Trainer, f"{folder}/ours", resume=True),
        "smoothed by ddp": trained_by(Plain, f"{folder}/smooth", label_smoothing_factor=0.1),
        "smoothed": trained_by(Trainer, f"{folder}/ours_smooth", label_smoothing_factor=0.1),
        "own loss by ddp": trained_by(with_own_loss(Plain), f"{folder}/plain_own"),
        "own loss": trained_by(with_own_loss(Trainer), f"{folder}/ours_own"),
        "lengths by ddp": trained_by(Plain, f"{folder}/plain_lengths", collator=as_long_as_their_own),
        "lengths": trained_by(Trainer, f"{folder}/ours_lengths", collator=as_long_as_their_own),
        "not exchanged": not_exchanged(Trainer, f"{folder}/not_exchanged"),
    }


def accelerate_job(folder: Path) -> Any:
    from accelerate import Accelerator

    from crossfade.integrations.accelerate import compile_gradients

    def train(ours: bool) -> list[float]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = language_model()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(texts(32, LENGTH), batch_size=4)  # type: ignore[arg-type]
        gradients = compile_gradients(accelerator, model) if ours else None
        prepared = model if ours else accelerator.prepare(model)
        optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = gradients(batch) if gradients else prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.save_state(str(folder / f"state-{ours}"))
        return [*losses, sum(float(value.detach().abs().sum()) for value in model.parameters())]

    from accelerate.state import AcceleratorState

    found = {}
    for name, ours in (("ddp", False), ("crossfade", True)):
        AcceleratorState._reset_state(reset_partial_state=False)
        found[name] = train(ours)
    return found


def lightning_job(folder: Path) -> Any:
    import lightning

    from crossfade.integrations.lightning import CrossfadeStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self, scale: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
            self.seen: list[list[float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, labels = batch
            logits = self.net(inputs)
            loss = F.cross_entropy(logits, labels) * self.hparams.scale
            self.log("loss", loss, sync_dist=True)
            self.log_dict({"accuracy": (logits.argmax(-1) == labels).float().mean()}, sync_dist=True)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("held_out", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append([float(self.trainer.callback_metrics[name]) for name in ("loss", "accuracy")])
            self.hparams.scale = 0.5 if len(self.seen) >= 4 else 1.0

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.NAdam(self.parameters(), lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class WithMore(Classifier):
        """Returns more than a loss, and takes the number of a batch by another name."""

        def training_step(self, batch: Any, _: int) -> Any:  # type: ignore[override]
            return {"loss": super().training_step(batch, 0), "size": batch[0].sum(), "words": "as they are"}

        def on_train_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
            assert outputs["words"] == "as they are"
            self.seen.append([float(outputs["size"] - batch[0].sum()), outputs["loss"].dim()])

    class Kept(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append([])
            return super().training_step(batch, batch_idx)

    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__()
            from torchmetrics.classification import MulticlassAccuracy

            self.measure = MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.measure(self.net(batch[0]), batch[1])
            return super().training_step(batch, batch_idx)

    class ByIndex(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (batch_idx + 1)

    def fit(strategy: Any, kind: type[Classifier] = Classifier) -> Any:
        lightning.seed_everything(0, verbose=False)
        generator = torch.Generator().manual_seed(3)
        inputs, labels = torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator)
        data = torch.utils.data.TensorDataset(inputs, labels)
        loader, held_out = (torch.utils.data.DataLoader(part, batch_size=8) for part in (data, data))
        quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, gradient_clip_val=0.5,
            accumulate_grad_batches=2, num_sanity_val_steps=0, **quiet,
        )  # fmt: skip
        module = kind()
        trainer.fit(module, loader, held_out)
        captures = strategy.gradients.captures if isinstance(strategy, CrossfadeStrategy) else None
        return [*module.seen, [float(trainer.callback_metrics["held_out"])]], captures

    def refused(kind: type[Classifier]) -> str:
        try:
            fit(CrossfadeStrategy(process_group_backend="gloo"), kind)
        except Exception as error:  # Lightning may raise another from it
            return str(error)
        return ""

    return {
        "ddp": fit("ddp"),
        "crossfade": fit(CrossfadeStrategy(process_group_backend="gloo")),
        "more by ddp": fit("ddp", WithMore),
        "more": fit(CrossfadeStrategy(process_group_backend="gloo"), WithMore),
        "refused": [refused(kind) for kind in (ByIndex, Kept, Measured)],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, into = sys.argv[1], Path(sys.argv[2])
    found = {"trainer": trainer_job, "accelerate": accelerate_job, "lightning": lightning_job}[name](into)
    (into / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
