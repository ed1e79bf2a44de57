"""Sharding from the outside: sources of weights, programs without numbers, folders on disk, placements of inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.distributed import tensor as torch_placements
from torch.export import ExportedProgram

import crossfade as cf
from crossfade.errors import MeshError, PlanError, StateError
from crossfade.graph.private import FakeTensorMode
from crossfade.shard.tensor.devices import device_types
from crossfade.shard.tensor.placements import REPLICATE, Shard
from tests.shard.tensor import lockstep

PLAN = {"up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    """A pair of projections, with every kind of tensor that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("scale", torch.linspace(1, 2, 32), persistent=False)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.offset = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down((self.up(x) * self.scale).relu()) + self.shift
        return y + self.offset + torch.arange(8, device=x.device)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def exported(model: nn.Module | None = None, device: str = "cpu") -> ExportedProgram:
    return torch.export.export(model or net(), (torch.ones(4, 8, device=device),))


def run(sharded: list[cf.Sharded], *inputs: list[Any]) -> list[list[Any]]:
    """What the ranks return in lockstep, each on its own state and constants; `inputs` are given rank by rank."""
    environments: list[dict[Any, Any]] = []
    for rank, one in enumerate(sharded):
        held = {**one.program.state_dict, **one.program.constants}
        given = iter([value[rank] for value in inputs])
        nodes = sharded[0].program.graph.find_nodes(op="placeholder")
        pairs = zip(one.program.graph_signature.input_specs, nodes, strict=True)
        environments.append({node: held[spec.target].detach() if spec.target else next(given) for spec, node in pairs})
    for node in sharded[0].program.graph.nodes:
        if node.op == "call_function":
            lockstep._step(node, environments)
    (returned,) = sharded[0].program.graph.output_node().args
    return [list(fx.map_arg(returned, environment.__getitem__)) for environment in environments]


def shards(program: ExportedProgram, plan: Any = PLAN, ranks: int = 2, **options: Any) -> list[cf.Sharded]:
    return [cf.shard(program, {"tp": ranks}, plan, rank=rank, **options) for rank in range(ranks)]


