"""Exchanges of rows that know their backward, as text; what else is exchanged stays."""

from __future__ import annotations

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.shard.exchange_with_backward import ExchangeWithBackward
from crossfade.shard.split_experts import SplitExperts

TEXT = """
w: bf16[4, 8, 16] = parameter("w")
x: bf16[6, 8] = input("x")
ends: i32[4] = input("ends")
y: bf16[6, 16] = aten._grouped_mm(x, w, ends)
return output("y", y)
"""


def test_rows_are_exchanged_in_one_call_and_their_numbers_as_before() -> None:
    program = run_passes(parse(TEXT, groups={"ep": 2}), [SplitExperts(), ExchangeWithBackward()])
    assert program.history[-1].counts == {"replaced": 2}
    lines = str(program).splitlines()
    assert [line.partition(" = ")[2] for line in lines if ".ep_exchange(" in line or "c10d" in line] == [
        'c10d.all_to_all_single(sub, [2, 2], [2, 2], "ep")',
        "c10d.wait_tensor(all_to_all_single)",
        'crossfade.ep_exchange(x, getitem, getitem_1, 12, "ep")',
        'crossfade.ep_exchange(index_select_1, getitem_1, getitem, 6, "ep")',
    ]
    assert lines[-1] == 'return output("y", ep_exchange_1)'


def test_programs_without_exchanges_are_left() -> None:
    program = run_passes(parse(TEXT), [ExchangeWithBackward()])
    assert str(program).strip() == TEXT.strip()
