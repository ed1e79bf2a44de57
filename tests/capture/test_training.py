"""What a captured training step looks like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade.capture.accumulate import accumulate
from crossfade.capture.divide_batch import BatchLayout, batch_key
from crossfade.capture.optimizer import append_optimizer, parameter_names
from crossfade.capture.training import capture_forward_backward
from crossfade.errors import CaptureError
from crossfade.graph.program import OutputKind, Program, source_line
from crossfade.graph.verify import verify


class Scale(nn.Module):
    """One parameter, one multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def capture(model: nn.Module, *batch: Tensor, trained: list[str] | None = None, ranks: int = 1) -> Program:
    layout = BatchLayout.of(batch, ranks=ranks, accumulate=1, given="global")
    names = trained if trained is not None else [name for name, _ in model.named_parameters()]
    size = layout.micro_batch_size
    return capture_forward_backward(model, F.mse_loss, batch, batch_size=size, trained=names, layout=layout)


def text_of(program: Program) -> str:
    """A program's text; torch 2.14 and later trace `alias` where others trace `detach`."""
    return str(program).replace("alias", "detach")


def test_forward_loss_and_backward_are_one_graph() -> None:
    program = capture(Scale(), torch.ones(2, 3), torch.ones(2, 3))
    verify(program, recompute=True)
    assert text_of(program) == (
        'weight: f32[3] = parameter("weight")\n'
        'batch_0: f32[2, 3] = input("batch[0]")\n'
        'batch_1: f32[2, 3] = input("batch[1]")\n'
        "detach: f32[3] = aten.detach(weight)\n"
        "mul: f32[2, 3] = aten.mul.Tensor(batch_0, detach)\n"
        "mse_loss: f32[] = aten.mse_loss(mul, batch_1)\n"
        "ones_like: f32[] = aten.ones_like(mse_loss, pin_memory=False, memory_format=preserve_format)\n"
        "mse_loss_backward: f32[2, 3] = aten.mse_loss_backward(ones_like, mul, batch_1, 1)\n"
        "mul_1: f32[2, 3] = aten.mul.Tensor(mse_loss_backward, batch_0)\n"
        "sum_1: f32[1, 3] = aten.sum.dim_IntList(mul_1, [0], True)\n"
        "view: f32[3] = aten.view(sum_1, [3])\n"
        "detach_1: f32[] = aten.detach(mse_loss)\n"
        'return loss("loss", detach_1), gradient("weight", view)'
    )


def test_nodes_know_the_users_line() -> None:
    program = capture(Scale(), torch.ones(2, 3), torch.ones(2, 3))
    multiplication = next(node for node in program.graph.nodes if node.name == "mul")
    assert source_line(multiplication).startswith("test_training.py:")


def test_the_optimizer_turns_gradients_into_updates() -> None:
    model = Scale()
    program = capture(model, torch.ones(2, 3), torch.ones(2, 3))
    whole = append_optimizer(program, torch.optim.SGD(model.parameters(), lr=0.5), parameter_names(model))
    verify(whole)
    assert text_of(whole).splitlines()[-3:] == [
        "neg: float = operator.neg(lr_0)",
        "add: f32[3] = aten.add.Tensor(weight, view, alpha=neg)",
        'return loss("loss", detach_1), update("weight", add)',
    ]


def test_updates_come_in_the_order_gradients_are_ready() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    program = capture(model, torch.ones(2, 3), torch.ones(2, 2))
    whole = append_optimizer(program, torch.optim.SGD(model.parameters(), lr=0.5), parameter_names(model))
    updates = [out.name for out in whole.outputs if out.kind is OutputKind.UPDATE]
    assert [name.split(".")[0] for name in updates] == ["1", "1", "0", "0"]


def test_only_the_named_parameters_get_gradients() -> None:
    program = capture(nn.Linear(3, 2), torch.ones(2, 3), torch.ones(2, 2), trained=["bias"])
    assert [out.name for out in program.outputs] == ["loss", "bias"]


def test_accumulation_keeps_micro_batches_apart() -> None:
    program = accumulate(capture(Scale(), torch.ones(2, 3), torch.ones(2, 3)), 3)
    verify(program)
    x, y = torch.randn(6, 3), torch.randn(6, 3)
    loss, gradient = program.module()(torch.full((3,), 2.0), x, y)
    weight = torch.full((3,), 2.0, requires_grad=True)
    expected = sum(F.mse_loss(a * weight, b) for a, b in zip(x.chunk(3), y.chunk(3), strict=True)) / 3
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0])


def test_a_layout_gives_each_rank_its_part_of_each_micro_batch() -> None:
    batch = (torch.arange(8),)
    layout = BatchLayout.of(batch, ranks=2, accumulate=2, given="global")
    assert [layout.take(batch, rank)[0].tolist() for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_batch_key_sees_shapes_dtypes_and_values() -> None:
    key = batch_key((torch.ones(2), 3))
    assert key == batch_key((torch.zeros(2), 3))
    assert key != batch_key((torch.ones(3), 3))
    assert key != batch_key((torch.ones(2), 4))
    assert key != batch_key((torch.ones(2, dtype=torch.float64), 3))


def test_sparse_gradients_of_several_ranks_are_refused() -> None:
    batch = torch.ones(4, dtype=torch.int64), torch.ones(4, 3)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    capture(model, *batch)
    with pytest.raises(CaptureError, match=r"the gradient of 0\.weight is sparse.*Remedy: .*sparse=False"):
        capture(model, *batch, ranks=2)


class Transcribe(nn.Linear):
    """Letters from sounds, their loss in the place of an output."""

    def forward(self, x: Tensor) -> Tensor:
        letters, lengths = torch.ones(4, 2, dtype=torch.int64), torch.full((4,), 2)
        return F.ctc_loss(super().forward(x).log_softmax(-1).transpose(0, 1), letters, lengths + 1, lengths)


def test_torchs_own_that_reads_values_is_named_with_what_to_write_instead() -> None:
    norm = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3, momentum=None)))
    with pytest.raises(CaptureError, match=r"BatchNorm1d '1\.0' with momentum=None.*BatchNorm1d\(3, momentum=0\.1\)"):
        capture(norm, torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(CaptureError, match=r"F\.ctc_loss reads the lengths.*custom_op"):
        capture(Transcribe(3, 5), torch.ones(4, 3, 3), torch.ones(4, 3))
