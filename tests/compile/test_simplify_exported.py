"""Exported models come back smaller, with the same signature, the same numbers and the same guards."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from crossfade.capture.exported import capture_exported
from crossfade.compile.pipeline import simplification
from crossfade.compile.simplify_exported import choose, load, rebuild, save, simplify
from crossfade.errors import CaptureError, PassError
from crossfade.graph.passes import run_passes


class Model(nn.Module):
    """Parameters, a buffer that changes, a constant, a nested graph, and results of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout()
        self.register_buffer("calls", torch.zeros(()))
        self.offset = torch.arange(4.0)

    def forward(self, input: Tensor, scale: float) -> dict:
        self.calls.add_(1)
        hidden = self.dropout(self.linear(input.view(input.shape).clone()).detach())
        branch = torch.cond(hidden.sum() > 0, lambda h: h.detach().sin(), lambda h: h.cos(), (hidden,))
        return {
            "hidden": hidden * scale + self.offset,
            "rest": (input, scale, None, 3, input.shape[0]),
            "branch": branch,
        }


def exported(decomposed: bool) -> ExportedProgram:
    torch.manual_seed(0)
    sizes = ({0: Dim("batch", min=2, max=64)}, None)
    program = torch.export.export(Model().eval(), (torch.randn(3, 4), 2.0), dynamic_shapes=sizes)
    return program.run_decompositions() if decomposed else program


def same(one: ExportedProgram, other: ExportedProgram) -> None:
    """Equal results on several sizes, buffers kept apart."""
    first, second = copy.deepcopy(one).module(), copy.deepcopy(other).module()
    for rows in (2, 3, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(second(x, 2.0), first(x, 2.0), rtol=0, atol=0)
    torch.testing.assert_close(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("decomposed", [False, True])
def test_models_come_back_smaller_and_compute_the_same(decomposed: bool, tmp_path: Path):
    before = exported(decomposed)
    text = str(before)
    done = simplify(before)
    assert str(before) == text
    assert done.report.nodes_after < done.report.nodes_before
    targets = {str(n.target) for m in done.exported.graph_module.modules() for n in m.graph.nodes}
    assert not targets & {"aten.detach.default", "aten.alias.default", "aten.dropout.default", "aten.detach_.default"}
    same(before, done.exported)
    save(done.exported, tmp_path / "model.pt2")
    again = load(tmp_path / "model.pt2")
    same(before, again)
    assert [s.kind for s in again.graph_signature.input_specs] == [s.kind for s in before.graph_signature.input_specs]
    twice = simplify(again).exported
    same(before, twice)
    with pytest.raises(AssertionError, match="64"):
        twice.module()(torch.randn(100, 4), 2.0)


def test_tensors_that_passes_add_become_constants_of_the_model():
    before = exported(False)
    program = capture_exported(before)
    add = next(node for node in program.graph.nodes if node.name == "add")
    with program.graph.inserting_before(add):
        folded = program.graph.get_attr("folded.value")
    folded.meta["val"] = add.args[1].meta["val"]
    add.args = (add.args[0], folded)
    program.constants = {**program.constants, "folded.value": torch.full((4,), 7.0)}
    done = rebuild(before, program)
    assert [spec.arg.name for spec in done.graph_signature.input_specs][-3:] == ["c_folded_value", "input", "scale"]
    x = torch.randn(3, 4)
    offset = copy.deepcopy(done).module()(x, 2.0)["hidden"] - copy.deepcopy(before).module()(x, 2.0)["hidden"]
    torch.testing.assert_close(offset, (7.0 - torch.arange(4.0)).expand(3, 4))


def test_kept_calls_are_refused():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    program = torch.export.export(Outer(), (torch.ones(1, 2),), preserve_module_call_signature=("inner",))
    with pytest.raises(CaptureError, match="keeps the calls of inner"):
        simplify(program)


def test_files_of_another_kind_are_refused(tmp_path: Path):
    path = tmp_path / "model.pt2"
    path.write_text("not a model")
    with pytest.raises(CaptureError, match=r"model.pt2, which torch.export does not read"):
        load(path)


def test_pipelines_are_chosen_by_name():
    whole = simplification()
    assert choose(whole) == whole
    assert "remove-noops" not in choose(whole, without=["remove-noops"]).names()
    assert choose(whole, only=["remove-dead-code", "remove-asserts(values=True)"]).names() == [
        "remove-dead-code",
        "remove-asserts",
    ]
    changed = choose(whole, without=["remove-asserts"], before=["remove-dead-code=remove-asserts(sizes=True)"])
    lines = repr(changed).splitlines()
    assert lines[lines.index("remove-dead-code") - 1] == "remove-asserts(sizes=True)"
    changed = choose(whole, after=["reorder-for-locality=remove-aliases"])
    assert changed[-1].name == "remove-aliases"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": ["remove-noop"]}, "did you mean remove-noops"),
        ({"before": ["remove-dead-code"]}, "expected NAME=SPELLING"),
        ({"after": ["remove-dead-code=remove-alias"]}, "did you mean remove-aliases"),
        ({"only": ["remove-asserts(value=True)"]}, "values: bool = False"),
    ],
)
def test_wrong_names_are_explained(options: dict, message: str):
    with pytest.raises(PassError, match=message):
        choose(simplification(), **options)


def test_simplification_leaves_nothing_for_a_second_time():
    program = capture_exported(exported(True))
    once = run_passes(program, simplification())
    again = run_passes(once, simplification())
    assert not any(record.changed for record in again.history[len(once.history) :])
