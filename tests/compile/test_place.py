"""What a step is planned for where no machine is given: said once, with the remedy, where it is most likely another."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from crossfade.compile.place import _nearest_preset, _warn_of_preset, machine_for
from crossfade.ranks.mesh import Axis, DataParallel


def planned(backend: str, mode: str = "zero3") -> str | None:
    axis = Axis("dp", (0, 1), 0, backend)
    machine = machine_for(None, mode, DataParallel(axis, axis), {}, None, nn.Linear(2, 2))
    return machine.name if machine is not None else None


@pytest.fixture(autouse=True)
def _afresh() -> None:
    _warn_of_preset.cache_clear()


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_a_preset_taken_for_a_machine_that_nobody_named_is_a_warning(mode: str, caplog: pytest.LogCaptureFixture):
    assert planned("mpi", mode) == "h100-nvlink-node"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f'no machine given: data_parallel="{mode}" is planned for the preset h100-nvlink-node, but the parameters are '
        'on cpu and travel over mpi; pass machine="calibrate" to measure this one, which takes some seconds, or the '
        "name of a preset"
    )
    planned("mpi", mode)
    assert len(caplog.records) == 1, "said once"


@pytest.mark.parametrize(("backend", "mode"), [("gloo", "zero3"), ("nccl", "replicate"), ("nccl", "zero1")])
def test_what_is_right_or_needs_no_plan_is_no_warning(backend: str, mode: str, caplog: pytest.LogCaptureFixture):
    assert planned(backend, mode) == ("loopback-gloo" if mode == "zero3" else None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "said"),
    [("NVIDIA A100-SXM4-80GB", ", but the device here is NVIDIA A100-SXM4-80GB;"), ("NVIDIA H100 PCIe", "-node; pass")],
)
def test_a_device_other_than_the_presets_is_named(name: str, said: str, caplog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert _nearest_preset(torch.device("cuda", 0), "nccl", "zero2").name == "h100-nvlink-node"
    assert said in caplog.text
