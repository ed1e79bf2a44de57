"""Plans of products that are no linear layers: einsum, stacks of matrices, normalized weights, halves that gate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossfade as cf
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.test_plan_convolutions import collectives, split

FILL = torch.ops.aten.masked_fill.Scalar


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / shape[0] ** 0.5)


class Heads(nn.Module):
    """Attention whose projections are parameters of three dims, multiplied by einsum."""

    def __init__(self, ellipsis: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = drawn(8, 4, 2), drawn(8, 4, 2), drawn(8, 4, 2), drawn(8, 4, 2)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = ("...i,ind->...nd", "...nd,ind") if ellipsis else ("bsi,ind->bsnd", "bsnd,ind->bsi")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum(self.up, x, weight) for weight in (self.q, self.k, self.v))
        seen = torch.einsum("bqnd,bknd->bnqk", q, k).softmax(-1)
        return self.norm(x + torch.einsum(self.down, torch.einsum("bnqk,bknd->bqnd", seen, v), self.o))


@pytest.mark.parametrize("ellipsis", [False, True])
def test_einsum_by_heads(ellipsis: bool) -> None:
    plan, local = split(nn.Sequential(Heads(ellipsis)), torch.randn(2, 5, 8))
    assert plan == Plan({**{f"0.{name}": "shard(1)" for name in "qkvo"}, "0": "all_reduce"})
    assert collectives(local) == ["tp_reduce"]
    assert plan.notes == ()


class Experts(nn.Module):
    """Every expert sees its share of the rows, all of them in one product."""

    def __init__(self, multiply: Any) -> None:
        super().__init__()
        self.up, self.down, self.multiply = drawn(3, 8, 32), drawn(3, 16, 8), multiply

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.multiply(x.view(3, -1, 8), self.up).chunk(2, -1)
        return self.multiply(F.silu(gate) * up, self.down).view(x.shape)


@pytest.mark.parametrize(
    "multiply",
    [torch.bmm, torch.matmul, lambda x, w: torch.einsum("ebi,eio->ebo", x, w)],
    ids=["bmm", "matmul", "einsum"],
)
def test_stacks_of_matrices_are_split_inside_each(multiply: Any) -> None:
    plan, local = split(nn.Sequential(Experts(multiply)), torch.randn(6, 8))
    assert plan == Plan({"0.up": {"style": "shard(2)", "blocks": 2}, "0.down": "shard(1)", "0": "moe_tp_experts"})
    assert collectives(local) == ["tp_reduce"]


class Gated(nn.Module):
    """The convolution of a conformer: halves that gate, each channel by itself, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(8, 32, 1), nn.Conv1d(16, 8, 1)
        self.each, self.norm = nn.Conv1d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(F.silu(self.norm(self.each(F.glu(self.enter(x), 1)))))


