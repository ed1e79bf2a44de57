"""Compiled steps kept for other processes: taken where all is the same, on all ranks or none, and only then.

Processes are real ones. What a process says of a step that it took from the cache is compared bit for bit with what the
process says that compiled it, whose numbers are compared with eager torch elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossfade import Ranks, compile_step
from crossfade.compile.cache_folder import evict, folder, found, limit, write
from tests.compile.cached_steps import CASES, ON_RANKS, trained
from tests.compile.cached_steps import adamw as two_groups

ROOT = Path(__file__).parent.parent.parent
SAME = ("losses", "weights", "captures", "program", "facts", "verdicts", "timeline", "passes", "pipeline", "outputs")

ALL = [pytest.param(list(cases), marks=pytest.mark.models) for cases in (CASES, ON_RANKS)]
ONCE = [list(CASES)[::4], ["planned@2", "zero3@2", "counting@2", "gradients@2", "plan@2"], *ALL]
"""Cases that two processes meet: compiled by the first, taken by the second."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own for what this process keeps."""
    monkeypatch.setenv("CROSSFADE_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def process(where: Path, *command: str, variables: dict[str, str] | None = None) -> Any:
    """What a process prints last, as JSON, whose cache is in a folder."""
    around = {**os.environ, "CROSSFADE_CACHE": str(where / "kept"), "PYTHONPATH": f"{ROOT}:{where}"}
    done = subprocess.run(
        [sys.executable, *command],
        env=around | {"OMP_NUM_THREADS": "1"} | (variables or {}),
        cwd=where,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.ranks
@pytest.mark.parametrize("names", ONCE, ids=["one-device", "ranks", "all-on-one-device", "all-on-ranks"])
def test_L6_what_is_taken_does_and_says_what_was_compiled(names: list[str], tmp_path: Path) -> None:
    compiled, taken = (process(tmp_path, "-m", "tests.compile.cached_steps", *names) for _ in range(2))
    assert [name for name in names if compiled[name]["hit"]] == []
    assert [name for name in names if not taken[name]["hit"] or not all(taken[name].get("hits", [True]))] == []
    for name in names:
        said_alike = [said for said in SAME if said != "timeline" or name in CASES]  # each rank predicts its own
        differ = [said for said in said_alike if compiled[name].get(said) != taken[name].get(said)]
        assert differ == [], name
        assert "taken from" in taken[name]["cache"] and compiled[name]["cache"] == "kept for other processes"


class Inner(nn.Module):
    """Reads a config, a global and its own code."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.config = {"scale": scale, "words": {"a", "b", "c"}}
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        """Twice the linear."""
        result: Tensor = self.linear(x) * self.config["scale"] * GLOBAL
        return result


class Other(Inner):
    """Does it otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Without the global."""
        result: Tensor = self.linear(x) * self.config["scale"]
        return result


GLOBAL = 1.5


def closed_over(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that reads a closure."""
    return lambda output, target: nn.functional.mse_loss(output, target) * factor


class Odd(torch.optim.SGD):
    """Whose step has a number of its own."""

    factor: Any = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step, and a little more."""
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(1 - 1e-3 * self.factor)


def taken(**changed: Any) -> bool:
    """Whether a step with something changed is one that was kept."""
    given: dict[str, Any] = {
        "inner": Inner, "scale": 2.0, "rows": 4, "dtype": torch.float32, "train": True, "optimizer": torch.optim.SGD,
        "options": {"lr": 0.1, "momentum": 0.9}, "factor": 1.0, "seed": 0, "freeze": False, "compiled": {},
        "strides": False, "model": lambda model: None, "made": lambda optimizer: None, "requires_grad": False,
    } | changed  # fmt: skip
    torch.manual_seed(given["seed"])
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), given["inner"](given["scale"]))
    model.to(given["dtype"]).train(given["train"])
    model[0].bias.requires_grad_(not given["freeze"])
    given["model"](model)
    optimizer = given["optimizer"](model.parameters(), **given["options"])
    given["made"](optimizer)
    inputs = torch.randn(given["rows"], 5, dtype=given["dtype"])
    inputs = inputs.t().contiguous().t() if given["strides"] else inputs
    batch = inputs, torch.randn(given["rows"], 3, dtype=given["dtype"])
    step = compile_step(model, closed_over(given["factor"]), optimizer, **given["compiled"])
    step(*batch)
    return step.pipeline.names()[0] == "cache"


def hook(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output + 1


CHANGES: dict[str, dict[str, Any]] = {
    "code of a submodule": {"inner": Other},
    "config": {"scale": 3.0},
    "config of another type": {"scale": 2},
    "closure": {"factor": 2.0},
    "rows": {"rows": 6},
    "strides": {"strides": True},
    "dtype": {"dtype": torch.float64},
    "eval": {"train": False},
    "eval of one module": {"model": lambda model: model[1].eval()},
    "dropout": {"model": lambda model: setattr(model[1], "p", 0.2)},
    "frozen": {"freeze": True},
    "hook": {"model": lambda model: model[2].register_forward_hook(hook)},
    "buffer": {"model": lambda model: model.register_buffer("more", torch.ones(2))},
    "tied": {"model": lambda model: setattr(model[2], "tied", model[0])},
    "optimizer": {"optimizer": torch.optim.AdamW, "options": {"lr": 0.1}},
    "no momentum": {"options": {"lr": 0.1}},
    "decay that is no longer zero": {"options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}},
    "decay of one group": {"made": lambda opt: opt.add_param_group({"params": opt.param_groups[0]["params"].pop()})},
    "nesterov": {"options": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "clipping": {"compiled": {"clip_grad_norm": 1.0}},
    "accumulation": {"compiled": {"accumulate": 2}},
    "how losses are put together": {"compiled": {"accumulate": 2, "loss_is": "sum"}},
}


@pytest.fixture
def settings() -> Iterator[None]:
    """torch's settings as they were."""
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.set_default_dtype(before[1])
    torch.set_float32_matmul_precision(before[2])
    torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "environment": lambda patch: patch.setenv("MODEL_FLAG", "1"),
    "global": lambda patch: patch.setattr(sys.modules[__name__], "GLOBAL", 2.5),
    "threads": lambda patch: torch.set_num_threads(torch.get_num_threads() + 1),
    "default dtype": lambda patch: torch.set_default_dtype(torch.float64),
    "precision": lambda patch: torch.set_float32_matmul_precision("medium"),
    "deterministic": lambda patch: torch.use_deterministic_algorithms(True),
    "version": lambda patch: patch.setattr(torch, "__version__", "9.9"),
}


def test_any_single_change_is_compiled(kept: Path) -> None:
    assert not taken()
    assert [name for name, changed in CHANGES.items() if taken(**changed)] == []
    assert taken()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("name", AROUND)
def test_any_change_around_it_is_compiled(kept: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from crossfade.compile import cache_surroundings

    cache_surroundings._versions.cache_clear()
    data = {"dtype": torch.float32}
    assert not taken(**data)
    with monkeypatch.context() as patch:
        AROUND[name](patch)
        cache_surroundings._versions.cache_clear()
        assert not taken(**data)
    cache_surroundings._versions.cache_clear()


def test_autocast_is_compiled(kept: Path) -> None:
    assert not taken()
    with torch.autocast("cpu", torch.bfloat16):
        assert not taken()


SAME_STEP: dict[str, dict[str, Any]] = {
    "nothing": {},
    "other weights and data": {"seed": 1},
    "another learning rate": {"options": {"lr": 0.2, "momentum": 0.8}},
    "what the forward does not read": {"model": lambda model: setattr(model[2], "epoch", 5)},
    "numbers of a scheduler": {"made": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3)},
}


def test_what_a_program_does_not_depend_on_is_no_part_of_the_key(kept: Path) -> None:
    assert not taken()
    assert [name for name, changed in SAME_STEP.items() if not taken(**changed)] == []


def test_what_an_optimizer_reads_is_part_of_the_key(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"optimizer": Odd, "options": {"lr": 0.1}}
    assert not taken(**odd) and taken(**odd)
    assert not taken(**odd, made=lambda optimizer: setattr(optimizer, "factor", 3))
    assert not taken(**odd, made=lambda optimizer: setattr(optimizer, "factor", 3.5))
    monkeypatch.setattr(Odd, "factor", 5)
    assert not taken(**odd)


def test_a_state_that_was_loaded_is_like_one_that_will_be_made(kept: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(2)]
    batch, hits = (torch.ones(4, 3), torch.ones(4, 2)), []
    state: dict[str, Any] = {}
    for model in models:
        step = compile_step(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
        if state:
            step.load_state_dict(state)
        step(*batch)
        hits.append(step.pipeline.names()[0] == "cache")
        state = step.state_dict()
    assert hits == [False, True]


def test_a_changed_line_of_the_users_is_compiled(tmp_path: Path) -> None:
    model = tmp_path / "users_model.py"
    helper = tmp_path / "users_helper.py"
    source = """
        import torch
        from torch import nn
        SIZES = torch.arange(3.0)

        class Net(nn.Linear):
            def forward(self, x):
                from users_helper import scaled
                return scaled(torch.relu(super().forward(x))) * SIZES
    """
    script = """
        import json, torch
        from users_model import Net
        from crossfade import compile_step
        torch.manual_seed(0)
        net = Net(4, 3)
        step = compile_step(net, torch.nn.functional.mse_loss, torch.optim.AdamW(net.parameters()))
        losses = [float(step(torch.randn(8, 4), torch.ones(8, 3))) for _ in range(2)]
        print(json.dumps([step.pipeline.names()[0] == "cache", losses]))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    model.write_text(textwrap.dedent(source))
    helper.write_text("def scaled(x):\n    return x * 2\n")
    first, second = process(tmp_path, "train.py"), process(tmp_path, "train.py")
    assert (first[0], second[0]) == (False, True) and first[1] == second[1]
    helper.write_text("def scaled(x):\n    return x * 3\n")  # which is imported while the forward runs
    third = process(tmp_path, "train.py")
    assert not third[0] and third[1] != first[1]
    model.write_text(textwrap.dedent(source).replace("torch.relu", "torch.tanh"))
    assert not process(tmp_path, "train.py")[0]
    assert not process(tmp_path, "train.py", variables={"USERS_FLAG": "1"})[0]


class Reads(nn.Linear):
    """Reads something that nobody can know of."""

    source: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """The linear and more."""
        return super().forward(x) * float(self.source() if callable(self.source) else 1)


def cache_of(model: nn.Module, **options: Any) -> str:
    """What the report says of the cache."""
    step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), **options)
    step(torch.ones(4, 3), torch.ones(4, 2))
    return step.report.facts.get("cache", "")


def test_what_cannot_be_known_is_not_kept_and_the_report_says_why(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = tmp_path / "number.txt"
    number.write_text("2")
    model = Reads(3, 2)
    model.source = lambda: number.read_text()  # the path is known, what is there is not
    assert "number.txt was read while it was captured" in cache_of(model)
    model = Reads(3, 2)
    model.source = torch.Generator()
    assert "nobody can say whether it is the same" in cache_of(model) and "a Generator" in cache_of(model)
    assert "passes of one's own" in cache_of(nn.Linear(3, 2), passes=[])
    assert "sizes are symbols" in cache_of(nn.Linear(3, 2), dynamic=True)
    assert not list(kept.glob("*.json"))
    monkeypatch.setenv("CROSSFADE_CACHE", "off")
    assert cache_of(nn.Linear(3, 2)) == ""


def hostile(whole: str) -> dict[str, str]:
    """Files that are not what was written, some with sums that fit."""
    import hashlib

    head, rest = whole.splitlines()

    def with_rest(changed: str) -> str:
        return f"{json.dumps({**json.loads(head), 'sum': hashlib.sha256(changed.encode()).hexdigest()})}\n{changed}\n"

    def with_head(**changed: Any) -> str:
        return f"{json.dumps({**json.loads(head), **changed})}\n{rest}\n"

    content = json.loads(rest)
    update = {"formula": "__import__('os').system('true')", "symbols": [], "of": [], "number": 0}
    return {
        "empty": "",
        "cut": whole[: len(whole) // 2],
        "cut in the head": head[:100],
        "no text": "\x00\x01",
        "nested": "[" * 100000,
        "a list": "[]\n[]\n",
        "changed program": whole.replace("aten.mm", "aten.mul"),
        "changed program that fits its sum": with_rest(rest.replace("aten.mm(", "aten.mv(")),
        "another operator": with_rest(json.dumps({**content, "program": content["program"].replace("aten", "os")})),
        "no inputs": with_rest(json.dumps({**content, "program": "return"})),
        "constants that are too large": with_rest(json.dumps({**content, "constants": {"k": {"dtype": "f32"}}})),
        "code in a number": with_head(updates=[update]),
        "code in a symbol": with_head(branches=[{"condition": "", "formula": "1", "symbols": ["x=exit()"], "of": [0]}]),
        "a power that never ends": with_head(
            branches=[{"condition": "", "formula": "9**9**9", "symbols": [], "of": []}]
        ),
        "a number that there is not": with_head(inputs={"lr": 99}),
        "a division by zero": with_head(branches=[{"condition": "", "formula": "1/0", "symbols": [], "of": []}]),
        "another format": with_head(format=1),
        "another key": with_head(key="0"),
    }


def test_a_file_that_is_not_what_was_written_is_a_miss(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken()
    [path] = kept.glob("*.json")
    whole = path.read_text()
    for name, text in hostile(whole).items():
        path.write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="crossfade"):
            assert not taken(), name
        assert len([each for each in caplog.records if "cannot be read" in each.message]) == 1, name
    path.write_bytes(b"\xff\xfe\x00" * 100)
    assert not taken() and taken()


def test_a_folder_that_cannot_be_written_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSFADE_CACHE", str(tmp_path / "file" / "below"))
    assert "not kept for other processes" in cache_of(nn.Linear(3, 2))


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
    monkeypatch.setenv("CROSSFADE_CACHE_MB", "much")
    assert limit() == 2**30


def test_many_write_and_delete_at_once(tmp_path: Path) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(40):
            try:
                write(tmp_path / f"key-{turn % 4}.json", str(number) * 50000)
                for path in found(tmp_path, "key"):
                    text = path.read_text()
                    wrong.extend([path.name] if len(set(text)) != 1 or len(text) != 50000 else [])
                if turn % 7 == 0:
                    evict(tmp_path, 0)
            except FileNotFoundError:
                continue
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_folder_is_the_users_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CROSSFADE_CACHE", "OFF")
    assert folder() is None
    monkeypatch.setenv("CROSSFADE_CACHE", str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    for given in ("", "1", "on"):
        monkeypatch.setenv("CROSSFADE_CACHE", given)
        assert folder() == Path("/somewhere/crossfade")


@pytest.mark.ranks
def test_ranks_take_a_kept_step_together_or_not_at_all(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    both, own = str(tmp_path / "both"), [str(tmp_path / "first"), str(tmp_path / "second")]
    cold, warm = (ranks(2).run(on_rank, [both, both]) for _ in range(2))
    assert [[said["hit"] for said in each] for each in (cold, warm)] == [[False, False], [True, True]]
    assert cold[0]["losses"] == warm[0]["losses"] == warm[1]["losses"]
    assert len(list(Path(both).glob("*.json"))) == 1, "ranks share what they keep"
    lacking = ranks(2).run(on_rank, [both, own[1]])  # the second rank has nothing
    assert [said["hit"] for said in lacking] == [False, False]
    assert lacking[0]["losses"] == cold[0]["losses"]
    off = ranks(2).run(on_rank, [both, "off"])
    assert [said["hit"] for said in off] == [False, False]
    ranks(2).run(on_rank, own)  # what one has kept alone is not what the other has
    [first] = Path(own[0]).glob("*.json")
    damaged = first.read_text()
    first.write_text(damaged[:-10])
    assert [said["hit"] for said in ranks(2).run(on_rank, own)] == [False, False]
    assert [said["hit"] for said in ranks(2).run(on_rank, own)] == [True, True]


@pytest.mark.ranks
def test_ranks_do_not_mix_what_two_jobs_have_compiled(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    jobs = [[str(tmp_path / f"{job}{rank}") for rank in range(2)] for job in "ab"]
    for folders in jobs:
        ranks(2).run(on_rank, folders)
    mixed = ranks(2).run(on_rank, [jobs[0][0], jobs[1][1]])
    assert [said["hit"] for said in mixed] == [False, False]


def on_rank(folders: list[str]) -> dict[str, Any]:
    """A step on a rank whose cache is in one of some folders."""
    before = os.environ.get("CROSSFADE_CACHE")
    os.environ["CROSSFADE_CACHE"] = folders[torch.distributed.get_rank()]
    try:
        return trained(two_groups, mesh={"dp": 2}, data_parallel="zero2")
    finally:
        os.environ["CROSSFADE_CACHE"] = before or "off"


def test_guards_watch_a_step_that_was_taken(kept: Path) -> None:
    taken()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), Inner(2.0))
    step = compile_step(model, closed_over(1.0), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batch = torch.randn(4, 5), torch.randn(4, 3)
    step(*batch)
    assert step.pipeline.names()[0] == "cache"
    model[2].config["unread"] = 1  # captured again, and known to be the same program
    step(*batch)
    assert step.captures == 1
    model[2].config["scale"] = 4.0
    step(*batch)
    assert step.captures == 2
