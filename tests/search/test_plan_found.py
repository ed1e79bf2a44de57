"""What was found, as a table, as JSON and back, and as the call of any row."""

from __future__ import annotations

import json

from crossfade.cost.presets import preset
from crossfade.search.candidates import Candidate
from crossfade.search.figures import Figures
from crossfade.search.plan_found import FoundPlan, Row

WAITS = {"dp all_gather": 0.2}
ROWS = [
    Row(Candidate({"dp": 2, "tp": 2}, "zero2", 2, keeps_whole=True), Figures(1.0, 0.8, WAITS, 10**9, 10**9), "", False,
        ("blocks.0.*",)),
    Row(Candidate({"dp": 4}, "zero1", memory_limit=10**9), Figures(1.5, 0.8, WAITS, 10**9, 10**9), "slower", True),
    Row(Candidate({"dp": 4}), Figures(0.5, 0.5, {}, 10**9, 3 * 10**9), "lacks 1 GB of memory"),
    Row(Candidate({"tp": 4}), None, "cannot be split"),
]  # fmt: skip
FOUND = FoundPlan("Tower", preset("ethernet-1gbit"), 4, 3 * 10**9, ROWS, {"up": "colwise"}, 2.0)


def test_it_is_a_table_with_a_call() -> None:
    assert [line.rstrip() for line in str(FOUND).splitlines()] == [
        "Tower on 4 ranks of ethernet-1gbit, 3 GB each: 4 candidates in 2 s",
        "",
        "   candidate                                                      step ms  exposed ms  memory GB  why not",
        "1  dp=2 tp=2 zero2, the first parameters whole, 2 micro-batches   1,000.0       200.0          2  taken",
        "2  dp=4 zero1, within a memory limit                             ~1,500.0      ~200.0         ~2  slower",
        "   dp=4 replicate                                                   500.0         0.0          4  "
        "lacks 1 GB of memory",
        "   tp=4                                                                                           "
        "cannot be split",
        "",
        "~ a sketch: of few layers, with what each further one adds, and of one bucket size",
        "",
        "step = cf.compile_step(",
        "    model, loss_fn, optimizer,",
        "    mesh={'dp': 2, 'tp': 2},",
        "    data_parallel='zero2',",
        "    keep_whole=['blocks.0.*'],",
        "    tensor_parallel={'up': 'colwise'},",
        "    accumulate=2,",
        "    machine='ethernet-1gbit',",
        ")",
    ]


def test_every_row_has_its_options() -> None:
    machine = preset("ethernet-1gbit")
    assert FOUND.options_of(ROWS[1]) == {
        "mesh": {"dp": 4}, "data_parallel": "zero1", "memory_limit": 10**9, "machine": machine,
    }  # fmt: skip
    assert FOUND.options_of(ROWS[2]) == {"mesh": {"dp": 4}, "machine": machine}


def test_it_is_the_same_on_another_rank() -> None:
    assert FoundPlan.from_dict(json.loads(FOUND.to_json()), FOUND.machine) == FOUND
