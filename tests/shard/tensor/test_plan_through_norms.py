"""Plans where a norm, a scan or a write lies between two projections; what is found also runs and equals one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.lockstep import run_ranks

WIDTH = 16


def split(model: nn.Module, x: Tensor) -> tuple[Plan, LocalProgram]:
    """The plan for a model, and its program on two ranks, which computes what the model does."""
    exported = torch.export.export(model.eval(), (x,))
    plan = Plan.megatron(exported)
    local = localize(exported, plan.resolve(exported, 2), 2, "tp", Request())
    for (found,) in run_ranks(local, exported.state_dict, [x]):
        torch.testing.assert_close(found, model(x))
    return plan, local


def reduced(local: LocalProgram) -> list[tuple[int, ...]]:
    """The sizes of what is reduced, in order."""
    called = local.exported.graph.find_nodes(op="call_function", target=torch.ops.crossfade.tp_reduce.default)
    return [tuple(node.meta["val"].shape) for node in called]


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Normed(nn.Module):
    """Two projections with a norm between them, over what one puts out; added to a residual if asked."""

    def __init__(self, residual: str = "") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        twice = torch.cat([x, x], -1)
        wide = self.up(x)
        if self.residual == "before":
            wide = rms(wide + twice)
        elif self.residual == "after":
            wide = rms(wide) + twice
        else:
            wide = rms(wide)
        return self.down(wide)


def test_only_the_mean_of_a_norm_is_reduced() -> None:
    plan, local = split(Normed(), torch.randn(2, 3, WIDTH))
    assert plan == Plan({"up": "colwise", "down": "rowwise"})
    assert reduced(local) == [(2, 3, 1), (2, 3, WIDTH)]
    assert not any(verdict.reason == "gathered" for verdict in local.verdicts)


@pytest.mark.parametrize("residual", ["before", "after"])
def test_a_residual_is_not_split_for_its_norms(residual: str) -> None:
    plan, _ = split(Normed(residual), torch.randn(2, 3, WIDTH))
    assert plan == Plan({})
    assert plan.notes[0] == "up.weight stays whole: it is added to a residual that a norm needs all of"


class Latent(nn.Module):
    """A narrow projection and its norm before a pair that needs no norm's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(rms(self.narrow(x))).relu())


def test_pairs_without_a_norm_between_them_come_first() -> None:
    plan, local = split(Latent(), torch.randn(2, 3, WIDTH))
    assert plan == Plan({"up": "colwise", "down": "rowwise"})
    assert plan.notes == ("narrow.weight stays whole: what it feeds is split by columns itself",)
    assert reduced(local) == [(2, 3, WIDTH)]


class Mixer(nn.Module):
    """A gate, channels and their step sizes from one projection; a convolution and a scan, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 64 + 32 + 8), nn.Linear(64, WIDTH)
        self.conv = nn.Conv1d(32, 32, 3, groups=32, padding=2)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        gate, wide, step = self.into(x).split([64, 32, 8], -1)
        wide = nn.functional.silu(self.conv(wide.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        heads = wide.unflatten(-1, (4, 8)).repeat_interleave(2, dim=2)
        heads = nn.functional.pad(heads * nn.functional.softplus(step).unsqueeze(-1), [0, 0, 0, 0, 0, 2])
        scores = torch.einsum("blhp,bshp->blsh", heads, heads) * self.decay
        mixed = torch.einsum("blsh,bshp->blhp", scores, heads)[:, : x.shape[1]]
        return self.out(rms(mixed.flatten(2) * gate))


def test_convolutions_and_scans_keep_heads_apart() -> None:
    plan, local = split(Mixer(), torch.randn(2, 6, WIDTH))
    assert plan["into"].blocks == (64, 32, 8)  # type: ignore[union-attr]
    assert reduced(local) == [(2, 6, 1), (2, 6, WIDTH)]
    assert not any(verdict.reason == "gathered" for verdict in local.verdicts)


class Written(nn.Module):
    """Half of a buffer is written in place with what a projection puts out."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        kept = x.new_ones(3, 32)
        getattr(kept[:2], self.write)(wide[:2])
        return self.down(kept * wide)


@pytest.mark.parametrize("write", ["copy_", "add_"])
def test_what_is_written_elsewhere_is_followed_there(write: str) -> None:
    plan, local = split(Written(write), torch.randn(3, WIDTH))
    assert plan == Plan({"up": "colwise", "down": "rowwise"})
    assert reduced(local) == [(3, WIDTH)]


class PartlyNormed(nn.Module):
    """A norm over half of what a projection puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        return self.down(wide * torch.rsqrt(wide[..., :32].pow(2).mean(-1, keepdim=True) + 1))


def test_a_mean_over_a_part_of_the_channels_is_none_of_all() -> None:
    plan, _ = split(PartlyNormed(), torch.randn(2, 3, WIDTH))
    assert plan == Plan({})
    assert plan.notes[0] == "up.weight stays whole: parts of what it puts out overlap, or are not used"


class Tied(nn.Module):
    """A head that is the embedding's table, behind a projection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.dense, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(rms(self.dense(self.words(x)).relu()))


def test_a_table_of_words_is_not_split_for_a_norm() -> None:
    plan, _ = split(Tied(), torch.randint(0, 32, (2, 3)))
    assert plan == Plan({})
    assert plan.notes[0] == "dense.weight stays whole: what it feeds is a table of words, which is split by words"


def test_writes_that_torch_cannot_undo_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such view\nand a traceback")

    exported = torch.export.export(Written("copy_"), (torch.randn(3, WIDTH),))
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
    plan = Plan.megatron(exported)
    assert plan == Plan({})
    assert plan.notes[0] == "up.weight stays whole: copy_ needs all that it puts out"
    assert plan.notes[-1] == "writes in place are not followed, torch cannot undo them: no such view"
