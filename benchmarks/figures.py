"""Figures kept as JSON in benchmarks/results/, with the command, the machine and the date; see `page.py`."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def save(name: str, figures: Mapping[str, Any]) -> None:
    """Write one benchmark's figures and say where."""
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--worker", "--save")]
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *arguments])
    origin = {"date": date.today().isoformat(), "command": command, "machine": machine}
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({**origin, **figures}, indent=2) + "\n")
    print(f"kept in benchmarks/results/{path.name}")
