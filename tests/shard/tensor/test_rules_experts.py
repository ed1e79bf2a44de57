"""Routed experts split inside each expert, by the kernels that models compute them with by default."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import crossfade as cf
from crossfade.errors import PlanError
from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.models import zoo
from tests.shard.tensor.lockstep import run_ranks

TOKENS, WIDTH, INSIDE, EXPERTS = 6, 16, 32, 3


class Experts(nn.Module):
    """The best expert of each token, tokens sorted by expert and multiplied in groups."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        dtype = torch.bfloat16 if kernel == "torch" else torch.float32
        self.kernel = kernel
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH, dtype=dtype) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH, dtype=dtype) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen, order = self.router(x).argmax(-1).sort()
        ends = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        if self.kernel == "torch":
            grouped = torch.ops.aten._grouped_mm
        inside = nn.functional.gelu(grouped(x[order], self.up.mT, ends))
        return grouped(inside, self.down, ends)[order.argsort()]


@pytest.mark.parametrize("kernel", ["torch", "transformers"])
def test_experts_are_found_and_equal_one_device(kernel: str) -> None:
    importlib.import_module("transformers.integrations.moe")  # which makes its operator
    torch.manual_seed(0)
    model = nn.Sequential(Experts(kernel))
    x = torch.randn(TOKENS, WIDTH, dtype=model[0].up.dtype)
    exported = torch.export.export(model, (x,))
    plan = Plan.megatron(exported)
    assert plan == Plan({"0.up": "shard(1)", "0.down": "shard(1)", "0": "moe_tp_experts"})
    split = localize(exported, plan.resolve(exported, 2), 2, "tp", Request())
    for (found,) in run_ranks(split, exported.state_dict, [x]):
        torch.testing.assert_close(found, model(x), rtol=0.05 if kernel == "torch" else 1e-5, atol=0.05)


def test_rows_that_the_kernel_cannot_read_are_refused() -> None:
    """Of bfloat16, a rank would have rows of 4 bytes: torch's kernel wants multiples of 16."""
    model = nn.Sequential(Experts("torch"))
    exported = torch.export.export(model, (torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16),))
    with pytest.raises(PlanError, match="multiples of 16 bytes"):
        cf.shard(exported, {"tp": 8}, {"0.up": "shard(2)"}, rank=0)


def test_the_plan_is_the_same_however_experts_are_computed() -> None:
    batched = replace(zoo.architecture("mixtral"), name="mixtral, batched", experts="batched_mm")
    assert Plan.megatron(batched.export()) == Plan.megatron(zoo.architecture("mixtral").export())
