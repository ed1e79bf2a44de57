"""Generated functions: right, free of leftovers, and equal to the operators they stand for."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from crossfade.execute import codegen
from crossfade.execute.codegen import compile_program, native
from crossfade.graph.text import parse, resolve_operator


def x() -> Tensor:
    return torch.linspace(0.5, 2.0, 12).view(3, 4)


def square() -> Tensor:
    return torch.linspace(-1.0, 1.0, 9).view(3, 3)


def several() -> list[Tensor]:
    return [x(), square() + 2]


CALLS: dict[str, tuple[Any, ...]] = {
    "aten._foreach_add_.Scalar": (several, 0.5),
    "aten._foreach_addcdiv_.ScalarList": (several, several, several, [0.5, -2.0]),
    "aten._foreach_addcmul_.Scalar": (several, several, several, 0.3),
    "aten._foreach_copy_": (several, several),
    "aten._foreach_div_.ScalarList": (several, [2.0, 3.0]),
    "aten._foreach_lerp_.Scalar": (several, several, 0.1),
    "aten._foreach_mul_.ScalarList": (several, [2.0, 3.0]),
    "aten._foreach_sqrt": (several,),
    "aten._foreach_sub_.Scalar": (several, 0.5),
    "aten.add.Tensor": (x, x, {"alpha": 2}),
    "aten.add.Scalar": (x, 2.5),
    "aten.add_.Tensor": (x, x, {"alpha": -0.5}),
    "aten.addcdiv": (x, x, x, {"value": 0.3}),
    "aten.addcdiv_": (x, x, x, {"value": 0.3}),
    "aten.addcmul": (x, x, x, {"value": 0.3}),
    "aten.addcmul_": (x, x, x, {"value": 0.3}),
    "aten.addmm": (square, square, square, {"beta": 0.5, "alpha": 2}),
    "aten.bmm": (lambda: x().unsqueeze(0), lambda: x().t().unsqueeze(0)),
    "aten.cat": (lambda: [x(), x()], 1),
    "aten.clone": (lambda: x().t(), {"memory_format": torch.contiguous_format}),
    "aten.copy_": (x, lambda: x() * 3),
    "aten.detach": (x,),
    "aten.div.Tensor": (x, x),
    "aten.div.Scalar": (x, 3),
    "aten.div.Tensor_mode": (x, x, {"rounding_mode": "floor"}),
    "aten.div_.Tensor": (x, 2),
    "aten.embedding": (x, lambda: torch.tensor([0, 2]), -1, False, False),
    "aten.exp": (x,),
    "aten.expand": (lambda: x()[:1], [3, -1]),
    "aten.lerp.Scalar": (x, lambda: x() * 2, 0.1),
    "aten.lerp_.Scalar": (x, lambda: x() * 2, 0.1),
    "aten.mean": (x,),
    "aten.mean.dim": (x, [1], True),
    "aten.mm": (square, square),
    "aten.mm.out": (square, square, {"out": lambda: torch.empty(3, 3)}),
    "aten.mul.Tensor": (x, x),
    "aten.mul.Scalar": (x, 2),
    "aten.mul_.Tensor": (x, 0.5),
    "aten.native_layer_norm": (x, [4], lambda: torch.ones(4), lambda: torch.zeros(4), 1e-5),
    "aten.neg": (x,),
    "aten.permute": (x, [1, 0]),
    "aten.pow.Tensor_Scalar": (x, 3),
    "aten.pow.Scalar": (2.0, x),
    "aten.pow.Tensor_Tensor": (x, x),
    "aten.relu": (square,),
    "aten.relu_": (square,),
    "aten.rsqrt": (x,),
    "aten.select.int": (x, 1, 2),
    "aten.sigmoid": (x,),
    "aten.split_with_sizes": (x, [1, 3], 1),
    "aten.sqrt": (x,),
    "aten.sqrt_": (x,),
    "aten.stack": (lambda: [x(), x()], 1),
    "aten.sub.Tensor": (x, lambda: x() * 2, {"alpha": 3}),
    "aten.sub_.Tensor": (x, x),
    "aten.sum": (x,),
    "aten.sum.dim_IntList": (x, [0], True),
    "aten.t": (x,),
    "aten.tanh": (x,),
    "aten.transpose.int": (x, 0, 1),
    "aten.unbind.int": (x, 1),
    "aten.unsqueeze": (x, 1),
    "aten.view": (x, [4, 3]),
    "aten.view.dtype": (x, torch.int32),
}


def arguments(call: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Fresh arguments for a call: functions stand for the tensors they make, a last dict for keywords."""
    keywords = call[-1] if isinstance(call[-1], dict) else {}
    positional = call[:-1] if isinstance(call[-1], dict) else call
    made = [argument() if callable(argument) else argument for argument in positional]
    return made, {name: argument() if callable(argument) else argument for name, argument in keywords.items()}


