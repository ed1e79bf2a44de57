"""A machine read from a trace of an earlier step: what the trace says, what it leaves to another, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade import Machine, Ranks
from crossfade.cost.presets import preset
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind
from tests.cost.traces import LINK, collective, operator, whole_step, write
from tests.files.mutations import mutated


def test_links_rates_and_launches_are_what_the_step_showed(tmp_path: Path) -> None:
    machine = Machine.from_trace(write(tmp_path / "step.json", whole_step()))
    assert machine.name == "step" and machine.device == "cuda"
    for axis in ("dp", "*"):
        for kind in Kind:
            link = machine.fabric(axis).links[kind]
            assert link.latency == pytest.approx(LINK.latency, rel=1e-3), "late ranks do not count"
            assert link.bandwidth == pytest.approx(LINK.bandwidth, rel=1e-3)
    rates = {"bfloat16": 2 * 2**30 / 20e-6, "float32": 2 * 2 * 2**27 / 40e-6}
    assert machine.flops == pytest.approx(rates, rel=1e-4)
    assert machine.memory_bandwidth == pytest.approx(3 * 4 * 2**24 / 100e-6, rel=1e-4)
    assert machine.overhead == 1.5e-6 and machine.fabric("dp").launch == 3e-5
    assert machine.source == (
        "a trace of 24 collectives, 4 matrix products, 2 elementwise operators; "
        "unseen, from the slowest link seen, or nothing: broadcast along dp"
    )
    assert Machine.from_json(machine.to_json()) == machine


def test_what_is_not_in_the_trace_is_another_machines(tmp_path: Path) -> None:
    like = preset("h100-nvlink-node")
    found = Machine.from_trace(write(tmp_path / "step.json", [collective(Kind.ALL_REDUCE, 2**20)]), like=like)
    assert found.fabric("dp").links[Kind.ALL_REDUCE] != like.fabric("dp").links[Kind.ALL_REDUCE]
    assert found.fabric("dp").links[Kind.BROADCAST] == like.fabric("dp").links[Kind.BROADCAST]
    assert (found.flops, found.memory_bandwidth, found.memory) == (like.flops, like.memory_bandwidth, like.memory)
    said = "a trace of 1 collectives; unseen, from h100-nvlink-node: all_gather, reduce_scatter, all_to_all, broadcast"
    assert found.source.startswith(said)


def test_groups_have_their_own_fabrics(tmp_path: Path) -> None:
    fast = [collective(Kind.ALL_REDUCE, 2**size, group="mesh_tp") for size in (10, 20)]
    slow = [collective(Kind.ALL_REDUCE, 2**size, group="default_pg", late=5e-3) for size in (10, 20)]
    machine = Machine.from_trace(write(tmp_path / "step.json", [*whole_step(), *fast, *slow]))
    assert set(machine.fabrics) == {"dp", "tp", "*"}
    latencies = [machine.fabric(axis).links[Kind.ALL_REDUCE].latency for axis in ("elsewhere", "tp")]
    assert latencies[0] > 1e-3 > latencies[1]


OWED = {
    "no matrix product of float32": [collective(Kind.ALL_REDUCE, 1024)],
    "no collective of known size": operator(1, "aten::mm", [[8, 8], [8, 8]], ["float", "float"], None),
    "no elementwise operator of known size": [
        collective(Kind.ALL_REDUCE, 1024),
        *operator(1, "aten::mm", [[8, 8], [8, 8]], ["float", "float"], 3.0),
    ],
}


@pytest.mark.parametrize("reason", OWED)
def test_what_is_owed_is_asked_for(tmp_path: Path, reason: str) -> None:
    path = write(tmp_path / "step.json", OWED[reason])
    with pytest.raises(MachineError, match=rf"step\.json, which has .*: {reason}.*record_shapes=True, or pass like="):
        Machine.from_trace(path)


def changed(event: dict[str, Any], **args: Any) -> list[dict[str, Any]]:
    return [{**event, "args": {**event["args"], **args}}]


WRONG = {
    "traceEvents[0].args.Group size = 'eight'": changed(collective(Kind.ALL_REDUCE, 8), **{"Group size": "eight"}),
    "traceEvents[0].args.In msg nelems = -4": changed(collective(Kind.ALL_REDUCE, 8), **{"In msg nelems": -4}),
    "traceEvents[0].dur = -1": [{**collective(Kind.ALL_REDUCE, 8), "dur": -1}],
    "traceEvents[0].dur = None": [{**collective(Kind.ALL_REDUCE, 8), "dur": None}],
    "traceEvents[0] = 7": [7],
    "traceEvents[0].args.Input Dims[0][0] = 1125899906842624": operator(
        1, "aten::mm", [[2**50, 8], [8, 8]], ["float", "float"], None
    ),
    "traceEvents[0].args.Input Dims[0] = [1, 1, 1": operator(1, "aten::mm", [[1] * 90, [8]], ["float", "float"], None),
}


@pytest.mark.parametrize("place", WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, place: str) -> None:
    path = write(tmp_path / "step.json", WRONG[place])
    with pytest.raises(MachineError) as caught:
        Machine.from_trace(path, like=preset("ethernet-1gbit"))
    assert f"step.json, {place}" in str(caught.value) and "torch.profiler" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [], "traceEvents": []}'])
def test_no_traces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=r"step\.json.*Remedy"):
        Machine.from_trace(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no file .*gone\.json"):
        Machine.from_trace(tmp_path / "gone.json")
    with pytest.raises(MachineError, match=r"step\.json\.gz, which is compressed.*gunzip"):
        Machine.from_trace(write(tmp_path / "step.json.gz", []))


def test_mutated_traces_are_read_or_refused_by_name(tmp_path: Path) -> None:
    right = write(tmp_path / "step.json", whole_step()).read_bytes()
    dice = random.Random(0)
    outcomes = set()
    for _ in range(400):
        path = tmp_path / "wrong.json"
        path.write_bytes(mutated(right, path.name, dice))
        try:
            Machine.from_trace(path, like=preset("ethernet-1gbit"))
            outcomes.add("read")
        except MachineError as error:
            assert "wrong.json" in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def profiled(folder: str) -> str:
    """A small step of this rank, profiled as users do."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional = torch.ops._c10d_functional
    x, square = torch.ones(2**16), torch.ones(256, 256)

    def step() -> None:
        for size in (2**10, 2**16):
            functional.wait_tensor(functional.all_reduce(x[:size], "sum", group))
            functional.wait_tensor(functional.all_gather_into_tensor(x[:size], 2, group))
        torch.add(torch.mm(square, square), square)

    step()
    path = f"{folder}/rank{dist.get_rank()}.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    profile.export_chrome_trace(path)
    return path


def test_a_step_on_gloo_as_the_profiler_writes_it(tmp_path: Path) -> None:
    """In processes of their own: gloo's spans do not say which group they are of, if there were others before."""
    with Ranks(2) as own:
        paths = own.run(profiled, str(tmp_path))
    for path in paths:
        events = json.loads(Path(path).read_text())["traceEvents"]
        spans = [event for event in events if event.get("name") == "gloo:all_gather"]
        assert spans, "torch's profiler names gloo's spans otherwise now"
        machine = Machine.from_trace(path)
        assert machine.device == "cpu" and list(machine.fabrics) == ["*"]
        assert machine.source.startswith("a trace of 4 collectives, 1 matrix products, 1 elementwise operators; unseen")
        gathered = machine.collective_seconds(Kind.ALL_GATHER, 2 * 4 * 2**16, ranks=2)
        assert 0 < gathered < 10 * max(event["dur"] for event in spans) * 1e-6
        assert machine.flops["float32"] > 1e8 and machine.memory_bandwidth > 1e7
