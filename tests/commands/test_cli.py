"""The command line, as a user types it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

from crossfade.commands import cli
from crossfade.cost.machine import Machine

PROGRAM = """
a: f32[2] = input("a")
b: f32[3] = input("b")
s: f32[2] = c10d.all_reduce(a, "sum", "dp")
w: f32[2] = c10d.wait_tensor(s)
s2: f32[3] = c10d.all_reduce(b, "sum", "dp")
w2: f32[3] = c10d.wait_tensor(s2)
return output("a", w), output("b", w2)
"""


def crossfade(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process: a new one takes seconds to import torch."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["crossfade", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def crossfade_alone(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as what starts ranks needs."""
    command = [sys.executable, "-m", "crossfade", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("command", ["", "calibrate", "demo", "explain", "launch", "passes", "simplify", "simulate"])
def test_help_is_there(command: str) -> None:
    run = crossfade if command else crossfade_alone
    result = run(*([command] if command else []), "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_explain_says_what_became_of_each_collective(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(PROGRAM)
    result = crossfade(
        "explain", str(path), "--passes", "bucket-all-reduces sink-waits", "--html", str(tmp_path / "r.html")
    )
    assert result.returncode == 0, result.stderr
    assert "s: bucketed: packed with others into one: bucket 0 with 2 members" in result.stdout
    assert "all_reduce: f32[5]" in result.stdout
    assert "bucket 0 with 2 members" in (tmp_path / "r.html").read_text()


def test_a_wrong_pass_name_gets_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(PROGRAM)
    result = crossfade("explain", str(path), "--passes", "bucket-all-reduce")
    assert result.returncode == 1
    assert "did you mean bucket-all-reduces" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_broken_program_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(PROGRAM.replace("c10d.all_reduce(b", "c10d.all_reduce(c"))
    result = crossfade("explain", str(path))
    assert result.returncode == 1
    assert "all_reduce(c" in result.stderr and "Remedy" in result.stderr


def test_passes_lists_options() -> None:
    assert "cap_mb: float | tuple[float, ...] | Callable[[int], float] = 2.0" in crossfade("passes").stdout
    assert "After:" in crossfade("passes", "sink-waits").stdout


def test_passes_says_which_run_by_default() -> None:
    assert "sink-waits  bitwise, runs by default" in crossfade("passes", "communicate").stdout
    assert "group-linears  reassociates, not by default" in crossfade("passes", "simplify").stdout


def saved_model(folder: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(4, 2)).eval()
    torch.export.save(torch.export.export(model, (torch.ones(3, 4),)), folder / "model.pt2")
    return folder / "model.pt2"


def test_simplify_writes_a_smaller_model(tmp_path: Path) -> None:
    path, out, page = saved_model(tmp_path), tmp_path / "small.pt2", tmp_path / "r.html"
    result = crossfade("simplify", str(path), "-o", str(out), "--without", "remove-asserts", "--html", str(page))
    assert result.returncode == 0, result.stderr
    assert "remove-dead-code" in result.stdout and "remove-asserts" not in result.stdout
    before, after = torch.export.load(path), torch.export.load(out)
    assert len(after.graph.nodes) == len(before.graph.nodes) - 1
    x = torch.randn(3, 4)
    assert torch.equal(after.module()(x), before.module()(x))
    assert "simplify-nodes" in page.read_text()


def test_simplify_runs_what_it_is_told(tmp_path: Path) -> None:
    path = saved_model(tmp_path)
    result = crossfade(
        "simplify", str(path), "--only", "remove-dead-code", "--after", "remove-dead-code=remove-asserts"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.index("remove-dead-code") < result.stdout.index("remove-asserts")
    wrong = crossfade("simplify", str(path), "--without", "remove-noop")
    assert wrong.returncode == 1
    assert "did you mean remove-noops" in " ".join(wrong.stderr.split())
    assert "Traceback" not in wrong.stderr


def test_launch_lets_steps_keep_their_memory_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "said.py"
    script.write_text("import os, sys; open(sys.argv[1], 'w').write(os.environ['MIMALLOC_PURGE_DELAY'])")
    said = []
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    for given in (None, "7"):
        if given is not None:
            monkeypatch.setenv("MIMALLOC_PURGE_DELAY", given)
        crossfade_alone("launch", "--ranks", "1", str(script), str(tmp_path / "said"), timeout=240)
        said.append((tmp_path / "said").read_text())
    assert said == ["600000", "7"]


def test_launch_names_the_rank_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)\n")
    result = crossfade_alone("launch", "--ranks", "2", str(script), timeout=240)
    assert result.returncode == 1
    assert "rank 1 ended with exit code 3" in " ".join(result.stderr.split())


@pytest.mark.ranks
def test_demo_ends_in_a_table_and_a_report(tmp_path: Path) -> None:
    result = crossfade_alone("demo", "--size", "tiny", "--steps", "3", "--report", str(tmp_path / "out"), timeout=300)
    assert result.returncode == 0, result.stderr
    for words in ("one process, eager", "torch DDP, default buckets", "(best)", "Crossfade", "Loss", "HTML report"):
        assert words in result.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["collectives_before"]["all_reduce"][0] > report["collectives_after"]["all_reduce"][0]
    assert (tmp_path / "out" / "index.html").stat().st_size > 10_000


def test_simulate_predicts_a_program_on_machines(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(PROGRAM)
    machines = ["--machine", "ethernet-1gbit", "--machine", "h100-nvlink-node"]
    result = crossfade("simulate", str(path), *machines, "--group-size", "8", "--html", str(tmp_path / "r.html"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" ms ") >= 6
    assert "predicted for h100-nvlink-node" in (tmp_path / "r.html").read_text()


def test_simulate_names_a_machine_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(PROGRAM)
    result = crossfade("simulate", str(path), "--machine", str(tmp_path / "none.json"))
    assert result.returncode == 1
    assert "crossfade calibrate" in " ".join(result.stderr.split())


def test_calibrate_writes_a_machine_that_loads(tmp_path: Path) -> None:
    result = crossfade_alone("calibrate", "--seconds", "1", "--save", str(tmp_path / "machine.json"), timeout=240)
    assert result.returncode == 0, result.stderr
    assert "all_reduce" in result.stdout
    assert Machine.load(tmp_path / "machine.json").name == "calibrated"