def assert_right(sharded: list[cf.Sharded]) -> None:
    """All ranks compute what `net()` does."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for (found,) in run(sharded, [x] * len(sharded)):
        torch.testing.assert_close(found, net()(x).detach())


def checkpoints(folder: Path) -> dict[str, Any]:
    """The state of `net()` in every form that is read."""
    state = {name: value.detach().clone() for name, value in net().state_dict().items()}
    save_file(state, folder / "one.safetensors")
    several, bare = folder / "several", folder / "bare"
    for where in (several, bare):
        where.mkdir()
        names = list(state)
        for file, part in (("a.safetensors", names[:2]), ("b.safetensors", names[2:])):
            save_file({name: state[name] for name in part}, where / file)
    listed = {name: "a.safetensors" if name in names[:2] else "b.safetensors" for name in names}
    (several / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return {
        "dict": state,
        "file": folder / "one.safetensors",
        "folder": bare,
        "index": several,
        "dcp": folder / "dcp",
        "list": [{"up.weight": state["up.weight"]}, folder / "one.safetensors"],
    }


@pytest.mark.parametrize("form", ["dict", "file", "folder", "index", "dcp", "list"])
def test_weights_come_from_every_form_of_checkpoint(tmp_path: Path, form: str) -> None:
    other = Net()  # other weights, the same buffers
    assert_right(shards(exported(other), state=checkpoints(tmp_path)[form]))


def test_states_that_do_not_fit_say_so(tmp_path: Path) -> None:
    program, state = exported(), dict(net().state_dict())
    cases: list[tuple[Any, str]] = [
        ({**state, "up.weight": torch.ones(64, 8)}, "the state has up.weight of shape (64, 8): expected (32, 8)"),
        ({**state, "up.weight": state["up.weight"].half()}, "type torch.float16: expected torch.float32"),
        ({name: value for name, value in state.items() if name != "shift"}, "no tensor named 'shift'"),
        ({"net." + name: value for name, value in state.items()}, "did you mean net.up.weight"),
        (tmp_path, "no state in"),
    ]
    for given, words in cases:
        with pytest.raises(StateError) as raised:
            cf.shard(program, {"tp": 2}, PLAN, rank=0, state=given)
        assert words in str(raised.value)


def test_an_index_that_lists_a_lost_file_says_so(tmp_path: Path) -> None:
    where = checkpoints(tmp_path)["index"]
    (where / "b.safetensors").unlink()
    with pytest.raises(StateError, match=r"b.safetensors, which the index lists"):
        shards(exported(), state=where)


def test_folders_of_several_checkpoints_are_refused(tmp_path: Path) -> None:
    found = checkpoints(tmp_path)
    index = found["index"] / "model.safetensors.index.json"
    (found["index"] / "other.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(StateError, match=r"has model.safetensors.index.json and other.safetensors.index.json"):
        shards(exported(), state=found["index"])
    save_file({"up.weight": torch.ones(32, 8)}, found["folder"] / "c.safetensors")
    with pytest.raises(StateError, match=r"up.weight is both in [ab].safetensors and in c.safetensors"):
        shards(exported(), state=found["folder"])


def test_without_safetensors_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(StateError, match="install safetensors"):
        shards(exported(), state=tmp_path)
    with pytest.raises(StateError, match="install safetensors"):
        shards(exported())[0].save(tmp_path / "out")


def test_a_buffer_that_is_not_saved_is_split_where_the_plan_says() -> None:
    sharded = shards(exported(), {**PLAN, "scale": torch_placements.Shard(0)})
    assert [one.program.constants["scale"].shape for one in sharded] == [(16,), (16,)]
    assert_right(sharded)


def test_tied_weights_are_one_tensor_and_found_under_either_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.token.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.token(ids))

    program = torch.export.export(Tied(), (torch.zeros(2, 3, dtype=torch.long),))
    for name in ("token.weight", "head.weight"):
        state = {name: torch.randn(16, 8)}
        for one in shards(program, {}, state=state):
            held = one.program.state_dict
            assert held["token.weight"] is held["head.weight"] and torch.equal(held["head.weight"], state[name])
            one.save(tmp_path)
            again = cf.Sharded.load(tmp_path, {"tp": 2}, rank=one.rank).program.state_dict
            assert again["token.weight"] is again["head.weight"] and torch.equal(again["head.weight"], state[name])


def empty_on_meta() -> tuple[nn.Module, ExportedProgram]:
    """Parameters on the meta device, buffers and constants with numbers moved there for the export."""
    with torch.device("meta"):
        model = Net()
    return model, exported(model, "meta")


def empty_fake() -> tuple[nn.Module, ExportedProgram]:
    mode = FakeTensorMode()
    with mode:
        model = Net()
        return model, exported(model)


@pytest.mark.parametrize("make", [empty_on_meta, empty_fake])
def test_programs_without_numbers_take_all_from_the_state(make: Any) -> None:
    program = make()[1]
    whole = net()
    rest = {"scale": whole.scale, "offset": whole.offset}
    sharded = shards(program, state=[whole.state_dict(), rest])
    assert device_types(sharded[0].program) == {"cpu"}
    assert_right(sharded)
    assert torch.equal(sharded[0].program.constants["offset"], whole.offset)
    with pytest.raises(StateError, match=r"up.weight has no numbers.*pass state="):
        shards(program)
    with pytest.raises(StateError, match=r"a constant or a buffer that is not saved, has no numbers"):
        shards(program, state=whole.state_dict())


def test_a_rank_never_holds_the_checkpoint(tmp_path: Path) -> None:
    """Of 64 MB of weights, split over 8 ranks, a process takes 8 MB of memory of its own; whole it would take 64."""
    width = 2048
    weights = {"up.weight": torch.ones(2 * width, width), "down.weight": torch.ones(width, 2 * width)}
    save_file(weights, tmp_path / "weights.safetensors")
    program = f"""
import sys, torch, crossfade as cf
from torch import nn
def own():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) / 1024
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({width}, {2 * width}, bias=False), nn.Linear({2 * width}, {width}, bias=False)
    def forward(self, x):
        return self.down(self.up(x).relu())
