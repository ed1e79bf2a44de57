"""Compiled steps kept for other processes: taken where all is the same, on all ranks or none, and only then.

Processes are real ones, each with a model that is written to a file of its own; losses are compared with those of eager
torch in the same process, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossfade import Ranks, compile_step
from crossfade.compile import cache
from crossfade.compile.cache import evict, folder, limit, write
from crossfade.compile.cache_key import key_of

ROOT = Path(__file__).parent.parent.parent

MODEL = """
    import torch
    from torch import nn

    SCALE = 2.0
    TABLE = torch.arange(8.0)

    class Net(nn.Module):
        def __init__(self, width=8, flag=True):
            super().__init__()
            self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)
            self.flag, self.words = flag, {"a", "b", "c"}

        def forward(self, x):
            hidden = torch.relu(self.first(x))
            hidden = hidden * SCALE if self.flag else hidden
            return self.second(hidden) * TABLE
"""

SCRIPT = """
    import copy, json, os, sys, warnings
    import torch
    from torch import nn
    import model as users
    from crossfade import compile_step

    given = json.loads(sys.argv[1])
    warnings.simplefilter("always")
    torch.manual_seed(0)
    net = users.Net(given.get("width", 8), given.get("flag", True)).train(given.get("train", True))
    for name, value in given.get("set", {}).items():
        setattr(users, name, value)
    net.second.bias.requires_grad_(not given.get("freeze", False))
    rows = given.get("rows", 4)
    batch = torch.randn(rows, 8), torch.randn(rows, 8)
    alone = copy.deepcopy(net)
    kind = getattr(torch.optim, given.get("optimizer", "AdamW"))
    plain = kind([p for p in alone.parameters() if p.requires_grad], lr=0.01, **given.get("options", {}))
    optimizer = kind([p for p in net.parameters() if p.requires_grad], lr=0.01, **given.get("options", {}))
    expected = []
    for _ in range(3):
        plain.zero_grad()
        loss = nn.functional.mse_loss(alone(batch[0]), batch[1])
        loss.backward()
        plain.step()
        expected.append(float(loss))
    step = compile_step(net, nn.functional.mse_loss, optimizer, **given.get("compiled", {}))
    with warnings.catch_warnings(record=True) as said:
        losses = [float(step(*batch)) for _ in range(3)]
    print(json.dumps({
        "hit": step.pipeline.names() == ["cache"],
        "close": max(abs(a - b) for a, b in zip(losses, expected)),
        "losses": losses,
        "said": [str(each.message) for each in said],
        "again": _changed(step, net, batch) if given.get("change") else None,
    }))
"""

CHANGED = """
    def _changed(step, net, batch):
        captures = step.captures
        net.flag = not net.flag
        step(*batch)
        return step.captures - captures
