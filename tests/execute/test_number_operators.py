"""Operators that take tensors in place of numbers compute what torch's own do with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crossfade.execute.number_operators import OPERATORS

NUMBER = 0.99999
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "add": (2, {"alpha": NUMBER}),
    "sub": (2, {"alpha": NUMBER}),
    "mul": (1, {}),
    "div": (1, {}),
    "pow": (1, {}),
    "lerp": (2, {}),
    "addcmul": (3, {"value": NUMBER}),
    "addcdiv": (3, {"value": NUMBER}),
}
"""For each operator how many tensors it takes, and the numbers it takes by name; a number comes last where none is."""


def staged(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("target", OPERATORS, ids=str)
def test_they_compute_what_torch_computes(target: Any, dtype: torch.dtype) -> None:
    count, named = CALLS[target.overloadpacket.__name__.rstrip("_")]
    torch.manual_seed(0)
    tensors = [torch.rand(100).to(dtype) + 1 for _ in range(count)]
    numbers = [] if named else [NUMBER]
    precise = torch.promote_types(dtype, torch.float32)  # in which a GPU computes with numbers
    expected = target(*[tensor.to(precise, copy=True) for tensor in tensors], *numbers, **named).to(dtype)
    given = {name: staged(value) for name, value in named.items()}
    made = OPERATORS[target](*tensors, *map(staged, numbers), **given)
    assert made.dtype == expected.dtype
    exactness = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(made, expected, rtol=exactness, atol=exactness)
    if dtype.itemsize == 2:
        assert (made != expected).float().mean() < 0.05


@pytest.mark.parametrize("target", [target for target in OPERATORS if str(target).split(".")[1].endswith("_")], ids=str)
def test_in_place_means_in_place(target: Any) -> None:
    count, named = CALLS[target.overloadpacket.__name__.rstrip("_")]
    tensors = [torch.full((3,), 2.0) for _ in range(count)]
    made = OPERATORS[target](
        *tensors, *map(staged, [] if named else [NUMBER]), **{k: staged(v) for k, v in named.items()}
    )
    assert made is tensors[0]


def test_small_rates_survive_half_precision() -> None:
    weight = torch.full((4,), 300.0, dtype=torch.bfloat16)
    decayed = OPERATORS[torch.ops.aten.mul.Tensor](weight, torch.tensor(1 - 1e-4, dtype=torch.float64))
    assert torch.equal(decayed, torch.ops.aten.mul.Tensor(weight, 1 - 1e-4))
