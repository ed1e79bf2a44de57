"""Figures kept as JSON in benchmarks/results/, with the machine and the date."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def save(name: str, figures: Mapping[str, Any]) -> None:
    """Write one benchmark's figures and say where."""
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine, **figures}, indent=2) + "\n")
    print(f"kept in benchmarks/results/{path.name}")
