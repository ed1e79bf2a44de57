"""Which values are numbered alike: spelling, writes, lists, and what must be equal on all ranks."""

from __future__ import annotations

import pytest

from crossfade.graph.effects import alias_roots
from crossfade.graph.value_numbering import ValueNumbers, is_chosen_by_numbers
from tests.graph.small_programs import named, program_of


def are_equal(text: str, *, on_all_ranks: bool = False) -> bool:
    """Whether the values named a and b have the same number."""
    nodes = named(program_of(text))
    values = ValueNumbers(alias_roots(nodes.values()), on_all_ranks=on_all_ranks)
    numbers = {name: values.number(node) for name, node in nodes.items()}
    return numbers["a"] == numbers["b"]


@pytest.mark.parametrize("on_all_ranks", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        """
        x: f32[4, 2] = input("x")
        a: f32[2, 4] = aten.view(x, [2, 4])
        b: f32[2, 4] = aten.view(x, size=[2, 4])
        return output("a", a)
        """,
        """
        x: f32[4, 2] = input("x")
        a: f32[4, 2] = aten.gelu(x)
        b: f32[4, 2] = aten.gelu(x, approximate="none")
        return output("a", a)
        """,
        """
        x: f32[s0, 2] = input("x")
        n: int = aten.sym_size.int(x, 0)
        m: int = aten.sym_size.int(x, 0)
        a: f32[s0, 2, 1] = aten.view(x, [n, 2, 1])
        b: f32[s0, 2, 1] = aten.view(x, [m, 2, 1])
        return output("a", a)
        """,
    ],
    ids=["by name", "a default", "sizes"],
)
def test_equal(text: str, on_all_ranks: bool) -> None:
    assert are_equal(text, on_all_ranks=on_all_ranks)


WRITTEN = """
    x: f32[4] = input("x")
    parts: (f32[2], f32[2]) = aten.split_copy.Tensor(x, 2)
    first: f32[2] = parts[0]
    a: f32[4] = aten.cat(parts)
    {write}
    b: f32[4] = aten.cat(parts)
    return output("a", a)
"""


@pytest.mark.parametrize("on_all_ranks", [False, True])
@pytest.mark.parametrize(
    ("write", "equal"),
    [("z: f32[2] = aten.zero_(first)", False), ("z: f32[2] = aten.neg(first)", True)],
    ids=["written", "read"],
)
def test_a_list_is_another_value_after_a_write_to_an_element(write: str, equal: bool, on_all_ranks: bool) -> None:
    assert are_equal(WRITTEN.format(write=write), on_all_ranks=on_all_ranks) is equal


@pytest.mark.parametrize(
    "text",
    [
        """
        x: f32[4, 2] = input("x")
        a: f32[2] = aten.select.int(x, 0, 1)
        b: f32[2] = aten.select.int(x, 0, 1)
        return output("a", a)
        """,
        """
        x: f32[2, 4] = input("x")
        rows: (f32[4], f32[4]) = aten.unbind.int(x)
        a: f32[4] = rows[1]
        b: f32[4] = rows[1]
        return output("a", a)
        """,
        """
        x: f32[s0] = input("x")
        n: int = aten.sym_size.int(x, 0)
        m: int = operator.mul(n, 2)
        a: f32[s0] = aten.mul.Scalar(x, m)
        b: f32[s0] = aten.mul.Scalar(x, m)
        return output("a", a)
        """,
    ],
    ids=["a row", "an element", "a scale"],
)
def test_what_numbers_choose_is_equal_on_one_rank_only(text: str) -> None:
    assert are_equal(text)
    assert not are_equal(text, on_all_ranks=True)
    assert is_chosen_by_numbers(named(program_of(text))["b"])


def test_collectives_of_equal_values_have_equal_results_on_all_ranks() -> None:
    text = """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        t: f32[4] = c10d.all_reduce(x, reduce_op="sum", group_name="dp")
        a: f32[4] = c10d.wait_tensor(s)
        b: f32[4] = c10d.wait_tensor(t)
        return output("a", a), output("b", b)
    """
    assert are_equal(text, on_all_ranks=True)
    assert not are_equal(text)
    assert not are_equal(text.replace('reduce_op="sum"', 'reduce_op="max"'), on_all_ranks=True)


@pytest.mark.parametrize(("written", "equal"), [("y", True), ("x", False)])
def test_only_a_write_to_its_own_memory_changes_a_value(written: str, equal: bool) -> None:
    text = """
        x: f32[4] = input("x")
        y: f32[4] = aten.exp(x)
        a: f32[4] = aten.neg(x)
        z: f32[4] = aten.zero_({written})
        b: f32[4] = aten.neg(x)
        return output("a", a)
    """
    assert are_equal(text.format(written=written)) is equal
