"""One test for each owed capability of the tensor-parallel transform, named by its id; all ranks in one process."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import crossfade as cf
from crossfade.errors import PlanError
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.lockstep import run_ranks

HEADS, WIDTH, WORDS = 4, 16, 32


class Block(nn.Module):
    """A decoder layer between a tied embedding and head, with hard-coded head counts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        batch, length = tokens.shape
        q, k, v = (
            tensor.view(batch, length, HEADS, -1).transpose(1, 2) for tensor in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


PLAN: dict[str, object] = {
    "qkv": cf.Fused("colwise", blocks=3),
    "out": "rowwise",
    "up": "colwise",
    "down": "rowwise",
}


def exported(dynamic: bool = False) -> ExportedProgram:
    torch.manual_seed(0)
    sizes = ({0: Dim("batch"), 1: Dim("length")},) if dynamic else None
    return torch.export.export(Block().eval(), (torch.zeros(2, 6, dtype=torch.int64),), dynamic_shapes=sizes)


def local(program: ExportedProgram, plan: dict[str, object], ranks: int = 2, **more: Any) -> LocalProgram:
    return localize(program, Plan(plan).resolve(program, ranks), ranks, "tp", Request(**more))


def agrees(program: ExportedProgram, split: LocalProgram, tokens: Tensor) -> None:
    expected = program.module()(tokens)
    for (found,) in run_ranks(split, program.state_dict, [tokens]):
        torch.testing.assert_close(found, expected)


def kinds(split: LocalProgram) -> list[str]:
    names = [getattr(node.target, "__name__", "") for node in split.exported.graph.nodes]
    return [name.split(".")[0].removeprefix("tp_") for name in names if name.startswith("tp_") and "enter." not in name]


def test_T1_a_program_in_a_program_out_that_saves_and_loads():
    program = exported()
    sharded = cf.shard(program, {"tp": 2}, PLAN, rank=1)
    saved = io.BytesIO()
    torch.export.save(sharded.program, saved)
    saved.seek(0)
    again = torch.export.load(saved)
    assert [node.name for node in again.graph.nodes] == [node.name for node in sharded.program.graph.nodes]
    assert isinstance(again.module(), nn.Module)


def test_T2_plans_by_name_or_glob_and_names_that_match_nothing():
    program = exported()
    assert local(program, {"*p": "colwise"}).parameters["up.weight"].dim == 0  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="down"):
        local(program, {"dwon": "rowwise"})


def test_T3_no_weight_is_gathered_without_a_word():
    program = exported()
    with pytest.raises(PlanError, match=r"the parameter norm.weight.*allow_weight_gather=True"):
        local(program, {"norm.weight": torch.distributed.tensor.Shard(0)})
    agrees(program, local(program, PLAN), torch.randint(0, WORDS, (2, 6)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_T4_every_value_and_size_becomes_local(ranks: int):
    program = exported()
    split = local(program, PLAN, ranks)
    agrees(program, split, torch.randint(0, WORDS, (2, 6)))
    attention = next(node for node in split.exported.graph.nodes if "attention" in node.name)
    assert attention.meta["val"].shape[1] == HEADS // ranks
    assert kinds(split) == ["share", "reduce", "share", "reduce"]


def test_T5_parts_of_the_state_are_the_whole():
    program = exported()
    parts = [cf.shard(program, {"tp": 2}, PLAN, rank=rank).program.state_dict["qkv.weight"] for rank in range(2)]
    blocks = [part.chunk(3) for part in parts]
    whole = torch.cat([piece for pair in zip(*blocks, strict=True) for piece in pair])
    assert torch.equal(whole, program.state_dict["qkv.weight"])


class Fresh(torch.fx.Interpreter):
    """Runs a graph on its inputs' descriptions, and keeps the nodes that are described otherwise than they come out."""

    def __init__(self, split: LocalProgram) -> None:
        super().__init__(split.exported.graph_module)
        self.wrong: list[str] = []

    def run_node(self, node: torch.fx.Node) -> Any:
        made, declared = super().run_node(node), node.meta.get("val")
        if isinstance(declared, Tensor) and (made.shape, made.stride(), made.dtype) != (
            declared.shape,
            declared.stride(),
            declared.dtype,
        ):
            self.wrong.append(node.name)
        return made


@pytest.mark.parametrize("dynamic", [False, True])
def test_T6_metadata_and_signature_are_true(dynamic: bool):
    if dynamic and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 runs no linear layer on descriptions of any size")
    split = local(exported(dynamic), PLAN | {"words": "rowwise", "head": "colwise_rep"})
    graph = split.exported.graph
    inputs = list(graph.find_nodes(op="placeholder"))
    fresh = Fresh(split)
    with torch.no_grad(), inputs[0].meta["val"].fake_mode:
        fresh.run(*(node.meta["val"] for node in inputs))
    assert fresh.wrong == []
    assert [spec.arg.name for spec in split.exported.graph_signature.input_specs] == [node.name for node in inputs]


def test_T7_vocabulary_sequence_and_dynamic_sizes():
    program = exported(dynamic=True)
    plan = PLAN | {"words": "rowwise", "head": "colwise_rep"}
    split = local(program, plan)
    assert kinds(split).count("reduce") == 3 and kinds(split).count("gather") == 1
    for shape in ((2, 6), (5, 9)):
        agrees(program, split, torch.randint(0, WORDS, shape))
    static = exported()
    along = {
        "out": torch.distributed.tensor.parallel.RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(1)),
        "down": torch.distributed.tensor.parallel.RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(1)),
    }
    sequence = local(static, PLAN | along)
    assert "scatter" in kinds(sequence)
    agrees(static, sequence, torch.randint(0, WORDS, (2, 6)))
