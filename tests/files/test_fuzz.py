"""A sample of `make fuzz-files`: wrong files of every kind are read, or refused by an error of ours that names them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.files.kinds import KINDS

SAMPLE = 25


def test_wrong_files_are_refused_by_name_and_run_nothing() -> None:
    """In a process of its own: an audit hook stays for ever."""
    command = [sys.executable, "-m", "tests.files.fuzz", "--count", str(SAMPLE)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(KINDS)
