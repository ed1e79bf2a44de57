"""The compiler of a step is `TRAINING`: docs show it, a step prints it, and users change it by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crossfade import Step, compile_step
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.compile.phases import Phase, Phases
from crossfade.compile.training_phases import TRAINING, StepCompilation
from crossfade.errors import CrossfadeError, PassError

DOCS = Path(__file__).parent.parent.parent / "docs"


def compiled(phases: Phases | None = None, **options: object) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compile_step(model, F.mse_loss, optimizer, phases=phases, **options)  # type: ignore[arg-type]
    return step.prepare(torch.ones(4, 4), torch.ones(4, 2))


def test_docs_show_the_compiler_as_it_is():
    picture = "\n".join(f"    {line}" for line in repr(TRAINING).splitlines())
    assert picture in (DOCS / "architecture.md").read_text()


def test_every_phase_says_in_its_function_what_it_does():
    assert all(phase.run.__doc__ for phase in TRAINING)


def test_a_step_prints_its_compiler():
    lines = [line for line in repr(compiled().pipeline).splitlines() if not line.startswith("    ")]
    assert [line.split()[0] for line in lines] == TRAINING.names()
    assert [line.split()[0] for line in lines if "left out" not in line] == [
        "capture", "accumulate", "compare-ranks", "optimizer", "simplify", "communicate", "lower", "finish",
    ]  # fmt: skip


def test_passes_of_any_phase_are_changed():
    ran = [record.name for record in compiled(TRAINING.without_pass("update-in-place")).program.history]
    assert "update-in-place" not in ran and "pack-in-place" in ran
    twice = compiled(TRAINING.before_pass("merge-common-subexpressions", SinkWaits())).program.history
    assert [record.name for record in twice].count("sink-waits") == 2


def test_a_phase_of_the_users_own_sees_the_compilation():
    seen: list[int] = []

    def count(step: StepCompilation) -> None:
        seen.append(len(step.made().graph.nodes))

    step = compiled(TRAINING.after("simplify", Phase("count", count)))
    assert len(seen) == 1 and "count" in step.pipeline.names()


@pytest.mark.parametrize("name", ["simplify", "compare-ranks", "lower", "finish", "communicate"])
def test_phases_that_others_do_not_need_may_be_left_out(name: str):
    step = compiled(TRAINING.without(name))
    assert name not in step.pipeline.names()
    assert torch.isfinite(step(torch.ones(4, 4), torch.ones(4, 2)))


def test_a_compiler_without_a_needed_phase_is_refused_by_name():
    with pytest.raises(PassError, match="the phase accumulate needs program"):
        compiled(TRAINING.without("capture"))


def test_a_list_is_no_compiler():
    with pytest.raises(CrossfadeError, match="phases=list: expected Phases"):
        compiled(list(TRAINING))  # type: ignore[arg-type]


def test_accumulated_passes_are_recorded_though_the_program_is_built_again():
    records = {record.phase.name: record.passes for record in compiled(accumulate=2).pipeline}
    assert [record.name for record in records["accumulate"]] == ["count-globally"]


def test_what_ran_before_micro_batches_were_put_together_stays_in_the_history():
    early = Phase("early", lambda step: step.run([SinkWaits()]))
    step = compiled(TRAINING.after("capture", early), accumulate=2)
    assert step.program.history[0].name == "sink-waits"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_changed_compiler_trains_the_same(accumulate: int):
    usual, changed = (
        compiled(accumulate=accumulate),
        compiled(TRAINING.without_pass("group-small-operators"), accumulate=accumulate),
    )
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    for _ in range(3):
        assert torch.equal(usual(x, y), changed(x, y))
