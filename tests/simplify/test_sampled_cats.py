"""Sampled programs of cuts and joins: what simplify-cats makes of them computes the same, and large ones take no longer
than their size asks for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from crossfade.graph.passes import PassResult, run_passes
from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from crossfade.simplify.simplify_cats import SimplifyCats
from tests.growth import grows_linearly


def sampled(seed: int) -> str:
    """A program of cuts and joins of integers, all different, so that no misplaced element is missed."""
    draw = Random(seed)
    rank = draw.choice([1, 2, 3])
    shape = [draw.choice([1, 2, 3, 4]) for _ in range(rank)]
    lines = [f'v{i}: i64{shape} = input("v{i}")' for i in range(2)]
    known: dict[str, list[int]] = {f"v{i}": shape for i in range(2)}
    for step in range(draw.randint(3, 14)):
        fresh = f"t{step}"
        make = draw.choice([cut, cut, join, join, see])
        new = make(draw, known, fresh)
        for name, call, size in new:
            lines.append(f"{name} = {call}")
            if size is not None:
                known[name] = size
    wanted = draw.sample(list(known), min(len(known), 4))
    lines += [f"r{i} = aten.neg({name})" for i, name in enumerate(wanted)]
    return "\n".join(
        [*lines, f"return {', '.join(f'output({chr(34)}r{i}{chr(34)}, r{i})' for i in range(len(wanted)))}"]
    )


def cut(draw: Random, known: dict[str, list[int]], fresh: str) -> list[tuple[str, str, list[int] | None]]:
    name = draw.choice([name for name in known if known[name]] or list(known))
    shape = known[name]
    if not shape:
        return []
    dim = draw.randrange(len(shape))
    size, spelled = shape[dim], draw.choice([dim, dim - len(shape)])
    kind = draw.choice(["slice", "split", "sizes", "chunk", "select", "unbind"])
    if kind == "slice":
        start, stop = draw.randint(-size - 1, size + 1), draw.randint(-size - 1, size + 1)
        length = len(range(size)[start:stop])
        return [(fresh, f"aten.slice.Tensor({name}, {spelled}, {start}, {stop})", changed(shape, dim, length))]
    if size == 0:
        return []
    if kind == "select":
        index = draw.randrange(-size, size)
        return [(fresh, f"aten.select.int({name}, {spelled}, {index})", changed(shape, dim, None))]
    if kind == "unbind":
        parts, call = [None] * size, f"aten.unbind.int({name}, {spelled})"
    else:
        each = draw.randint(1, size)
        lengths = [min(each, size - low) for low in range(0, size, each)]
        parts, call = lengths, f"aten.split.Tensor({name}, {each}, {spelled})"
        if kind == "sizes":
            call = f"aten.split_with_sizes({name}, {lengths}, {spelled})"
        elif kind == "chunk":
            parts = [piece.shape[0] for piece in torch.empty(size).chunk(each)]
            call = f"aten.chunk({name}, {each}, {spelled})"
    pieces = [(f"{fresh}_{i}", f"{fresh}[{i}]", changed(shape, dim, part)) for i, part in enumerate(parts)]
    return [(fresh, call, None), *pieces]


def see(draw: Random, known: dict[str, list[int]], fresh: str) -> list[tuple[str, str, list[int] | None]]:
    """Some values in a row in another shape, all in the same way: a dim more, or two dims in one."""
    made: list[tuple[str, str, list[int] | None]] = []
    names = list(known)[-draw.randint(1, 4) :]
    shape = known[names[-1]]
    dim = draw.randint(0, len(shape))
    for i, name in enumerate(names):
        if len(known[name]) != len(shape):
            continue
        if draw.random() < 0.1 or dim + 2 > len(shape):
            seen = [*known[name][:dim], 1, *known[name][dim:]]
        else:
            first, second = known[name][dim : dim + 2]
            seen = [*known[name][:dim], first * second, *known[name][dim + 2 :]]
        made.append((f"{fresh}_{i}", f"aten.reshape({name}, {seen})", seen))
    return made


def changed(shape: list[int], dim: int, size: int | None) -> list[int]:
    return [*shape[:dim], *([] if size is None else [size]), *shape[dim + 1 :]]


def join(draw: Random, known: dict[str, list[int]], fresh: str) -> list[tuple[str, str, list[int] | None]]:
    name = draw.choice(list(known)[-6:])
    shape = known[name]
    if draw.random() < 0.3 or not shape:
        dim = draw.randint(0, len(shape))
        like = [other for other in known if known[other] == shape]
        chosen = neighbours(draw, like, name)
        return [(fresh, f"aten.stack([{', '.join(chosen)}], {dim})", [*shape[:dim], len(chosen), *shape[dim:]])]
    dim = draw.randrange(len(shape))
    like = [
        other
        for other in known
        if len(known[other]) == len(shape) and changed(known[other], dim, 0) == changed(shape, dim, 0)
    ]
    chosen = neighbours(draw, like, name)
    size = sum(known[other][dim] for other in chosen)
    spelled = draw.choice([dim, dim - len(shape)])
    return [(fresh, f"aten.cat([{', '.join(chosen)}], {spelled})", changed(shape, dim, size))]


def neighbours(draw: Random, names: list[str], name: str) -> list[str]:
    """Some names in a row, as pieces of one split are, or any."""
    if draw.random() < 0.6:
        first = names.index(name)
        return names[max(0, first - draw.randint(0, 2)) : first + 1]
    return [draw.choice(names) for _ in range(draw.randint(1, 4))]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_sampled_programs(seed: int) -> None:
    program = parse(sampled(seed))
    done = run_passes(program, [SimplifyCats()])
    # torch's fake tensors give some views of dims of one element other strides than they have when they run
    verify(done, recompute="reshape" not in str(program))
    shapes = [node.meta["val"].shape for node in program.placeholders]
    inputs = [torch.arange(shape.numel()).view(shape) + 1000 * i for i, shape in enumerate(shapes)]
    for expected, actual in zip(program.module()(*inputs), done.module()(*inputs), strict=True):
        assert torch.equal(actual, expected) and actual.stride() == expected.stride(), f"{program}\n---\n{done}"
    assert moved(done) <= moved(program)


def moved(program: Program) -> int:
    """The elements that cats and stacks write."""
    joins = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
    return sum(node.meta["val"].numel() for node in program.graph.nodes if node.target in joins)


def test_samples_are_simplified() -> None:
    """Each rule applies to some sample: the samples would find a mistake in any."""
    found: set[str] = set()
    for seed in range(150):
        found |= set(run_passes(parse(sampled(seed)), [SimplifyCats()]).history[0].counts)
    assert found == {rule.name for rule in SimplifyCats().rules()}


def cut_and_joined(times: int) -> Program:
    """A value that is cut in two and put together again, over and over."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4)
        pieces = x.meta["val"].split(2)
    last = x
    for _ in range(times):
        split = graph.call_function(torch.ops.aten.split.Tensor, (last, 2))
        first, other = (graph.call_function(operator.getitem, (split, i)) for i in range(2))
        joined = graph.call_function(torch.ops.aten.cat.default, ([first, other],))
        last = graph.call_function(torch.ops.aten.neg.default, (joined,))
        split.meta["val"], first.meta["val"], other.meta["val"] = pieces, *pieces
        joined.meta["val"] = last.meta["val"] = x.meta["val"]
    graph.output((last,))
    return Program(graph, (Input(InputKind.INPUT, "x"),), (Output(OutputKind.OUTPUT, "y"),))


def test_work_grows_with_the_program() -> None:
    def work(times: int) -> Callable[[], PassResult]:
        program = cut_and_joined(times)
        return lambda: SimplifyCats().run(program)

    assert work(50)().counts == {"join-parts": 50}
    grows_linearly(work, 250)