"""


class Processes:
    """Starts processes on one cache folder and one file with the model."""

    def __init__(self, where: Path) -> None:
        self.where, self.cache = where, where / "kept"
        self.write(MODEL)
        head, _, rest = textwrap.dedent(SCRIPT).partition("given = ")
        (where / "train.py").write_text(f"{head}{textwrap.dedent(CHANGED)}\ngiven = {rest}")

    def write(self, model: str) -> None:
        (self.where / "model.py").write_text(textwrap.dedent(model))

    def run(self, variables: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
        """What a process says that trains for three steps."""
        environment = {**os.environ, "CROSSFADE_CACHE": str(self.cache), "PYTHONPATH": str(ROOT), **(variables or {})}
        command = [sys.executable, "train.py", json.dumps(given)]
        done = subprocess.run(
            command, cwd=self.where, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.strip().splitlines()[-1])
        assert found["close"] < 1e-6
        return found


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    """Processes that share a folder of their own."""
    return Processes(tmp_path)


def test_a_second_process_takes_what_the_first_has_kept_and_computes_the_same(processes: Processes) -> None:
    first, second = processes.run(), processes.run(change=True)
    assert (first["hit"], second["hit"]) == (False, True)
    assert first["losses"] == second["losses"]
    assert second["again"] == 1, "the guards must see a change after a hit"
    assert not processes.run({"CROSSFADE_CACHE": "off"})["hit"]


def test_every_difference_makes_another_key() -> None:
    same = [_key() for _ in range(2)]
    others = [
        _key(width=16),
        _key(slope=0.2),
        _key(train=False),
        _key(rows=6),
        _key(freeze=True),
        _key(dtype=torch.float64),
        _key(weight_decay=0.5),
        _key(optimizer=torch.optim.SGD),
        _key(compiled={"clip_grad_norm": 1.0}),
        _key(compiled={"accumulate": 2}),
        _key(loss=lambda out, y: (out - y).square().sum()),
        _key(loss=lambda out, y: (out - y).square().mean()),
        _key(around=lambda: torch.autocast("cpu")),
        _key(around=lambda: _set_threads(3)),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 1 + len(others)


@contextlib.contextmanager
def _set_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def _key(
    *,
    width: int = 8,
    slope: float = 0.1,
    train: bool = True,
    rows: int = 4,
    freeze: bool = False,
    dtype: torch.dtype = torch.float32,
    weight_decay: float = 0.0,
    optimizer: Any = torch.optim.AdamW,
    compiled: Mapping[str, Any] | None = None,
    loss: Any = nn.functional.mse_loss,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> str:
    """The key of a small step."""
    model = nn.Sequential(nn.Linear(4, width), nn.LeakyReLU(slope), nn.Linear(width, 2)).to(dtype).train(train)
    model[0].bias.requires_grad_(not freeze)
    with around():
        step = compile_step(model, loss, optimizer(model.parameters(), weight_decay=weight_decay), **(compiled or {}))
        found = key_of(step._made_by().job, (torch.ones(rows, 4, dtype=dtype), torch.ones(rows, 2, dtype=dtype)))
    assert not found.why_not
    return found.digest


@pytest.mark.models
def test_whatever_is_other_is_compiled_again(processes: Processes) -> None:
    assert not processes.run()["hit"]
    others: list[dict[str, Any]] = [
        {"width": 16},
        {"flag": False},
        {"train": False},
        {"freeze": True},
        {"rows": 6},
        {"set": {"SCALE": 3.0}},
        {"options": {"weight_decay": 0.5}},
        {"optimizer": "SGD"},
        {"compiled": {"clip_grad_norm": 1e9}},
        {"variables": {"USERS_FLAG": "1"}},
        {"compiled": {"loss_is": "mean"}},
    ]
    assert [other for other in others if processes.run(**other)["hit"]] == []
    assert processes.run()["hit"]


def test_a_changed_line_of_the_model_is_compiled_again(processes: Processes) -> None:
    assert not processes.run()["hit"]
    processes.write(MODEL.replace("torch.relu", "torch.tanh"))
    assert not processes.run()["hit"]
    processes.write(MODEL.replace("torch.arange(8.0)", "torch.arange(8.0) + 1"))
    assert not processes.run()["hit"]
    processes.write(MODEL)
    assert processes.run()["hit"]


def test_a_damaged_file_is_warned_of_and_replaced(processes: Processes) -> None:
    processes.run()
    [path] = processes.cache.glob("*.json")
    whole = path.read_text()
    for damage in (whole[: len(whole) // 2], whole.replace("aten.relu", "aten.tanh"), "\x00", "{}"):
        path.write_text(damage)
        found = processes.run()
        assert not found["hit"]
        assert any("a kept step cannot be read and is compiled again" in said for said in found["said"])
    assert processes.run()["hit"]


def test_what_nobody_can_describe_is_not_kept(processes: Processes) -> None:
    processes.write(
        MODEL.replace("SCALE = 2.0", "SCALE = 2.0\n    DRAWS = torch.Generator()").replace(
            "torch.relu(self.first(x))", "torch.relu(self.first(x)) + (DRAWS is None)"
        )
    )
    processes.run()
    assert not list(processes.cache.glob("*.json")) and not processes.run()["hit"]


def test_the_oldest_goes_when_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFADE_CACHE_MB", str(2500 / 2**20))
    for number, name in enumerate("abc"):
        write(tmp_path / f"{name}.json", "x" * 1000)
        os.utime(tmp_path / f"{name}.json", (number, number))
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["b", "c"]
    os.utime(tmp_path / "b.json", (9, 9))  # used again
    evict(tmp_path, 1500)
    assert [path.stem for path in tmp_path.glob("*.json")] == ["b"]
    (tmp_path / ".left.tmp").write_text("x" * 2000)
    os.utime(tmp_path / ".left.tmp", (0, 0))
    evict(tmp_path, limit())
    assert not (tmp_path / ".left.tmp").exists()


def test_the_folder_is_the_users_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CROSSFADE_CACHE", "OFF")
    assert folder() is None
    monkeypatch.setenv("CROSSFADE_CACHE", str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.delenv("CROSSFADE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert folder() == Path("/somewhere/crossfade")


def test_ranks_take_a_kept_step_together_or_not_at_all(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for mode in ("replicate", "zero2"):
        where = str(tmp_path / mode)
        cold, warm = (ranks(2).run(trained, where, mode, -1) for _ in range(2))
        assert [found["hit"] for found in cold] == [False, False]
        assert [found["hit"] for found in warm] == [True, True]
        assert [found["losses"] for found in cold] == [found["losses"] for found in warm]
        assert cold[0]["losses"] == pytest.approx(cold[0]["alone"], abs=1e-6)
        lacking = ranks(2).run(trained, where, mode, 1)
        assert [found["hit"] for found in lacking] == [False, False]
        assert lacking[0]["losses"] == cold[0]["losses"]


def trained(where: str, mode: str, lacks: int) -> dict[str, Any]:
    """Three steps on a rank with the cache in a folder; the rank that `lacks` it has an empty one."""
    rank = torch.distributed.get_rank()
    os.environ["CROSSFADE_CACHE"] = f"{where}-{rank}-empty-{time.time_ns()}" if rank == lacks else f"{where}-{rank}"
    try:
        torch.manual_seed(0)
        model, alone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), None
        alone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        alone.load_state_dict(model.state_dict())
        batch = torch.randn(4, 4), torch.randn(4, 2)
        plain, expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), []
        for _ in range(3):
            plain.zero_grad()
            loss = nn.functional.mse_loss(alone(batch[0]), batch[1])
            loss.backward()
            plain.step()
            expected.append(float(loss))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 2}, data_parallel=mode)  # type: ignore[arg-type]
        losses = [float(step(*batch)) for _ in range(3)]
        hit = step.pipeline.names() == ["cache"]
        step.close()
    finally:
        os.environ["CROSSFADE_CACHE"] = "off"
    return {"hit": hit, "losses": losses, "alone": expected}


def test_the_report_of_a_kept_step_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CROSSFADE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    reports = []
    for _ in range(2):
        model = nn.Linear(4, 2)
        step = compile_step(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
        reports.append(step.prepare(torch.ones(4, 4), torch.ones(4, 2)).report)
    assert "kept from before" in reports[1].facts["capture"] and "kept" not in reports[0].facts["capture"]
    assert reports[0].verdicts == reports[1].verdicts and reports[0].program == reports[1].program


def test_a_folder_that_cannot_be_written_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSFADE_CACHE", str(tmp_path / "file" / "below"))
    model = nn.Linear(4, 2)
    step = compile_step(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
    assert float(step(torch.ones(4, 4), torch.ones(4, 2))) > 0
    assert any("is not kept for other processes" in record.message for record in caplog.records)
    assert cache.folder() == tmp_path / "file" / "below"
