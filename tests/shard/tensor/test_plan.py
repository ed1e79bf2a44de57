"""Plans: what entries name, how they are settled, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torch.export import ExportedProgram

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan import Fused, ModuleBoundary, Plan, Style


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Conv1D(nn.Module):
    """Keeps its weight as [in, out], as gpt2 does."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inside, outside)), nn.Parameter(torch.randn(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Model(nn.Module):
    """A token model with a tied head, a per-head parameter, stacked experts, a norm, buffers and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.fused = Conv1D(8, 24)
        self.norm = nn.LayerNorm(8)
        self.sinks = nn.Parameter(torch.randn(4))
        self.experts = nn.Parameter(torch.randn(2, 6, 8))
        self.register_buffer("slopes", torch.randn(4))
        self.register_buffer("scale", torch.randn(8), persistent=False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = x + layer(self.norm(x))
        x = sum(self.fused(x).chunk(3, -1), x)
        heads = (x.unflatten(-1, (4, 2)) * (self.sinks + self.slopes)[:, None]).flatten(-2)
        mixed = torch.einsum("bsi,eoi->beso", x, self.experts)
        return self.head(heads), mixed


@pytest.fixture(scope="module")
def exported() -> ExportedProgram:
    return torch.export.export(Model(), (torch.zeros(2, 5, dtype=torch.long),))


def split(exported: ExportedProgram, entries: dict[str, object], name: str, ranks: int = 2) -> tuple:
    sharding = Plan(entries).resolve(exported, ranks).parameters[name]
    return sharding.dim, sharding.blocks, sharding.local_shape


def test_a_plan_is_a_mapping() -> None:
    with pytest.raises(PlanError, match="a plan cannot be a list"):
        Plan(["colwise"])  # type: ignore[arg-type]
    plan = Plan({"a": "colwise", "b": Fused("colwise", 3)})
    assert list(plan) == ["a", "b"] and len(plan) == 2 and plan["a"] == Style("colwise")
    assert plan == Plan({"b": Fused(ColwiseParallel, 3), "a": ColwiseParallel()}) != Plan({"a": "colwise"})
    assert hash(plan) == hash(Plan(dict(plan)))
    assert pickle.loads(pickle.dumps(plan)) == plan


# --- what they name -----------------------------------------------------------------------------------------------


def test_linear_layers(exported: ExportedProgram) -> None:
    found = Plan({"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}).resolve(exported, 2)
    assert {
        name: (sharding.dim, sharding.local_shape) for name, sharding in found.parameters.items() if "layers" in name
    } == {
        f"layers.{layer}.{name}": how
        for layer in (0, 1)
        for name, how in {
            "up.weight": (0, (16, 8)),
            "up.bias": (0, (16,)),
            "down.weight": (1, (8, 16)),
            "down.bias": (None, (8,)),
        }.items()
    }
    assert found.boundaries["layers.1.down"] == ModuleBoundary("layers.1.down", None, "replicate")
    assert set(found.boundaries) == {"layers.0.down", "layers.1.down"}
    assert found.parameters["norm.weight"].dim is None and found.parameters["norm.weight"].style == ""
    assert "slopes" not in found.parameters


def test_outputs_that_the_style_asks_for(exported: ExportedProgram) -> None:
    plan = Plan({"layers.0.up": "colwise_rep", "layers.0.down": RowwiseParallel(output_layouts=Shard(1))})
    found = plan.resolve(exported, 2).boundaries
    assert found["layers.0.up"].output == "replicate"
    assert found["layers.0.down"].output == "shard(1)"


def test_sequence_parallel_modules_keep_their_parameters(exported: ExportedProgram) -> None:
    found = Plan({"norm": SequenceParallel()}).resolve(exported, 2)
    assert found.parameters["norm.weight"].dim is None
    assert found.boundaries == {"norm": ModuleBoundary("norm", "shard(1)", "shard(1)")}


@pytest.mark.parametrize(("style", "dim"), [("colwise", 1), ("rowwise", 0), ("embedding_rowwise", 0)])
def test_embeddings(exported: ExportedProgram, style: str, dim: int) -> None:
    found = Plan({"embed": style}).resolve(exported, 2)
    assert found.parameters["head.weight"].dim == dim
    assert ("embed" in found.boundaries) == (style != "colwise")
    assert all(boundary.output == "replicate" for boundary in found.boundaries.values())


@pytest.mark.parametrize(
    ("style", "weight", "bias"),
    [
        ("colwise", (1, (), (8, 12)), (0, (), (12,))),
        ("rowwise", (0, (), (4, 24)), (None, (), (24,))),
        (Fused("colwise", 3), (1, (8, 8, 8), (8, 12)), (0, (8, 8, 8), (12,))),
        (Fused("colwise", (16, 4, 4)), (1, (16, 4, 4), (8, 12)), (0, (16, 4, 4), (12,))),
    ],
)
def test_weights_kept_transposed(exported: ExportedProgram, style: object, weight: tuple, bias: tuple) -> None:
    assert split(exported, {"fused": style}, "fused.weight") == weight
    assert split(exported, {"fused": style}, "fused.bias") == bias


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        (Shard(0), "sinks", (0, (), (2,))),
        ("local_rowwise", "sinks", (0, (), (2,))),
        ("colwise", "experts", (1, (), (2, 3, 8))),
        ("rowwise", "experts", (2, (), (2, 6, 4))),
        ("packed_rowwise", "experts", (2, (4, 4), (2, 6, 4))),
        ("grouped_gemm", "experts", (0, (), (1, 6, 8))),
        (Shard(-1), "experts", (2, (), (2, 6, 4))),
        ("colwise", "fused.weight", (1, (), (8, 12))),
        ("colwise", "layers.0.up.weight", (0, (), (16, 8))),
        ([Shard(0)], "slopes", (0, (), (2,))),
        (Shard(0), "scale", (0, (), (4,))),
        (Replicate(), "sinks", (None, (), (4,))),
    ],
)
def test_any_parameter_or_buffer_can_be_named(
    exported: ExportedProgram, entry: object, name: str, expected: tuple
) -> None:
    assert split(exported, {name: entry}, name) == expected


def test_blocks_are_split_one_by_one(exported: ExportedProgram) -> None:
    fused = Plan({"fused": Fused("colwise", (16, 4, 4))}).resolve(exported, 2).parameters["fused.weight"]
    assert fused.local_blocks(0) == (slice(0, 8), slice(16, 18), slice(20, 22))
    assert fused.local_blocks(1) == (slice(8, 16), slice(18, 20), slice(22, 24))


def test_sizes_that_do_not_divide_are_marked(exported: ExportedProgram) -> None:
    found = Plan({"embed": "rowwise", "layers.0.up": "colwise"}).resolve(exported, 8)
    head = found.parameters["head.weight"]
    assert head.units == 12 and not found.parameters["layers.0.up.weight"].units
    assert [head.local_blocks(rank)[0] for rank in (0, 5, 6, 7)] == [slice(0, 2), slice(10, 12), *[slice(12, 12)] * 2]
    assert found.notes[0] == "head.weight: 12 at dim 0 over 8 ranks, so it is padded"
    assert found.notes[1].startswith("the plan splits 25% of the matrices' bytes: plan.filled(exported")
    assert "0 (padded)" in str(found)


def test_what_padding_would_double_stays_whole(exported: ExportedProgram) -> None:
    found = Plan({"fused": Fused("colwise", (20, 2, 2))}).resolve(exported, 4)
    assert found.parameters["fused.weight"].dim is None
    assert found.notes[0] == "fused.weight stays whole: 20 + 2 + 2 at dim 1 over 4 ranks"


def test_blocks_of_different_sizes_are_padded_in_as_many_units(exported: ExportedProgram) -> None:
    found = Plan({"fused": Fused("colwise", (18, 3, 3))}).resolve(exported, 2).parameters["fused.weight"]
    assert (found.units, found.local_shape[1]) == (3, 2 * (6 + 1 + 1))
    assert found.local_blocks(1) == (slice(12, 18), slice(20, 21), slice(23, 24))


# --- tied parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["embed", "head"])
def test_either_name_of_a_tied_parameter_will_do(exported: ExportedProgram, named: str) -> None:
    style = {"embed": "embedding_rowwise", "head": "colwise"}[named]
    found = Plan({named: style}).resolve(exported, 2)
    (name,) = [name for name in found.parameters if name in ("embed.weight", "head.weight")]
    assert found.parameters[name].dim == 0
    assert dict(found.aliases) == {({"embed.weight", "head.weight"} - {name}).pop(): name}


def test_the_tied_partner_of_a_named_module_returns_what_it_did(exported: ExportedProgram) -> None:
    found = Plan({"head": "colwise"}).resolve(exported, 2).boundaries
    assert found == {"embed": ModuleBoundary("embed", None, "replicate")}


def test_tied_names_may_both_be_named_when_they_agree(exported: ExportedProgram) -> None:
    found = Plan({"embed": "embedding_rowwise", "head": "colwise_rep"}).resolve(exported, 2)
    assert found.boundaries["head"].output == found.boundaries["embed"].output == "replicate"
    with pytest.raises(PlanError, match=r"disagree about head\.weight.*split embed\.weight and head\.weight alike"):
        Plan({"embed": "embedding_colwise", "head": "colwise_rep"}).resolve(exported, 2)
    with pytest.raises(PlanError, match="they are one tensor"):
        Plan({"**.weight": Replicate(), "embed.weight": Shard(0)}).resolve(exported, 2)


def test_ties_survive_saving(exported: ExportedProgram, tmp_path: Path) -> None:
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    plan = Plan({"layers.*.up": "colwise", "head": "colwise_rep"})
    assert plan.resolve(loaded, 2) == plan.resolve(exported, 2)


def test_a_strict_export_resolves_alike(exported: ExportedProgram) -> None:
    strict = torch.export.export(Model(), (torch.zeros(2, 5, dtype=torch.long),), strict=True)
    plan = Plan({"layers.*.up": "colwise", "head": "colwise_rep"})
    first, other = plan.resolve(strict, 2), plan.resolve(exported, 2)
    assert first.boundaries == other.boundaries
    assert first.parameters["embed.weight"].dim == other.parameters["head.weight"].dim == 0


# --- how entries are settled --------------------------------------------------------------------------------------


def test_an_exact_name_beats_a_glob(exported: ExportedProgram) -> None:
    found = Plan({"layers.0.down": "replicate", "layers.*.down": "rowwise"}).resolve(exported, 2)
    assert found.parameters["layers.0.down.weight"].dim is None
    assert found.parameters["layers.1.down.weight"].dim == 1
    assert set(found.boundaries) == {"layers.1.down"}


def test_a_parameter_beats_its_module(exported: ExportedProgram) -> None:
    entries = {"layers.*.up": "colwise", "layers.*.up.bias": Replicate()}
    assert split(exported, entries, "layers.0.up.bias") == (None, (), (32,))


def test_an_exact_module_beats_a_glob_over_parameters(exported: ExportedProgram) -> None:
    entries = {"layers.0.up": "colwise", "layers.*.up.*": Replicate()}
    assert split(exported, entries, "layers.0.up.weight")[0] == 0
    assert split(exported, entries, "layers.1.up.weight")[0] is None


def test_a_module_that_runs_on_its_parts_says_nothing_of_them(exported: ExportedProgram) -> None:
    entries = {"layers.0.up": "local_params", "layers.*.up.*": "colwise"}
    assert split(exported, entries, "layers.0.up.weight")[0] == split(exported, entries, "layers.0.up.bias")[0] == 0


def test_globs_may_overlap_when_they_agree(exported: ExportedProgram) -> None:
    assert split(exported, {"layers.*.up": "colwise", "**.up": ColwiseParallel}, "layers.0.up.weight")[0] == 0


def test_globs_that_disagree_are_refused(exported: ExportedProgram) -> None:
    with pytest.raises(PlanError, match=r"disagree about layers\.0\.up\.weight: 'layers.*colwise \(split at dim 0\)"):
        Plan({"layers.*.up": "colwise", "layers.0.*": "rowwise"}).resolve(exported, 2)
    with pytest.raises(PlanError, match=r"disagree about what layers\.0\.up takes or returns"):
        Plan({"layers.*.up": "colwise", "layers.0.u*": "colwise_rep"}).resolve(exported, 2)


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [
        ("layers.*.upp", "layers.*.up"),
        ("model.layers.*.up", "layers.*.up"),
        ("up", "layers.*.up"),
        ("layers.7.down", "layers.*.down"),
        ("hed", "head"),
    ],
)
def test_names_that_match_nothing_suggest_the_nearest(exported: ExportedProgram, pattern: str, suggestion: str) -> None:
    with pytest.raises(PlanError, match="names nothing in the program") as refusal:
        Plan({pattern: "colwise"}).resolve(exported, 2)
    assert suggestion in refusal.value.remedy


def test_a_missing_prefix_is_told(exported: ExportedProgram) -> None:
    with pytest.raises(PlanError, match=r"start with 'layers\.\*\.'"):
        Plan({"up": "colwise"}).resolve(exported, 2)


@pytest.mark.parametrize(
    ("pattern", "entry", "message"),
    [
        ("norm", "colwise", "splits no parameter of norm"),
        ("layers.0", "colwise", r"name what it should split \(layers\.0\.down\.bias"),
        ("unused", "colwise", "splits no parameter of unused"),
        ("layers.0.down.bias", "rowwise", "splits no parameter"),
        ("head", Shard(0), r"head is a module.*name the parameter \(head\.weight\)"),
        ("sinks", SequenceParallel(), "sinks is a parameter"),
        ("sinks", Shard(1), "for sinks of 1 dims"),
        ("fused", Fused("colwise", 5), "blocks that make up 24"),
        ("fused", Fused("colwise", (8, 8)), "blocks that make up 24"),
    ],
)
def test_entries_that_do_not_fit_are_refused(
    exported: ExportedProgram, pattern: str, entry: object, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan({pattern: entry}).resolve(exported, 2)


def test_there_must_be_a_rank(exported: ExportedProgram) -> None:
    with pytest.raises(PlanError, match="0 ranks"):
        Plan({}).resolve(exported, 0)


def test_a_weight_used_in_two_ways_must_be_named_itself() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x @ self.weight, self.weight)

    model = nn.Sequential(Both())
    exported = torch.export.export(model, (torch.ones(2, 4),))
    with pytest.raises(PlanError, match=r"0\.weight is used in several ways"):
        Plan({"0": "colwise"}).resolve(exported, 2)
    assert split(exported, {"0.weight": Shard(1)}, "0.weight") == (1, (), (4, 2))


def test_parameters_beside_the_weight_stay_whole_and_are_noted() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 6)
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.gain

    exported = torch.export.export(nn.Sequential(Scaled()), (torch.ones(2, 4),))
    found = Plan({"0": "colwise"}).resolve(exported, 2)
    assert found.parameters["0.gain"].dim is None
    assert found.notes == ("0.gain stays whole: the program does not use it as a weight or bias",)


def test_convolutions_are_split_by_what_they_put_out() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 3, groups=4))
    exported = torch.export.export(model, (torch.ones(1, 4, 9, 9),))
    found = Plan({"0": "colwise", "1": "rowwise"}).resolve(exported, 2).parameters
    assert [found[name].dim for name in ("0.weight", "0.bias", "1.weight", "1.bias")] == [0, 0, 1, None]
    with pytest.raises(PlanError, match="splits no parameter of 2"):
        Plan({"2": "rowwise"}).resolve(exported, 2)


# --- the table ----------------------------------------------------------------------------------------------------


def test_the_table_shows_layers_that_are_alike_in_one_row(exported: ExportedProgram) -> None:
    text = str(Plan({"layers.*.up": "colwise", "fused": Fused("colwise", 3)}).resolve(exported, 2))
    rows = {line.split("  ")[1].strip(): line.split() for line in text.splitlines() if line.startswith("  ")}
    assert rows["layers.*.up.weight (2)"][2:] == ["32x8", "colwise", "0", "16x8", "1.0", "KiB"]
    assert rows["fused.bias"][1:] == ["24", "colwise", "in", "3", "blocks", "0,", "3", "blocks", "12", "48", "B"]
    assert rows["norm.bias"][1:] == ["8", "-", "-", "8", "32", "B"]
    assert text.splitlines()[-1].split() == ["17", "of", "6.0", "KiB", "4.5", "KiB"]
