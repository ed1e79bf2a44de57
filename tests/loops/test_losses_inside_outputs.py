"""The model's own loss, without a loss function: Hugging Face outputs, dicts, tuples; and what tokenizers return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from tests.loops.plain import adamw, batches, network, same, trained

transformers = pytest.importorskip("transformers")


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an object": lambda loss, logits: Output(logits, loss),
    "a dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "a tuple that begins with it": lambda loss, logits: (loss, logits),
    "a named tuple": lambda loss, logits: Named(logits, loss),
    "a ModelOutput": lambda loss, logits: transformers.utils.ModelOutput(loss=loss, logits=logits),
}
WITHOUT: dict[str, Callable[[Tensor], Any]] = {
    "Output": Output,
    "dict": lambda logits: {"logits": logits},
    "tuple": lambda logits: (logits, logits),
    "NoneType": lambda logits: None,
}


class Returning(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.inside, self.form = network(), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.inside(x)
        return self.form(F.mse_loss(logits, y), logits)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_found(form: str) -> None:
    reference, model = network(), Returning(FORMS[form])
    expected = trained(reference, adamw(reference), batches(2))
    step = cf.compile_step(model, None, adamw(model))
    assert [step(x, y).item() for x, y in batches(2)] == expected
    same(model.inside, reference)


@pytest.mark.parametrize("kind", WITHOUT)
def test_an_output_without_a_loss_says_what_to_pass(kind: str) -> None:
    model = Returning(lambda loss, logits: WITHOUT[kind](logits))
    step = cf.compile_step(model, None, adamw(model))
    with pytest.raises(
        cf.CaptureError, match=rf"returned {kind} without a loss: .* Remedy: pass labels .* or a loss_fn"
    ):
        step(*batches(1)[0])


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def encodings() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(3)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in found]


def test_a_hugging_face_batch_by_names_as_a_dict_and_as_the_tokenizer_returns_it() -> None:
    reference, model = gpt2(), gpt2()
    data = encodings()
    optimizer = adamw(reference)
    expected = trained(reference, optimizer, [(batch,) for batch in data], lambda model, batch: model(**batch).loss)
    step = cf.compile_step(model, None, adamw(model))
    losses = [step(**data[0]), step(data[1]), step(transformers.BatchEncoding(data[2]))]
    torch.testing.assert_close([loss.item() for loss in losses], expected, rtol=1e-6, atol=1e-6)
    assert step.captures == 2  # by name, and as a dict


def test_without_labels_it_says_to_pass_them() -> None:
    model = gpt2()
    step = cf.compile_step(model, None, adamw(model))
    with pytest.raises(cf.CaptureError, match=r"CausalLMOutputWithCrossAttentions without a loss: .* pass labels"):
        step(input_ids=encodings()[0]["input_ids"])
