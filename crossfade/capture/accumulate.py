"""Gradient accumulation: one program that runs another on several micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.errors import NotYetError
from crossfade.graph.program import InputKind, OutputKind, Program, size_hint
from crossfade.graph.splice import inline, splice
from crossfade.graph.strides import strides_for


def accumulate(program: Program, times: int, *, mean: bool = True) -> Program:
    """Run `program` on `times` micro-batches of a larger batch; loss and gradients are averaged, or summed.

    Parameters are shared, buffers carried from one micro-batch to the next; batch inputs grow along dim 0.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... w: f32[2] = parameter("w")
        ... x: f32[3, 2] = input("x")
        ... mv: f32[3] = aten.mv(x, w)
        ... mean: f32[] = aten.mean(mv)
        ... return loss("loss", mean)
        ... ''')
        >>> print(accumulate(program, 2))
        w: f32[2] = parameter("w")
        x: f32[6, 2] = input("x")
        slice_1: f32[3, 2] = aten.slice.Tensor(x, 0, 0, 3)
        mv: f32[3] = aten.mv(slice_1, w)
        mean: f32[] = aten.mean(mv)
        slice_2: f32[3, 2] = aten.slice.Tensor(x, 0, 3, 6)
        mv_1: f32[3] = aten.mv(slice_2, w)
        mean_1: f32[] = aten.mean(mv_1)
        add: f32[] = aten.add.Tensor(mean, mean_1)
        div: f32[] = aten.div.Tensor(add, 2)
        return loss("loss", div)
    """
    if times == 1:
        return program
    if more := [out.name for out in program.outputs if out.kind is OutputKind.OUTPUT]:
        raise NotYetError(
            f"{', '.join(more)} beside the loss of {times} micro-batches",
            expected="the loss alone, where it is put together from micro-batches",
            remedy="leave accumulate out, or return the loss alone",
        )
    whole = _with_larger_inputs(program, times)
    end, placeholders = whole.output_node, whole.placeholders
    carried = dict(zip([item.name for item in program.inputs], placeholders, strict=True))
    rounds: list[list[fx.Node]] = []
    for index in range(times):
        arguments = {
            old: _part(whole, new, old, index)
            if item.kind is InputKind.INPUT and old.meta["val"].dim()
            else carried[item.name]
            for (item, old), new in zip(program.named_inputs(), placeholders, strict=True)
        }
        rounds.append(inline(whole, program.graph, arguments, before=end))
        updates = zip(program.outputs, rounds[-1], strict=True)
        carried.update({out.name: value for out, value in updates if out.kind is OutputKind.UPDATE})
    results = [
        values[-1]
        if out.kind is OutputKind.UPDATE
        else splice(whole, _mean if mean else _sum, *values, before=end, like=values[-1])
        for out, *values in zip(program.outputs, *rounds, strict=True)
    ]
    whole.set_results(results, program.outputs)
    return whole


def _mean(*values: Tensor) -> Tensor:
    return _sum(*values) / len(values)


def _sum(*values: Tensor) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _with_larger_inputs(program: Program, times: int) -> Program:
    graph = fx.Graph()
    for item, old in program.named_inputs():
        new = graph.node_copy(old)
        new.meta = dict(old.meta)
        if item.kind is InputKind.INPUT and old.meta["val"].dim():
            new.meta["val"] = _repeated(program, old.meta["val"], times)
    graph.output(())
    return replace(program, graph=graph, outputs=())


def _repeated(program: Program, value: Tensor, times: int) -> Any:
    rows = value.shape[0] * times
    with program.fake_mode:
        return torch.empty_strided(
            (rows, *value.shape[1:]), strides_for(value, rows), dtype=value.dtype, device=value.device
        )


def _part(whole: Program, larger: fx.Node, smaller: fx.Node, index: int) -> fx.Node:
    size = smaller.meta["val"].shape[0]
    if isinstance(size, torch.SymInt):
        return _symbolic_part(whole, larger, smaller, index, size_hint(larger.meta["val"].shape[0]) // size_hint(size))

    def take(x: Tensor) -> Tensor:
        rows = x[index * size : (index + 1) * size]
        return rows if rows.stride() == smaller.meta["val"].stride() else rows.clone()  # samples are not outermost

    return splice(whole, take, larger, before=whole.output_node, like=smaller)


def _symbolic_part(whole: Program, larger: fx.Node, smaller: fx.Node, index: int, parts: int) -> fx.Node:
    """A part of as many rows as the others, however many these are."""

    def take(x: Tensor) -> Tensor:
        return x.view(parts, -1, *x.shape[1:])[index]

    return splice(whole, take, larger, before=whole.output_node, like=smaller)
