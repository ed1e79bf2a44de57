"""Random numbers that are drawn again: a checkpointed forward that runs in the backward gets those it drew at first."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.errors import CaptureError
from crossfade.graph.effects import is_random
from crossfade.graph.private import TorchDispatchMode, schema_of, tree_flatten
from crossfade.graph.program import Program, source_line
from crossfade.graph.splice import erase_if_dead, insert_call

_aten = torch.ops.aten

_FIRST_POSITION = 0x6372_6F73_7366_0000
"""The seed that stands for the first draw; seeds that users choose are hardly there."""


@dataclass(frozen=True)
class Draw:
    """One call that draws numbers; `repeats` is the number of the earlier one that began at the same position."""

    operator: str
    repeats: int | None


class Draws(TorchDispatchMode):
    """Takes down in which order numbers are drawn, and which draws begin where an earlier one did.

    Nothing is drawn while fake tensors are traced, so the generator is free to count: its seed becomes the position in
    the stream, and every draw moves it on. Whoever keeps the generator's state and puts it back, as activation
    checkpointing does before it runs a part again, puts the position back with it. All that eager torch does with the
    state is then right here too: nested parts, parts with `preserve_rng_state=False`, states put back by hand.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Draw] = []
        self._at: dict[tuple[str, int], int] = {}

    @contextlib.contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Let the generators count; afterwards they are as they were. To be entered outside of tracing."""
        with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
            for kind in {device, torch.device("cpu")}:
                if (generator := _generator(kind)) is not None:
                    generator.manual_seed(_FIRST_POSITION)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _may_draw(func):
            self._take_down(func, result, (kwargs or {}).get("generator"))
        return result

    def _take_down(self, func: Any, result: Any, own: torch.Generator | None) -> None:
        device = next(value.device for value in tree_flatten(result)[0] if isinstance(value, Tensor))
        number, generator = len(self.log), _generator(device) if own is None else None
        if generator is None:  # the user's own, whose state is not put back by any checkpoint
            self.log.append(Draw(_name(func), None))
            return
        first = self._at.setdefault((str(device), generator.initial_seed()), number)
        self.log.append(Draw(_name(func), None if first == number else first))
        generator.manual_seed(_FIRST_POSITION + 1 + first)


def reuse_draws(program: Program, log: list[Draw]) -> None:
    """Let calls that draw the same numbers again use those of the first call.

    What was drawn is alive until then: a mask is kept for the backward even if the activations around it are not.
    """
    if all(draw.repeats is None for draw in log):
        return
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and _may_draw(node.target)]
    if [_name(node.target) for node in nodes] != [draw.operator for draw in log]:
        raise CaptureError(
            f"{len(log)} random draws were traced, but the graph has {len(nodes)}",
            expected="a node for each draw, so that parts that run again get the numbers of the first run",
            remedy="leave the activation checkpointing out",
        )
    for node, draw in zip(nodes, log, strict=True):
        if draw.repeats is not None and is_random(node):
            _reuse(program, node, nodes[draw.repeats])


def _reuse(program: Program, again: fx.Node, first: fx.Node) -> None:
    if not _draws_alike(again, first):
        raise CaptureError(
            f"{again.name} ({again.target}) draws at the place in the random stream where {first.name} "
            f"({first.target}) did{f' [{source_line(again)}]' if source_line(again) else ''}",
            expected="parts that run again to draw what they drew at first",
            remedy="let a checkpointed part draw the same at every run, or leave the checkpointing out",
        )
    inputs = again.all_input_nodes
    if again.target is _aten.native_dropout.default:
        _mask_again(program, again, first)
    else:
        again.replace_all_uses_with(first)
    again.graph.erase_node(again)
    for source in inputs:
        erase_if_dead(source)


def _draws_alike(again: fx.Node, first: fx.Node) -> bool:
    """Whether two calls give the same numbers at the same position; what they compute with is taken to be the same."""
    numbers = [fx.map_arg((node.args, node.kwargs), lambda _: None) for node in (again, first)]
    shapes = [[(value.shape, value.stride()) for value in _values(node)] for node in (again, first)]
    return again.target is first.target and numbers[0] == numbers[1] and shapes[0] == shapes[1]


def _values(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_flatten(node.meta["val"])[0] if isinstance(value, Tensor)]


def _mask_again(program: Program, again: fx.Node, first: fx.Node) -> None:
    """Apply the first call's mask to the recomputed value: its result, larger than the mask, is not kept."""
    kept = 1.0 - float(again.args[1])  # type: ignore[arg-type]

    def call(target: Any, *args: Any, before: fx.Node = again) -> fx.Node:
        return insert_call(program, target, *args, before=before, like=again)

    mask = call(operator.getitem, first, 1, before=first.next)
    scaled = call(_aten.mul.Tensor, call(_aten.mul.Tensor, again.args[0], mask), 1.0 / kept if kept else 0.0)
    for part in list(again.users):
        part.replace_all_uses_with(scaled if part.args[1] == 0 else mask)
        again.graph.erase_node(part)


def _may_draw(target: Any) -> bool:
    return schema_of(target) is not None and torch.Tag.nondeterministic_seeded in target.tags


def _name(target: Any) -> str:
    """What an operator and the functional one that tracing makes of it have in common."""
    return schema_of(target).name.removesuffix("_functional").removesuffix("_")


def _generator(device: torch.device) -> torch.Generator | None:
    """What draws numbers on a device, unless another is given; None where there is none by default."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator if device.type == "cpu" else None
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    return generators[index] if index < len(generators) else None
