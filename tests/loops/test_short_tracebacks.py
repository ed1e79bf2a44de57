"""Errors show the user's own lines and end with ours; frames of Crossfade and torch only with CROSSFADE_TRACEBACK=1."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from crossfade import TRAINING, Pass, PassResult, Program, Ranks
from crossfade.tracebacks import VARIABLE
from tests.forked import run_script
from tests.loops.plain import adamw, batches, network

HERE = Path(__file__).name


class Mismatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden)  # the wrong shape


class Branching(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y  # the branch


class Raising(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        try:
            int("no number")
        except ValueError as error:
            raise KeyError("mine") from error  # the raise


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x)  # the lookup


def refusing(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no such target")  # the loss


def stepped(model: nn.Module, loss: Any = F.mse_loss) -> None:
    cf.compile_step(model, loss, adamw(model))(*batches(1)[0])


def closed() -> None:
    model = network()
    step = cf.compile_step(model, F.mse_loss, adamw(model))
    step.close()
    step(*batches(1)[0])


def nothing_saved(folder: str = "/no/such/folder") -> None:
    model = network()
    cf.compile_step(model, F.mse_loss, adamw(model)).load(folder)


@dataclass(frozen=True)
class Broken(Pass):
    name = "broken"

    def run(self, program: Program) -> PassResult:
        raise ValueError("of my own pass")  # the pass


def failing_pass() -> None:
    model = network()
    phases = TRAINING.before_pass("simplify-nodes", Broken())
    cf.compile_step(model, F.mse_loss, adamw(model), phases=phases)(*batches(1)[0])


def backward_by_habit() -> None:
    model = network()
    loss = cf.compile_step(model, F.mse_loss, adamw(model))(*batches(1)[0])
    loss.backward()


def in_a_handler() -> None:
    try:
        torch.ones(2, 3) @ torch.ones(2, 3)
    except RuntimeError:
        stepped(Mismatched())


FAILING: dict[str, tuple[Callable[[], None], str, str]] = {
    "a shape in the model": (lambda: stepped(Mismatched()), "CaptureError: RuntimeError while", "# the wrong shape"),
    "a branch on values": (lambda: stepped(Branching()), "CaptureError: control flow", "# the branch"),
    "an error of the model's own": (lambda: stepped(Raising()), "CaptureError: KeyError while", "# the raise"),
    "an error in the loss": (lambda: stepped(network(), refusing), "CaptureError: ValueError while", "# the loss"),
    "a model without parameters": (
        lambda: cf.compile_step(nn.ReLU(), None, adamw(network())),  # type: ignore[func-returns-value]
        "ModelError: no parameter",
        "cf.compile_step(nn.ReLU()",
    ),
    "a closed step": (closed, "CrossfadeError: a call of a step that was closed", "step(*batches(1)[0])"),
    "no checkpoint": (nothing_saved, "CrossfadeError: no checkpoint at", ".load(folder)"),
    "a backward by habit": (backward_by_habit, "CrossfadeError: loss.backward() after", "    loss.backward()"),
    "inside a handler of the user's": (in_a_handler, "CaptureError: RuntimeError while", "# the wrong shape"),
}


def shown(failing: Callable[[], Any]) -> list[str]:
    """What Python prints of the error that a call raises, line by line."""
    with pytest.raises(Exception) as caught:
        failing()
    return "".join(traceback.format_exception(caught.value)).splitlines()


def files(lines: list[str]) -> set[str]:
    return {found[1] for line in lines if (found := re.match(r'\s*File "(.*)", line', line))}


@pytest.mark.parametrize("what", FAILING)
def test_only_the_users_lines_are_shown_and_ours_is_last(what: str) -> None:
    failing, said, users = FAILING[what]
    lines = shown(failing)
    assert said in lines[-1] and users in "\n".join(lines)
    assert lines[-1].endswith(".") and "Remedy: " in lines[-1]
    assert {Path(file).parent.name for file in files(lines)} == {"loops"}
    assert len(lines) <= 16


def test_everything_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    short = shown(lambda: stepped(Mismatched()))
    monkeypatch.setenv(VARIABLE, "1")
    long = shown(lambda: stepped(Mismatched()))
    assert long[-1] == short[-1]
    assert len(long) > 100 and len(short) < 16
    assert any("make_fx" in line for line in long) and any("/torch/" in file for file in files(long))


def test_torch_does_not_tell_it_a_second_time(caplog: pytest.LogCaptureFixture) -> None:
    shown(lambda: stepped(Mismatched()))
    assert [record for record in caplog.records if record.exc_info] == []


def test_what_the_operators_raise_names_the_line_of_the_model() -> None:
    model = Words()
    step = cf.compile_step(model, F.mse_loss, adamw(model))
    lines = shown(lambda: step(torch.tensor([0, 7]), torch.ones(2, 3)))
    where = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the lookup" in line)
    assert lines[-3:] == [
        "IndexError: index out of range in self",
        f"In aten.embedding.default, which comes from {HERE}:{where}",
        "The frames of crossfade and torch are not shown; CROSSFADE_TRACEBACK=1 shows them.",
    ]


def test_errors_of_passes_show_the_line_of_the_pass() -> None:
    lines = shown(failing_pass)
    assert "PassError" in lines[-1] and "of my own pass" in lines[-1] and "# the pass" in "\n".join(lines)


def test_the_error_behind_is_still_there_for_programs() -> None:
    with pytest.raises(cf.CaptureError) as caught:
        stepped(Raising())
    assert isinstance(caught.value.__context__, KeyError)


def test_an_error_of_the_users_around_a_step_is_left_alone() -> None:
    model = network()
    step = cf.compile_step(model, F.mse_loss, adamw(model))

    def in_the_body() -> None:
        with step.gathered() as whole:
            whole(torch.ones(1, 5))

    lines = shown(in_the_body)
    assert "mat1 and mat2" in lines[-1] and any("/torch/" in file for file in files(lines))


def fail_on_the_second_rank() -> None:
    import torch.distributed as dist

    model = Mismatched() if dist.get_rank() else network()
    cf.compile_step(model, F.mse_loss, adamw(model), {"dp": 2}, timeout=60)(*batches(1)[0])


@pytest.mark.ranks
def test_an_error_inside_a_rank_of_a_pool_ends_with_the_line(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(cf.CrossfadeError) as caught:
        ranks(2).run(fail_on_the_second_rank)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert "Error: " in lines[-1] and lines[-1].endswith(".") and "Remedy: " in lines[-1]
    assert {Path(file).parent.name for file in files(lines)} == {"loops"}


SCRIPT = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
import crossfade as cf

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(9, 2)

    def forward(self, x):
        return self.second(self.first(x))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
step = cf.compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), {"dp": 2})
step(torch.ones(4, 4), torch.ones(4, 2))
"""


@pytest.mark.ranks
def test_a_script_on_ranks_prints_its_own_lines_and_ends_with_ours(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    codes = run_script(script, 2, tmp_path, timeout=240)
    assert any(codes)
    failed = next(rank for rank, code in enumerate(codes) if code)
    lines = (tmp_path / str(failed)).read_text().splitlines()
    last = [line for line in lines if line.strip()][-1]
    assert "crossfade.errors." in last and "Remedy: " in last
    assert not any("/torch/" in file or "/crossfade/" in file for file in files(lines))