@pytest.mark.parametrize("name", CALLS)
def test_native_bindings_equal_the_operators(name: str) -> None:
    operator = resolve_operator(name)
    args, kwargs = arguments(CALLS[name])
    others, other_kwargs = arguments(CALLS[name])
    expected, found = operator(*args, **kwargs), native(operator)(*others, **other_kwargs)
    if expected is not None:  # where the operator gives nothing, nobody uses what the binding gives
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for left, right in zip(others, args, strict=True):
        if isinstance(left, (Tensor, list)):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
        else:
            assert str(left) == str(right)


def test_every_native_binding_is_compared() -> None:
    assert {name.split(".")[1] for name in CALLS} == codegen._NATIVE


def test_values_are_freed_after_their_last_use() -> None:
    program = parse("""
x: f32[4] = input("x")
a: f32[4] = aten.exp(x)
b: f32[4] = aten.neg(a)
c: f32[4] = aten.exp(b)
return output("c", c)
""")
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def counting(tensor: Tensor) -> Tensor:
        result = torch.exp(tensor)
        made.append(weakref.ref(result))
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        return result

    compiled = compile_program(program)
    namespace = compiled.function.__globals__
    namespace.update({name: counting for name, value in namespace.items() if value is torch.exp})
    inputs = [torch.ones(4)]
    compiled.function(inputs)
    assert inputs == []
    assert alive == [1, 1]


def test_names_of_values_and_functions_do_not_clash() -> None:
    program = parse("""
neg: f32[2] = input("neg")
exp: f32[2] = aten.neg(neg)
neg_1: f32[2] = aten.exp(exp)
return output("y", neg_1)
""")
    assert torch.equal(compile_program(program).function([torch.ones(2)])[0], torch.exp(-torch.ones(2)))


def test_constants_of_every_kind_reach_the_call() -> None:
    program = parse("""
x: f32[2] = input("x")
a: f64[2] = aten._to_copy(x, dtype=f64, device=device("cpu"))
b: f64[2] = aten.clamp(a, None, float("inf"))
return output("b", b)
""")
    assert compile_program(program).function([torch.ones(2)])[0].dtype == torch.float64


def test_views_of_lasting_memory_are_made_once_and_again_where_it_moved() -> None:
    program = parse("""
w: f32[2, 2] = parameter("w")
t: f32[2, 2] = aten.permute(w, [1, 0])
y: f32[2, 2] = aten.add.Tensor(t, t)
return output("y", y)
""")
    compiled = compile_program(program)
    weight = torch.nn.Parameter(torch.arange(4.0).view(2, 2))
    with torch.no_grad():
        kept = [id(compiled.views(weight)[0]) for _ in range(2)]
        assert kept[0] == kept[1]
        weight.mul_(3)
        assert torch.equal(compiled.function([weight])[0], 2 * weight.t())
        weight.data = torch.rand(2, 2)
        assert torch.equal(compiled.function([weight])[0], 2 * weight.t())
        weight.data = weight.data.t()  # the same memory, looked at otherwise
        assert torch.equal(compiled.function([weight])[0], 2 * weight.t())
