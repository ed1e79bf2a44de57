"""Machines: what they say, how they are kept, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.cost.machine_parts import bytes_sent
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind
from tests.cost.toy_machine import toy_machine


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (Kind.ALL_REDUCE, 1500.0),
        (Kind.ALL_GATHER, 750.0),
        (Kind.REDUCE_SCATTER, 750.0),
        (Kind.ALL_TO_ALL, 750.0),
        (Kind.BROADCAST, 1000.0),
    ],
)
def test_bytes_sent_by_a_perfect_algorithm_among_four(kind: Kind, sent: float) -> None:
    assert bytes_sent(kind, 1000, 4) == sent


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 0.0), (2, 2.0), (3, 4 / 3 + 2), (8, 1.75 + 3)])
def test_latency_counts_each_doubling_of_the_ranks(ranks: int, seconds: float) -> None:
    assert Link(latency=1.0, bandwidth=1000.0).seconds(Kind.ALL_REDUCE, 1000, ranks) == pytest.approx(seconds)


def test_a_named_axis_comes_before_the_one_for_all() -> None:
    fast = Fabric(dict.fromkeys(Kind, Link(0.0, 1e9)))
    machine = toy_machine(fabrics={"*": toy_machine().fabric("dp"), "tp": fast})
    assert machine.fabric("tp") is fast
    assert machine.fabric("dp").launch == 1e-3


def test_an_unknown_axis_is_named() -> None:
    machine = toy_machine(fabrics={"tp": toy_machine().fabric("tp")})
    with pytest.raises(MachineError) as caught:
        machine.collective_seconds(Kind.ALL_REDUCE, 8, 2, axis="dp")
    assert str(caught.value) == (
        "toy has no fabric for axis 'dp': expected one of tp, or one for every axis. "
        'Remedy: add it under fabrics, or add one under "*".'
    )


def test_json_and_files_give_the_same_machine_back(tmp_path: Path) -> None:
    machine = toy_machine(memory=10**9, source="made up", convolutions={"bfloat16": 0.5})
    assert Machine.from_json(machine.to_json()) == machine
    assert Machine.load(machine.save(tmp_path / "toy.json")) == machine


def test_equal_machines_hash_and_print_alike() -> None:
    assert hash(toy_machine()) == hash(toy_machine())
    assert repr(toy_machine()) == repr(toy_machine())
    assert toy_machine() != toy_machine(overhead=2e-3)
    assert repr(toy_machine()) != repr(toy_machine(overhead=2e-3))
    assert repr(toy_machine()).startswith("Machine('toy', ")


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    plain = json.loads(toy_machine().to_json())
    change(plain)
    return json.dumps(plain)


LINK = "fabrics.*.links.all_reduce"
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing field": (lambda m: m.pop("flops"), "machine.flops is missing: expected every field"),
    "missing kind": (
        lambda m: m["fabrics"]["*"]["links"].pop("broadcast"),
        "fabrics.*.links.broadcast is missing: expected every kind of collective",
    ),
    "missing number": (
        lambda m: m["fabrics"]["*"]["links"]["all_reduce"].pop("latency"),
        f"{LINK}.latency is missing: expected every field",
    ),
    "unknown field": (
        lambda m: m.update(speed=1),
        "machine.speed: expected only name, fabrics, flops, memory_bandwidth, overhead, device, memory, source",
    ),
    "a piece of all kinds": (
        lambda m: m["fabrics"]["*"].update(piece=None),
        "fabrics.*.piece: expected only links, launch, slows_compute. Remedy: correct it, or calibrate again.",
    ),
    "unknown kind": (
        lambda m: m["fabrics"]["*"]["links"].update(scan={}),
        "fabrics.*.links.scan: expected one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast",
    ),
    "negative": (
        lambda m: m["fabrics"]["*"]["links"]["all_reduce"].update(latency=-1),
        f"{LINK}.latency = -1: expected a number of at least 0",
    ),
    "a piece of nothing": (
        lambda m: m["fabrics"]["*"]["links"]["all_gather"].update(piece=0),
        "fabrics.*.links.all_gather.piece = 0: expected a number more than 0",
    ),
    "zero": (lambda m: m.update(memory_bandwidth=0), "memory_bandwidth = 0: expected a number more than 0"),
    "not a number": (
        lambda m: m["flops"].update(float32=math.nan),
        "flops.float32 = nan: expected a number more",
    ),
    "infinite": (lambda m: m.update(overhead=math.inf), "overhead = inf: expected a number of at least 0"),
    "text for a number": (lambda m: m.update(memory="80 GB"), "memory = '80 GB': expected a number more than 0"),
    "truth for a number": (lambda m: m.update(overhead=True), "overhead = True: expected a number of at least 0"),
    "number for text": (lambda m: m.update(name=5), "name = 5: expected text"),
    "list for fabrics": (lambda m: m.update(fabrics=[]), "fabrics = []: expected an object"),
    "list for flops": (lambda m: m.update(flops=[1]), "flops = [1]: expected an object"),
    "list for convolutions": (lambda m: m.update(convolutions=[1]), "convolutions = [1]: expected an object"),
    "no convolutions": (
        lambda m: m.update(convolutions={"float32": 0}),
        "convolutions.float32 = 0: expected a number more than 0",
    ),
    "no float32": (lambda m: m["flops"].pop("float32"), "flops.float32 is missing: expected that dtype at least"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_named(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(MachineError) as caught:
        Machine.from_json(changed(change))
    assert str(caught.value).startswith(message)
    assert ". Remedy: " in str(caught.value)


def test_other_text_is_refused() -> None:
    with pytest.raises(MachineError, match=r"^text, which is not JSON \(Expecting value: line 1"):
        Machine.from_json("a fast one")
    with pytest.raises(MachineError, match=r"^machine = \[1\]: expected an object"):
        Machine.from_json("[1]")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no file .*none\.json.*crossfade calibrate --save FILE"):
        Machine.load(tmp_path / "none.json")
