"""The public surface, what importing costs, and what a newcomer runs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import crossfade
from tests.forked import run_script

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_public_names_are_these() -> None:
    assert crossfade.__all__ == [
        "BatchError",
        "CaptureError",
        "CrossfadeError",
        "Expect",
        "FoundPlan",
        "Fused",
        "Gradients",
        "Machine",
        "MachineError",
        "MemoryLimitError",
        "MeshError",
        "ModelError",
        "NotYetError",
        "Numerics",
        "Optimized",
        "OptimizerError",
        "Outcome",
        "Pass",
        "PassError",
        "PassResult",
        "Phase",
        "Phases",
        "Pipeline",
        "Plan",
        "PlanDriftError",
        "PlanError",
        "Program",
        "RankFailedError",
        "RankMismatchError",
        "Ranks",
        "Report",
        "RewriteError",
        "Sharded",
        "Simplified",
        "StateError",
        "Step",
        "StepCompilation",
        "StrictError",
        "TRAINING",
        "TextError",
        "Verdict",
        "VerifyError",
        "check_compatible",
        "compile_gradients",
        "compile_step",
        "find_plan",
        "optimize",
        "reports",
        "run_passes",
        "shard",
        "simplify",
        "simulate",
    ]


@pytest.mark.parametrize("name", crossfade.__all__)
def test_everything_public_is_documented(name: str) -> None:
    assert len(inspect.getdoc(getattr(crossfade, name)) or "") > 40


def test_importing_brings_neither_inductor_nor_triton() -> None:
    program = (
        "import sys, crossfade;"
        "print([m for m in sys.modules if m.split('.')[:2] == ['torch', '_inductor'] or m.split('.')[0] == 'triton'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_the_first_example_launches() -> None:
    command = [sys.executable, "-m", "crossfade", "launch", "--ranks", "2", str(EXAMPLES[0])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("path", EXAMPLES[1:], ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    ranks = 2 if "init_process_group" in path.read_text() else 1
    codes = run_script(path, ranks, tmp_path, timeout=100)
    assert codes == [0] * ranks, "".join(log.read_text()[-2000:] for log in sorted(tmp_path.iterdir()))


def test_repository_files_hold_no_machine_paths() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    texts = [ROOT / name for name in listed.stdout.split() if not name.endswith(".png")]
    assert [str(path) for path in texts if path.exists() and ("/" + "work/" in path.read_text())] == []
