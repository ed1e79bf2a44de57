"""Models that ask whether they are compiled: while captured they are told so, and by nobody afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from crossfade import compile_step


class Asks(nn.Module):
    """Looks at its numbers, unless it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x > 0).all()):
            return self.linear(x)
        return self.linear(x.relu())


def test_the_path_of_compiled_models_is_captured_and_the_flag_is_given_back() -> None:
    model = Asks()
    step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()))
    step(torch.ones(2, 2), torch.ones(2, 2))
    assert "aten.relu" in str(step.program)
    assert not torch.compiler.is_compiling()


def small_bert(**options: Any) -> nn.Module:
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **options)
    config.intermediate_size, config.max_position_embeddings = 32, 16
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForMaskedLM(config)


def small_llama(**options: Any) -> nn.Module:
    config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **options)
    config.intermediate_size, config.max_position_embeddings, config.num_key_value_heads = 32, 16, 1
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "attention", "checkpointed"),
    [
        (small_bert, "sdpa", True),
        (small_bert, "eager", False),
        (small_llama, "sdpa", False),
        (small_llama, "eager", True),
    ],
)
def test_padded_batches_of_hugging_face_train_as_in_eager_torch(build: Any, attention: str, checkpointed: bool) -> None:
    torch.manual_seed(0)
    dropout = (
        {} if build is small_llama else dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    )
    model = build(attn_implementation=attention, **dropout).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    eager = copy.deepcopy(model)
    ids = torch.randint(0, 32, (3, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = mask[1, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, eager))
    step = compile_step(model, lambda output: output.loss, ours)
    for _ in range(3):
        theirs.zero_grad()
        expected = eager(**batch).loss
        expected.backward()
        theirs.step()
        assert step(batch).item() == pytest.approx(expected.item(), rel=1e-6)
    for trained, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(trained, wanted, rtol=1e-4, atol=1e-6)
