"""Packing and unpacking equal torch's own concatenation and splitting, with data and without."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossfade.errors import RewriteError
from crossfade.graph.packing import implementation, pack, unpack
from crossfade.graph.private import FakeTensorMode, symbolic_shapes
from crossfade.graph.text import parse, resolve_operator

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
SHAPES = [(4, 6), (8,), (0, 4), (2, 2, 4), (12,)]
LARGE = [(256, 128), (64, 1024)]  # past the size under which members are divided together
ROWS = [1, 2, 4]


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64) * 10
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def samples(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [sample(shape, dtype) for shape in shapes]


def expected_pack(values: list[Tensor], rows: int, dtype: torch.dtype, divisor: float | None = None) -> Tensor:
    """One row after the other, by concatenation of converted copies."""
    ready = [(value if divisor is None else value / divisor).to(dtype).flatten() for value in values]
    parts = [value.chunk(rows)[row] for row in range(rows) for value in ready if value.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_lays_rows_side_by_side(dtype: torch.dtype, rows: int) -> None:
    values = samples(SHAPES, dtype)
    assert_same(pack(values, rows), expected_pack(values, rows, dtype))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("target", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("source", DTYPES[:-1], ids=str)
def test_pack_converts(source: torch.dtype, target: torch.dtype, rows: int) -> None:
    values = samples(SHAPES, source)
    assert_same(pack(values, rows, dtype=target), expected_pack(values, rows, target))


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("divisor", [3, 0.7, 8.0, 0.0])
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_pack_divides_as_torch_does_and_then_converts(
    source: torch.dtype, target: torch.dtype, divisor: float, shapes: list[tuple[int, ...]]
) -> None:
    values = samples(shapes, source)
    for rows in ROWS:
        assert_same(pack(values, rows, dtype=target, divisor=divisor), expected_pack(values, rows, target, divisor))


@pytest.mark.parametrize("shapes", [SHAPES[:2], LARGE], ids=["small", "large"])
@pytest.mark.parametrize("divisor", [None, 3.0])
def test_pack_takes_several_dtypes_where_the_buckets_is_given(
    divisor: float | None, shapes: list[tuple[int, ...]]
) -> None:
    values = [sample(shape, dtype) for shape in shapes for dtype in FLOATS]
    expected = expected_pack(values, 2, torch.float32, divisor)
    assert_same(pack(values, 2, dtype=torch.float32, divisor=divisor), expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"divisor": 3.0}], ids=str)
def test_pack_reads_values_that_are_not_contiguous_in_their_logical_order(options: dict[str, Any], rows: int) -> None:
    values = [
        sample((6, 4)).t(),
        sample((16,))[::2],
        sample((2, 6)).t(),  # 6 is no multiple of 4 rows
        sample((4, 3, 2)).permute(2, 0, 1),
        sample((1, 8)).expand(4, 8),
        sample((8, 64, 64)).transpose(1, 2),
    ]
    expected = expected_pack(values, rows, options.get("dtype", torch.float32), options.get("divisor"))
    assert_same(pack(values, rows, **options), expected)


def test_pack_takes_scalars_and_nothing_but_empty_values() -> None:
    assert_same(pack([torch.tensor(1.5), torch.ones(2)]), torch.tensor([1.5, 1.0, 1.0]))
    assert_same(pack([torch.empty(0), torch.empty(3, 0)], 2), torch.empty(0))


def test_the_bucket_and_its_members_are_fresh() -> None:
    value = torch.ones(4)
    packed = pack([value])
    members = unpack(packed, 1, [4])
    packed.zero_()
    assert value.tolist() == members[0].tolist()[0] == [1.0] * 4


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpack_splits_columns(dtype: torch.dtype, rows: int) -> None:
    sizes = [3, 0, 1, 5]
    packed = sample((rows * 9,), dtype)
    found = unpack(packed, rows, sizes)
    assert [tuple(member.shape) for member in found] == [(rows, size) for size in sizes]
    for member, expected in zip(found, packed.view(rows, 9).split(sizes, 1), strict=True):
        assert_same(member, expected.contiguous())


def test_unpack_reads_a_bucket_that_is_not_contiguous() -> None:
    packed = torch.arange(12.0)[::2]
    assert [member.tolist() for member in unpack(packed, 2, [1, 2])] == [[[0.0], [6.0]], [[2.0, 4.0], [8.0, 10.0]]]


layouts = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.lists(st.integers(0, 40), min_size=1, max_size=12))


@settings(max_examples=200, deadline=None)
@given(layouts, st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.data())
def test_unpack_undoes_pack(layout: tuple[int, list[int]], dtype: torch.dtype, data: st.DataObject) -> None:
    rows, sizes = layout
    values = []
    for size in sizes:
        wide = torch.randint(100, (size, rows)).to(dtype)
        values.append(wide.t() if data.draw(st.booleans()) else wide.view(rows, size))
    packed = pack(values, rows)
    assert packed.shape == (rows * sum(sizes),)
    for found, value in zip(unpack(packed, rows, sizes), values, strict=True):
        assert_same(found, value.contiguous())


MISTAKES = {
    "nothing": (lambda: pack([]), "an empty list to pack: expected at least one value"),
    "ragged rows": (
        lambda: pack([torch.ones(2, 3)], 4),
        r"shape \[2, 3\] to pack into 4 rows: expected a multiple of 4",
    ),
    "no rows": (lambda: pack([torch.ones(2)], 0), "a bucket of 0 rows: expected at least one"),
    "dtypes": (lambda: pack([torch.ones(2), torch.ones(2).half()]), "values of float16, float32 in one bucket"),
    "integers": (lambda: pack([torch.arange(4)], divisor=2), "integers to divide by 2.0"),
    "sizes": (lambda: unpack(torch.ones(6), 2, [2, 2]), r"6 elements: expected 2 rows of 2 \+ 2 = 8"),
    "no sizes": (lambda: unpack(torch.ones(0), 2, []), "no sizes to unpack: expected at least one"),
    "no rows out": (lambda: unpack(torch.ones(6), 0, [6]), "a bucket of 0 rows"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_and_without_data(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(RewriteError, match=message):
        call()
    with FakeTensorMode(), pytest.raises(RewriteError, match=message):
        call()


def test_a_bucket_is_on_one_device() -> None:
    with (
        FakeTensorMode(),
        pytest.raises(RewriteError, match="values on cpu, cuda:0 in one bucket: expected one device"),
    ):
        pack([torch.ones(2), torch.ones(2, device="cuda:0")])


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fake_tensors_carry_shape_dtype_and_device(device: str) -> None:
    with FakeTensorMode():
        packed = pack([torch.ones(2, 3, device=device), torch.ones(4, device=device)], 2, dtype=torch.bfloat16)
        members = unpack(packed, 2, [3, 2])
    assert (packed.shape, packed.dtype, packed.device) == ((10,), torch.bfloat16, torch.device(device))
    assert [(member.shape, member.dtype, member.device) for member in members] == [
        ((2, size), torch.bfloat16, torch.device(device)) for size in (3, 2)
    ]


def test_symbolic_sizes_stay_symbolic_and_unguarded() -> None:
    shapes = symbolic_shapes()
    mode = FakeTensorMode(shape_env=shapes)
    values = [mode.from_tensor(torch.ones(4, 6)), mode.from_tensor(torch.ones(10))]
    before = len(shapes.guards)
    with mode:
        packed = pack(values, 2, divisor=2.0)
        members = unpack(packed, 2, [value.numel() // 2 for value in values])
    assert all(isinstance(size, torch.SymInt) for size in [packed.shape[0], members[0].shape[1], members[1].shape[1]])
    assert len(shapes.guards) == before
    assert str(packed.shape[0]) == str(values[0].numel() + values[1].numel())


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"divisor": 2.0}], ids=str)
def test_torch_finds_pack_well_behaved(options: dict[str, Any]) -> None:
    torch.library.opcheck(torch.ops.crossfade.pack.default, (samples(SHAPES), 2), options)


def test_torch_finds_unpack_well_behaved() -> None:
    torch.library.opcheck(torch.ops.crossfade.unpack.default, (sample((12,)), 2, [4, 2]))


def test_graphs_hold_them() -> None:
    text = """\
a: f32[2, 3] = input("a")
b: f32[4] = input("b")
pack: bf16[10] = crossfade.pack([a, b], 2, dtype=bf16, divisor=2.0)
unpack: (bf16[2, 3], bf16[2, 2]) = crossfade.unpack(pack, 2, [3, 2])
first: bf16[2, 3] = unpack[0]
return output("first", first)"""
    assert resolve_operator("crossfade.pack") is torch.ops.crossfade.pack.default
    assert str(parse(text.replace(": (bf16[2, 3], bf16[2, 2])", ""))) == text


def test_reports_learn_which_code_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfade.graph.packing._has_triton", lambda: True)
    assert implementation(torch.device("cpu")) == "plain"
    assert implementation(torch.device("cuda")) == "triton"
    monkeypatch.setattr("crossfade.graph.packing._has_triton", lambda: False)
    assert implementation(torch.device("cuda")) == "plain"


def test_importing_does_not_import_triton() -> None:
    code = "import sys, crossfade, crossfade.graph.packing; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
