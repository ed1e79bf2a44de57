"""Conversions go where the dtype between holds every value; the table of those is checked value by value."""

from __future__ import annotations

import math

import pytest
import torch

from crossfade.graph.passes import run_passes
from crossfade.simplify.collapse_conversions import HELD_BY, CollapseConversions, reason_to_convert_twice
from tests.simplify.holds import declines, program_of, rewrites

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SMALL = (torch.bool, torch.uint8, torch.int8, *F8, torch.int16, torch.uint16, torch.float16, torch.bfloat16)
LARGE = (torch.int32, torch.uint32, torch.int64, torch.float32, torch.float64, torch.complex64, torch.complex128)


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a small dtype; of a large one those at the edges, and random bits."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype in SMALL:
        bits, kind = (256, torch.uint8) if dtype.itemsize == 1 else (65536, torch.int32)
        numbers = torch.arange(bits, dtype=kind) if kind is torch.uint8 else torch.arange(bits).to(torch.int16)
        return numbers.view(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(all_values(dtype.to_real()).reshape(-1, 2).contiguous())
    torch.manual_seed(0)
    random = torch.randint(-(2**63), 2**63 - 1, (20_000,)).view(dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        edges = [
            0.0,
            -0.0,
            math.inf,
            -math.inf,
            math.nan,
            info.max,
            info.min,
            info.tiny,
            info.eps,
            info.tiny * info.eps,
        ]
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        edges = [low, low + 1, 0, 1, high - 1, high, high // 2 + 1]
    return torch.cat([torch.tensor(edges, dtype=dtype), random])


def is_kept(values: torch.Tensor, back: torch.Tensor) -> bool:
    """Whether values came back, NaNs as NaNs, zeros with their sign."""
    if values.dtype in F8:
        values, back = values.float(), back.float()
    if values.is_complex():
        return is_kept(torch.view_as_real(values), torch.view_as_real(back))
    if not values.dtype.is_floating_point:
        return torch.equal(values, back)
    nan = values.isnan()
    same = (values == back) & (values.signbit() == back.signbit())
    return bool((torch.where(nan, back.isnan(), same)).all())


@pytest.mark.parametrize("dtype", [*SMALL, *LARGE], ids=str)
def test_table_is_what_torch_does(dtype: torch.dtype):
    """Held: every value comes back. Not held: some value does not, unless both are integers, which wrap around."""
    values = all_values(dtype)
    for other in (*SMALL, *LARGE):
        if other is dtype or other.is_complex != dtype.is_complex:
            continue
        kept = is_kept(values, values.to(other).to(dtype))
        wraps = is_integer(dtype) and is_integer(other) and other.itemsize >= dtype.itemsize
        assert kept == (wraps or other in HELD_BY.get(dtype, ())), f"{dtype} in {other}"


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


@pytest.mark.parametrize("dtype", HELD_BY, ids=str)
def test_one_conversion_is_as_good_as_two(dtype: torch.dtype):
    """Whatever the rule allows, on all values: through a dtype that holds them, to any other."""
    values, checked = all_values(dtype), 0
    for between in HELD_BY[dtype]:
        for after in (*SMALL, *LARGE):
            if reason_to_convert_twice(dtype, between, after) is None:
                direct, twice = values.to(after), values.to(between).to(after)
                assert is_kept(direct, twice), f"{dtype} to {between} to {after}"
                checked += 1
    assert checked


CASES = {
    "a result is one conversion, not none": (
        """
        x: bf16[4] = input("x")
        a: f32[4] = aten._to_copy(x, dtype=f32)
        b: bf16[4] = aten._to_copy(a, dtype=bf16)
        return output("b", b)
        """,
        """
        x: bf16[4] = input("x")
        _to_copy: bf16[4] = aten._to_copy(x, dtype=bf16)
        return output("b", _to_copy)
        """,
        {"one-conversion": 1},
    ),
    "a long chain goes whole": (
        """
        x: u8[4] = input("x")
        a: i32[4] = prims.convert_element_type(x, i32)
        b: i64[4] = prims.convert_element_type(a, i64)
        c: f64[4] = prims.convert_element_type(b, f64)
        d: u8[4] = prims.convert_element_type(a, u8)
        e: u8[4] = aten.bitwise_not(d)
        return output("c", c), output("e", e)
        """,
        """
        x: u8[4] = input("x")
        convert_element_type_1: f64[4] = prims.convert_element_type(x, f64)
        e: u8[4] = aten.bitwise_not(x)
        return output("c", convert_element_type_1), output("e", e)
        """,
        {"one-conversion": 2, "there-and-back": 1},
    ),
    "a `to` that copies is a copy": (
        """
        x: f16[4, 2] = input("x")
        y: f32[4, 2] = input("y")
        a: f32[4, 2] = aten.to.dtype(x, f32)
        b: f32[4, 2] = aten.type_as(x, y)
        c: f32[4, 2] = aten.to.dtype_layout(x, dtype=f32, layout=strided, device=device("cpu"))
        d: f32[4, 2] = aten.to.other(x, y, True)
        e: f16[4, 2] = aten.to.device(x, device("cpu"), f16, copy=True)
        f: f32[4, 2] = aten.addcmul(a, b, c)
        g: f32[4, 2] = aten.addcmul(d, e, f)
        return output("g", g)
        """,
        """
        x: f16[4, 2] = input("x")
        y: f32[4, 2] = input("y")
        _to_copy: f32[4, 2] = aten._to_copy(x, dtype=f32)
        _to_copy_1: f32[4, 2] = aten._to_copy(x, dtype=f32)
        _to_copy_2: f32[4, 2] = aten._to_copy(x, dtype=f32)
        _to_copy_3: f32[4, 2] = aten._to_copy(x, dtype=f32, non_blocking=True)
        _to_copy_4: f16[4, 2] = aten._to_copy(x, dtype=f16)
        f: f32[4, 2] = aten.addcmul(_to_copy, _to_copy_1, _to_copy_2)
        g: f32[4, 2] = aten.addcmul(_to_copy_3, _to_copy_4, f)
        return output("g", g)
        """,
        {"copying-to": 5},
    ),
    "memory formats are kept": (
        """
        x: i8[2, 3, 2, 2] = input("x")
        a: i16[2, 3, 2, 2] = aten._to_copy(x, dtype=i16, memory_format=channels_last)
        b: i32[2, 3, 2, 2] = aten._to_copy(a, dtype=i32)
        return output("b", b)
        """,
        """
        x: i8[2, 3, 2, 2] = input("x")
        _to_copy: i32[2, 3, 2, 2] = aten._to_copy(x, dtype=i32, memory_format=channels_last)
        return output("b", _to_copy)
        """,
        {"one-conversion": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_collapsed(name: str):
    rewrites(CollapseConversions(), *CASES[name])


def chain(before: str, between: str, after: str) -> str:
    return f"""
        x: {before}[4] = input("x")
        a: {between}[4] = aten._to_copy(x, dtype={between})
        b: {after}[4] = aten._to_copy(a, dtype={after})
        return output("b", b)
        """


DECLINED = {
    "narrower": (chain("f32", "bf16", "f32"), "the dtype between does not hold every value"),
    "unknown to the table": (chain("float8_e4m3fnuz", "f32", "f16"), "the dtype between does not hold every value"),
    "to another dtype": (chain("f32", "bf16", "f64"), "it ends in another dtype"),
    "dropping imaginary parts": (chain("c64", "c128", "f32"), "it goes between real and complex numbers"),
    "out of range": (chain("f32", "f64", "i32"), "what an integer cannot hold depends on the dtype before it"),
    "through a float": (chain("i16", "f32", "i8"), "what an integer cannot hold depends on the dtype before it"),
    "by way of another device": (
        """
        x: bf16[4] = input("x")
        a: f32[4] = aten._to_copy(x, dtype=f32, device=device("meta"))
        b: f64[4] = aten._to_copy(a, dtype=f64, device=device("cpu"))
        return output("b", b)
        """,
        "it goes to another device",
    ),
    "a `to` to the same": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.to.dtype(x, f32)
        b: f32[4] = aten.neg(a)
        return output("b", b)
        """,
        "it may be its input itself",
    ),
    "sparse": (
        """
        x: f32[4, 4] = input("x")
        s: f32[4, 4] = aten.to_sparse(x)
        a: f64[4, 4] = aten.to.dtype(s, f64)
        b: f64[4, 4] = aten.to_dense(a)
        return output("b", b)
        """,
        "it is not strided",
    ),
    "a write in between": (
        """
        x: bf16[4] = input("x")
        a: f32[4] = aten._to_copy(x, dtype=f32)
        w: bf16[4] = aten.neg_(x)
        b: bf16[4] = aten._to_copy(a, dtype=bf16)
        c: bf16[4] = aten.neg(b)
        return output("c", c)
        """,
        "its memory is written to",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str):
    declines(CollapseConversions(), *DECLINED[name])


def test_pinned_memory_is_declined():
    program = program_of(chain("bf16", "f32", "f64"))
    first = list(program.graph.nodes)[1]
    first.kwargs = {**first.kwargs, "pin_memory": True}  # fake tensors refuse to be made so
    verdicts = run_passes(program, [CollapseConversions()]).history[0].verdicts
    assert verdicts[-1].reason == "it pins its memory"