def test_halves_that_gate_are_blocks() -> None:
    plan, local = split(Gated(), torch.randn(2, 8, 6))
    assert plan == Plan({"enter": "packed_colwise", "each": "colwise", "leave": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


class Mixed(nn.Module):
    """The projections of a state space: a gate and what a convolution passes, which is cut up behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 48), nn.Linear(16, 8)
        self.each = nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        gate, rest = self.enter(x).split([16, 32], -1)
        one, other = self.each(rest.mT).mT.split([16, 16], -1)
        return self.leave(gate * one * other)


def test_a_convolution_on_the_way_is_cut_in_the_blocks_behind_it() -> None:
    plan, local = split(Mixed(), torch.randn(2, 6, 8))
    assert plan == Plan({"enter": {"style": "colwise", "blocks": 3}, "each": "packed_colwise", "leave": "rowwise"})
    assert collectives(local) == ["tp_reduce"]
    assert plan.resolve(torch.export.export(Mixed(), (torch.randn(2, 6, 8),)), 2).parameters["each.weight"].blocks == (
        16,
        16,
    )


def normalized(dim: int | None, parametrized: bool = False, inside: int = 16) -> nn.Module:
    """Two linear layers of which each row, each column or all has a norm that is learned."""
    bring = nn.utils.parametrizations.weight_norm if parametrized else nn.utils.weight_norm
    return nn.Sequential(bring(nn.Linear(8, inside), dim=dim), nn.GELU(), bring(nn.Linear(inside, 8), dim=dim))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(("parametrized", "dim", "sums"), [(False, 0, 2), (True, 0, 2), (True, 1, 2), (True, None, 3)])
def test_weights_with_norms_pair_and_ranks_add_up_squares(parametrized: bool, dim: int | None, sums: int) -> None:
    plan, local = split(normalized(dim, parametrized), torch.randn(3, 8))
    weight = "parametrizations.weight.original1" if parametrized else "weight_v"
    assert plan == Plan({f"0.{weight}": "colwise", "0.bias": "colwise", f"2.{weight}": "rowwise", "2": "all_reduce"})
    assert collectives(local) == ["tp_reduce"] * sums
    assert not any(verdict.reason == "gathered" for verdict in local.verdicts)


def test_padding_is_not_divided_by_its_norm() -> None:
    plan, local = split(normalized(0, True, 15), torch.randn(3, 8))
    padded = [name for name, lies in local.parameters.items() if getattr(lies, "units", 0)]
    assert padded == ["0.bias", *(f"{layer}.parametrizations.weight.original1" for layer in "02")]
    fills = [node.args[2] for node in local.exported.graph.find_nodes(op="call_function", target=FILL)]
    assert fills.count(1.0) == 1 and len(plan) == 4


class Standardized(nn.Module):
    """A convolution whose weight is brought to mean zero and variance one, for each channel that is put out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.leave = drawn(16, 8, 3), nn.Conv1d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.batch_norm(self.weight.reshape(1, 16, -1), None, None, training=True)
        return self.leave(F.conv1d(x, rows.reshape_as(self.weight)).relu())


def test_a_weight_is_split_along_the_dims_that_its_preparation_keeps() -> None:
    plan, local = split(Standardized(), torch.randn(2, 8, 6))
    assert plan == Plan({"weight": "shard(0)", "leave": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


def test_statistics_of_each_row_keep_rows_apart() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.leave = drawn(16, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            centred = self.weight - self.weight.mean(1, keepdim=True)
            return self.leave(F.linear(x, centred / self.weight.std(1, keepdim=True)).relu())

    plan, local = split(Rows(), torch.randn(2, 8))
    assert plan == Plan({"weight": "colwise", "leave": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


@pytest.mark.parametrize("pieces", [2, 4])
def test_a_weight_in_pieces_stays_whole(pieces: int) -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.leave = drawn(64, 8), nn.Linear(64 // pieces, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(sum(F.linear(x, piece) for piece in self.weight.chunk(pieces)))

    plan, _ = split(Pieces(), torch.randn(2, 8))
    assert plan == Plan({})
    assert "weight stays whole: what its weight is computed by needs all of it" in plan.notes


def test_a_dim_that_something_beside_needs_stays_whole() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.leave = drawn(16, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(F.linear(x, self.weight)) + self.weight.cumsum(0)[-1]

    plan, _ = split(Beside(), torch.randn(2, 8))
    assert plan == Plan({})
    assert "weight stays whole: what its weight is computed by needs all of it" in plan.notes


def test_a_dim_that_the_preparation_needs_stays_whole() -> None:
    class Behind(Standardized):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Conv1d(4, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            rows = F.batch_norm(self.weight.view(1, 16, -1), None, None, training=True)
            return F.conv1d(self.enter(x), rows.view_as(self.weight))

    plan, _ = split(Behind(), torch.randn(2, 4, 6))
    assert plan == Plan({})
    assert "enter.weight stays whole: conv1d needs all that it puts out" in plan.notes


class Alone(nn.Module):
    """A convolution in groups whose result is added to what came in: positions of speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm = nn.Conv1d(8, 8, 3, padding=1, groups=4), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.places(x.mT).mT)


def test_groups_in_no_pair_are_split_if_asked() -> None:
    plan, local = split(Alone(), torch.randn(2, 6, 8), singles=True)
    assert plan == Plan({"places": "colwise_gather_output"}) and plan.notes == ()
    assert collectives(local) == ["tp_gather"]
    exported = torch.export.export(Alone(), (torch.randn(2, 6, 8),))
    notes = plan.resolve(exported, 3).notes
    assert notes == tuple(f"places.{name} stays whole: 4 groups over 3 ranks" for name in ("weight", "bias"))


class Together(nn.Module):
    """Attention by einsum, a gated convolution, a convolution in groups and weights with norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.gated, self.alone = Heads(), Gated(), Alone()
        self.gated.norm = nn.Identity()
        self.rows = normalized(0, True, 15)  # padded

    def forward(self, x: Tensor) -> Tensor:
        x = self.alone(self.gated(self.heads(x).mT).mT)
        return x + self.rows(x)


class Rows(nn.Module):
    """Only weights with norms, of which there is a new collective in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = normalized(0, True, 15)  # padded

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x)


def train(kind: type[nn.Module]) -> tuple[list[float], list[float], float]:
    """Losses of three steps on ranks and on one device, and how far the weights are apart then."""
    model = kind()
    alone = copy.deepcopy(model)
    plan = Plan.megatron(torch.export.export(alone, (torch.randn(4, 6, 8),)), singles=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    step = cf.compile_step(model, F.mse_loss, optimizers[0], {"tp": 2}, tensor_parallel=plan, timeout=60)
    batches = [torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    found, expected = [float(step(x, y)) for x, y in batches], []
    for x, y in batches:
        loss = F.mse_loss(alone(x), y)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        expected.append(float(loss.detach()))
    parts = step.own_parts({name: whole.detach() for name, whole in alone.named_parameters()})
    worst = max(float((part - model.get_parameter(name).detach()).abs().max()) for name, part in parts.items())
    return found, expected, worst


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Rows, pytest.param(Together, marks=pytest.mark.models)])
def test_training_equals_one_device(ranks: Any, kind: type[nn.Module]) -> None:
    for found, expected, worst in ranks(2).run(train, kind):
        assert found == pytest.approx(expected, rel=1e-5)
        assert worst < 1e-6
