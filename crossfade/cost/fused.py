"""Matmuls that travel in pieces, as a program holds them: what they compute and what they exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.cost.collective_matmul import Exchange, rows_of_each
from crossfade.cost.flops import equation_flops
from crossfade.cost.keys import Keys, TensorDescription, dense_strides
from crossfade.cost.machine import Machine
from crossfade.graph.collective_matmul import (
    GATHER_MATMUL,
    MATMUL_SCATTER,
    MATMUL_SCATTER_MEANWHILE,
    Equation,
    read_product,
)
from crossfade.graph.collectives import Kind
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.private import schema_of


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """One product as if it were computed whole: its equation, its operands, and its bias if it has one."""

    equation: Equation
    first: TensorDescription
    second: TensorDescription
    bias: TensorDescription | None
    device: str

    def seconds(self, machine: Machine) -> float:
        """Seconds in one call, by arithmetic or by memory, whichever takes longer."""
        rate = machine.flops.get(str(self.first.dtype).removeprefix("torch."), machine.flops["float32"])
        arithmetic = equation_flops(self.equation, self.first.sizes, self.second.sizes) / rate
        sizes = dict(zip(self.equation.first, self.first.sizes, strict=True))
        sizes |= dict(zip(self.equation.second, self.second.sizes, strict=True))
        dtype = self.equation.dtype or self.first.dtype
        made = math.prod(sizes[letter] for letter in self.equation.result) * dtype.itemsize
        read = self.first.bytes + self.second.bytes + (self.bias.bytes if self.bias is not None else 0)
        return max(arithmetic, (read + made) / machine.memory_bandwidth) + machine.overhead

    def keys(self, keys: Keys) -> list[str]:
        """Under which keys the same matmul is remembered when it is a plain call of two matrices, or a linear layer."""
        place = f"{self.device} x{keys.threads}" if self.device == "cpu" else self.device
        rows = [letter for letter in self.equation.first if letter in self.equation.result]
        inner = [letter for letter in self.equation.first if letter not in self.equation.result]
        as_matrices = (
            self.equation.first == "".join([*rows, *inner]) and len(inner) == 1 and len(self.equation.second) == 2
        )
        if not as_matrices or self.equation.result[: len(rows)] != "".join(rows):
            return []
        size = self.first.sizes[-1]
        left = _dense(self.first.dtype, (math.prod(self.first.sizes) // max(size, 1), size))
        right = self.second if self.equation.second[0] == inner[0] else _transposed(self.second)
        weight = _transposed(right)
        if self.bias is None:
            return [f"aten.mm.default({left}, {right}) {place}", f"aten.linear.default({self.first}, {weight}) {place}"]
        return [
            f"aten.addmm.default({self.bias}, {left}, {right}) {place}",
            f"aten.linear.default({self.first}, {weight}, {self.bias}) {place}",
        ]


@dataclass(frozen=True, slots=True)
class FusedCollective:
    """One such node: its products, the collective in it, by the bytes of all ranks' blocks, and what else it computes
    `meanwhile`."""

    kind: Kind
    products: tuple[FusedProduct, ...]
    bytes: int
    rows: int
    each: int
    ranks: int
    form: str
    chunks: int
    group: str
    meanwhile: tuple[FusedProduct, ...] = ()

    def exchange(self, machine: Machine, seconds: float, meanwhile: float = 0.0) -> Exchange:
        """What is to be forecast on a machine, where all products together take so many seconds."""
        products = max(1, len(self.products))
        size = (self.group, self.ranks, self.bytes)
        return Exchange(machine, *size, seconds, self.rows, products, self.each, meanwhile)


@remembered
def is_fused(target: Any) -> bool:
    """Whether an operator is a collective and a matmul in one.

    >>> is_fused(torch.ops.crossfade.gather_matmul.default), is_fused(torch.ops.aten.mm.default)
    (True, False)
    """
    schema = schema_of(target)
    return schema is not None and schema.name in (GATHER_MATMUL, MATMUL_SCATTER, MATMUL_SCATTER_MEANWHILE)


def read_fused(node: fx.Node, keys: Keys) -> FusedCollective:
    """What a node for which `is_fused` holds computes and exchanges; symbolic sizes by their hint."""
    given = arguments(node)
    gathers = schema_of(node.target).name == GATHER_MATMUL
    how = {name: given[name] for name in ("ranks", "form", "chunks")} | {"group": given["group_name"]}
    device = _device(node)
    if gathers:
        part, dim, ranks = keys.tensors(given["part"])[0], given["dim"], given["ranks"]
        whole = _dense(part.dtype, [size * (ranks if at == dim else 1) for at, size in enumerate(part.sizes)])
        triples = zip(given["products"], given["others"], given["biases"], strict=True)
        products = tuple(
            FusedProduct(read_product(product), whole, keys.tensors(other)[0], _maybe(bias, keys), device)
            for product, other, bias in triples
        )
        each = rows_of_each(part.sizes, dim)
        return FusedCollective(Kind.ALL_GATHER, products, whole.bytes, part.sizes[dim], each, **how)
    left, right = keys.tensors(given["left"])[0], keys.tensors(given["right"])[0]
    result = keys.tensors(node)[0]
    product = FusedProduct(read_product(given["product"]), left, right, _maybe(given["bias"], keys), device)
    size = result.bytes * given["ranks"]
    dim = given["dim"]
    operands = [keys.tensors(operand)[0] for operand in given.get("meanwhile", ())]
    pairs = zip(operands[::2], operands[1::2], strict=True)
    meanwhile = tuple(FusedProduct(read_product("mk,kn->mn"), *pair, None, device) for pair in pairs)
    each = rows_of_each(result.sizes, dim)
    return FusedCollective(Kind.REDUCE_SCATTER, (product,), size, result.sizes[dim], each, **how, meanwhile=meanwhile)


def _maybe(node: fx.Node | None, keys: Keys) -> TensorDescription | None:
    return None if node is None else keys.tensors(node)[0]


def _dense(dtype: torch.dtype, sizes: Sequence[int]) -> TensorDescription:
    return TensorDescription(dtype, tuple(sizes), dense_strides(sizes), math.prod(sizes) * dtype.itemsize)


def _transposed(tensor: TensorDescription) -> TensorDescription:
    return tensor._replace(sizes=tensor.sizes[::-1], strides=tensor.strides[::-1])


def _device(node: fx.Node) -> str:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.device.type if isinstance(first, torch.Tensor) else "cpu"
