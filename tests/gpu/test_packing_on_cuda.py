"""The Triton kernel gives the same bits as torch's own copies, whatever the layout, the stream and the haste."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from crossfade.graph import packing
from crossfade.graph.packing import implementation, pack, unpack

pytestmark = pytest.mark.gpu

RAW = [torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex128, torch.float8_e4m3fn]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ALIGNED = [(64, 512), (4096,), (32, 1024), (8,), (128, 2048)]
RAGGED = [(8, 3), (8, 4097), (8,), (0, 8), (8, 513), (24,), (8, 20000)]


@pytest.fixture(autouse=True)
def triton() -> Any:
    return pytest.importorskip("triton")


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, device="cuda") * 100
    if dtype == torch.bool:
        return values > 0
    return values.abs().to(torch.uint8).view(dtype) if dtype.itemsize == 1 else values.to(dtype)


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def expected_bits(values: list[Tensor], rows: int) -> Tensor:
    return torch.cat([bits(value).view(rows, value.nbytes // rows) for value in values], 1).view(-1)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype, found.is_contiguous()) == (expected.shape, expected.dtype, True)
    assert torch.equal(bits(found), bits(expected))


def assert_packs_as_torch(values: list[Tensor], rows: int = 1, **options: Any) -> None:
    assert_same(pack(values, rows, **options), packing._pack_plainly(values, rows, **options))


def assert_unpacks_as_torch(packed: Tensor, rows: int, sizes: list[int]) -> None:
    for found, expected in zip(unpack(packed, rows, sizes), packed.view(rows, -1).split(sizes, 1), strict=True):
        assert_same(found, expected.contiguous())


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from crossfade.graph import packing_triton

    launches, kernel = [], packing_triton._copy_tile

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launches.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(packing_triton, "_copy_tile", Counted())
    return launches


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("shapes", [ALIGNED, RAGGED], ids=["aligned", "ragged"])
@pytest.mark.parametrize("dtype", FLOATS + RAW, ids=str)
def test_copies_every_dtype_there_and_back(dtype: torch.dtype, shapes: list[tuple[int, ...]], rows: int) -> None:
    values = [sample(shape, dtype) for shape in shapes]
    assert_same(pack(values, rows), expected_bits(values, rows).view(dtype))
    assert_unpacks_as_torch(pack(values, rows), rows, [value.numel() // rows for value in values])


@pytest.mark.parametrize("divisor", [None, 3.0, 0.1, 7.0, 8.0, 6144.0, 0.0])
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_rounds_as_torch_does(source: torch.dtype, target: torch.dtype, divisor: float | None) -> None:
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    patterns = every.view(source) if source.itemsize == 2 else (every.to(torch.int32) * 65537 + 12345).view(source)
    finite = patterns[patterns.isfinite()]
    values = [finite, sample((100_000,), source), sample((7,), source)]
    assert_packs_as_torch(values, dtype=target, divisor=divisor)
    ready = [value if divisor is None else value / divisor for value in values]
    assert_same(pack(values, dtype=target, divisor=divisor), torch.cat([value.to(target) for value in ready]))


@pytest.mark.parametrize("options", [{"dtype": torch.int64}, {"dtype": torch.float64, "divisor": 3.0}], ids=str)
def test_leaves_other_conversions_to_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    assert_packs_as_torch([sample((64, 512), torch.float32), sample((5,), torch.float32)], **options)
    assert launches == []


def test_launches_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    assert implementation(torch.device("cuda")) == "triton"
    values = [sample(shape, dtype) for shape in RAGGED for dtype in FLOATS]
    assert_packs_as_torch(values, 4, dtype=torch.bfloat16)
    assert len(launches) == 3
    assert_unpacks_as_torch(sample((4096,), torch.float32), 4, [24, 1000])
    assert len(launches) == 4
    assert pack([torch.empty(0, device="cuda")]).numel() == 0
    assert len(launches) == 4


def test_reads_unaligned_and_strided_values() -> None:
    base = sample((1 << 20,), torch.bfloat16)
    views = [base[1:50_001], base[3:20_003], base[16:90_016], base[::2][:4000], base[:10_000].view(100, 100).t()]
    assert_packs_as_torch(views, 4)
    assert_packs_as_torch(views, dtype=torch.float32, divisor=3.0)
    assert_unpacks_as_torch(base[1:80_001], 8, [1, 8191, 1808])


def test_reaches_beyond_two_to_the_31_bytes() -> None:
    values = [
        sample((1 << 10,), torch.bfloat16),
        sample(((1 << 30) + 4096,), torch.bfloat16),
        sample((24,), torch.bfloat16),
    ]
    packed = pack(values, 8)
    sizes = [value.numel() // 8 for value in values]
    assert torch.equal(packed, torch.cat([value.view(8, -1) for value in values], 1).view(-1))
    assert all(
        torch.equal(found, value.view(8, -1)) for found, value in zip(unpack(packed, 8, sizes), values, strict=True)
    )


def test_many_launches_on_several_streams_keep_their_tables_apart() -> None:
    """Far more layouts and addresses than the caches hold, values freed at once, nothing waited for until the end."""
    generator = random.Random(0)
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    for _ in range(600):
        with torch.cuda.stream(generator.choice(streams)):
            values = [sample((8 * generator.randint(1, 3000),), torch.float32) for _ in range(generator.randint(1, 6))]
            expected = torch.cat([value.view(8, -1) for value in values], 1).view(-1)
            packed = pack(values, 8)
            members = unpack(packed, 8, [value.numel() // 8 for value in values])
            kept.append((packed == expected).all())
            kept += [(member.view(-1) == value).all() for member, value in zip(members, values, strict=True)]
    torch.cuda.synchronize()
    assert all(bool(one) for one in kept)


def test_a_stream_does_not_read_tables_that_another_has_yet_to_fill() -> None:
    from crossfade.graph import packing_triton

    values = [sample((4096,), torch.float32), sample((100,), torch.float32)]
    expected = pack(values)
    torch.cuda.synchronize()
    packing_triton._addresses.cache_clear()
    packing_triton._tiles.cache_clear()
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(10**9)
        pack(values)
    with torch.cuda.stream(idle):
        packed = pack(values)
    assert not busy.query()
    torch.cuda.synchronize()
    assert_same(packed, expected)


def test_reads_addresses_afresh_when_values_move() -> None:
    for _ in range(50):
        values = [sample((4096,), torch.float32), sample((100,), torch.float32)]
        assert torch.equal(pack(values), torch.cat(values))


def test_a_default_device_changes_nothing() -> None:
    values = [sample((4096,), torch.float32), sample((104,), torch.float32)]
    with torch.device("cuda"):
        packed = pack(values, 8, divisor=3.0)
        members = unpack(packed, 8, [512, 13])
    assert_same(packed, packing._pack_plainly(values, 8, divisor=3.0))
    assert_same(members[1].view(-1), values[1] / 3.0)


def test_a_captured_graph_replays_with_new_values() -> None:
    values = [sample((4096,), torch.float32), sample((100,), torch.float32)]
    pack(values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = pack(values, divisor=3.0)
        first, _ = unpack(packed, 1, [4096, 100])
    for value in values:
        value.normal_()
    graph.replay()
    assert torch.equal(packed, torch.cat(values) / 3.0)
    assert torch.equal(first.view(-1), values[0] / 3.0)