with torch.device("meta"):
    exported = torch.export.export(Net(), (torch.ones(1, {width}),))
torch.cat([torch.ones(8)])
before = own()
sharded = cf.shard(exported, {{"tp": 8}}, {PLAN}, rank=3, state=sys.argv[1])
print(own() - before, sum(part.nbytes for part in sharded.program.state_dict.values()) / 2**20)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    grown, parts = map(float, done.stdout.split())
    assert 7.9 < parts < 8.1
    assert grown < 2.5 * parts


def test_a_folder_has_one_program_and_the_weights_of_each_rank(tmp_path: Path) -> None:
    sharded = shards(exported(), {**PLAN, "scale": torch_placements.Shard(0)})
    for one in sharded:
        one.save(tmp_path)
    names = {"program.pt2", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors", "sharded.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    loaded = [cf.Sharded.load(tmp_path, {"tp": 2}, rank=rank) for rank in range(2)]
    assert_right(loaded)
    for before, after in zip(sharded, loaded, strict=True):
        assert str(after) == str(before)
        assert (after.rank, after.placements, after.inputs, after.outputs) == (
            before.rank,
            before.placements,
            before.inputs,
            before.outputs,
        )
        assert (after.plan, after.verdicts) == (before.plan, before.verdicts)
        kinds = {name: type(value) for name, value in before.program.state_dict.items()}
        assert {name: type(value) for name, value in after.program.state_dict.items()} == kinds
    said = json.loads((tmp_path / "sharded.json").read_text())
    assert (said["axis"], said["ranks"], said["versions"]["torch"]) == ("tp", 2, torch.__version__)
    assert said["placements"]["down.weight"] == {"shard": 1}


def test_a_loaded_state_can_be_changed_without_changing_its_file(tmp_path: Path) -> None:
    shards(exported())[0].save(tmp_path)
    with torch.no_grad():
        cf.Sharded.load(tmp_path, {"tp": 2}, rank=0).program.state_dict["up.weight"].zero_()
    assert cf.Sharded.load(tmp_path, {"tp": 2}, rank=0).program.state_dict["up.weight"].any()


def test_folders_that_do_not_fit_say_so(tmp_path: Path) -> None:
    for one in shards(exported()):
        one.save(tmp_path)

    def refused(error: type[Exception], words: str, ranks: int = 2, rank: int = 1, folder: Path = tmp_path) -> None:
        with pytest.raises(error) as raised:
            cf.Sharded.load(folder, {"tp": ranks}, rank=rank)
        assert words in str(raised.value)

    refused(MeshError, "4 ranks for", ranks=4)
    refused(StateError, "no sharded.json", folder=tmp_path / "none")
    own = (tmp_path / "rank-1-of-2.safetensors").read_bytes()
    shards(exported(), {})[1].save(tmp_path)
    refused(StateError, "rank-1-of-2.safetensors belongs to another program")
    (tmp_path / "rank-1-of-2.safetensors").write_bytes(own)
    with safe_open(tmp_path / "rank-1-of-2.safetensors", framework="pt") as opened:
        said, held = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    held.pop("down.bias")
    save_file(held, tmp_path / "rank-1-of-2.safetensors", metadata=said)
    refused(StateError, "rank-1-of-2.safetensors lacks down.bias")
    (tmp_path / "rank-1-of-2.safetensors").unlink()
    refused(StateError, "has no rank-1-of-2.safetensors")
    (tmp_path / "rank-1-of-2.safetensors").write_bytes(own)
    cf.Sharded.load(tmp_path, {"tp": 2}, rank=1)
    said = json.loads((tmp_path / "sharded.json").read_text())
    (tmp_path / "sharded.json").write_text(json.dumps({**said, "program": "0" * 32}))
    refused(StateError, "program.pt2 belongs to another program")
    (tmp_path / "sharded.json").write_text(json.dumps({**said, "format": 7}))
    refused(StateError, "sharded.json, format = 7")
    (tmp_path / "sharded.json").write_text(json.dumps(said))
    (tmp_path / "program.pt2").unlink()
    refused(StateError, "no program.pt2")


class Cached(nn.Module):
    """One step of attention over a cache that it returns longer by one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = [layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        k, v = torch.cat([past_k, heads[1]], 2), torch.cat([past_v, heads[2]], 2)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], k, v)
        return self.out(mixed.transpose(1, 2).flatten(2)), k, v


CACHED_PLAN = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
BY_HEAD = torch_placements.Shard(1)


def test_a_cache_stays_split_by_head_from_step_to_step() -> None:
    torch.manual_seed(0)
    model = Cached().eval()
    length = torch.export.Dim("length", min=2, max=64)
    example = (torch.randn(2, 1, 16), torch.randn(2, 4, 3, 4), torch.randn(2, 4, 3, 4))
    program = torch.export.export(model, example, dynamic_shapes=(None, {2: length}, {2: length}))
    placed: dict[str, Any] = {
        "inputs": {"past_k": BY_HEAD, "past_v": torch_placements.Shard(-3)},
        "outputs": {1: BY_HEAD, -1: Shard(1)},
    }
    sharded = shards(program, CACHED_PLAN, **placed)
    assert sharded[0].outputs == (REPLICATE, Shard(1), Shard(1))
    assert sharded[0].inputs["past_v"] == Shard(1)
    assert sharded[0].collectives() == {"all-reduce": (1, 128)}
    whole = example[1:]
    parts = [list(cache.chunk(2, 1)) for cache in whole]
    for _ in range(3):
        x = torch.randn(2, 1, 16)
        out, *whole = model(x, *whole)
        found = run(sharded, [x, x], *parts)
        parts = [[rank[1] for rank in found], [rank[2] for rank in found]]
        torch.testing.assert_close(found[0][0], out)
        for cache, split in zip(whole, parts, strict=True):
            torch.testing.assert_close(torch.cat(split, 1), cache)


def test_partial_outputs_add_up() -> None:
    x = torch.randn(4, 8)
    found = run(shards(exported(), outputs={0: torch_placements.Partial()}), [x, x])
    torch.testing.assert_close(found[0][0] + found[1][0], net()(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": {"y": BY_HEAD}}, "no input is named 'y': expected one of x"),
        ({"inputs": {"x": torch_placements.Shard(2)}}, "does not fit a value of 2 dims"),
        ({"inputs": {"x": torch_placements.Partial()}}, "the input x cannot be partial sums"),
        ({"outputs": {1: BY_HEAD}}, "no output 1 exists: expected a position from 0 to 0"),
        ({"outputs": {0: torch_placements.Partial("max")}}, "expected Shard(dim) or Replicate()"),
        ({"outputs": {0: "sharded"}}, "'sharded' is no placement"),
    ],
)
def test_placements_that_cannot_be_say_so(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as raised:
        shards(exported(), **options)
    assert words in str(raised.value)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the input x of shape \(4, 8\) cannot be split on dim 0 over 3 ranks"):
        shards(exported(), {}, ranks=3, inputs={"x": torch_placements.Shard(0)})


def test_meshes_that_cannot_be_say_so() -> None:
    with pytest.raises(MeshError, match="an axis 'tp'"):
        cf.shard(exported(), {"dp": 2}, PLAN, rank=0)
    with pytest.raises(MeshError, match="rank=None on an axis of 2 ranks"):
        cf.shard(exported(), {"tp": 2}, PLAN)
    with pytest.raises(MeshError, match="rank=2"):
        cf.shard(exported(), {"tp": 2}, PLAN, rank=2)


def test_the_program_saves_as_any_exported_program(tmp_path: Path) -> None:
    sharded = shards(exported())
    for one in sharded:
        torch.export.save(one.program, tmp_path / f"{one.rank}.pt2")
    loaded = [torch.export.load(tmp_path / f"{rank}.pt2") for rank in range(2)]
    assert [program.example_inputs[0][0].shape for program in loaded] == [(4, 8)] * 2
    for one, program in zip(sharded, loaded, strict=True):
        assert [str(node) for node in program.graph.nodes] == [str(node) for node in one.program.graph.nodes]
        for name, part in one.program.state_dict.items():
            assert torch.equal(part, program.state_dict[name])
