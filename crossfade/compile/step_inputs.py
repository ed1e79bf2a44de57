"""Where a step's program finds its inputs: in the user's model and optimizer, in parts that this rank keeps, in memory
that lives as long as the step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from crossfade.capture.numbers import Number
from crossfade.compile.place import Place
from crossfade.errors import CrossfadeError
from crossfade.execute.bound import Bound, BoundValue, watch
from crossfade.graph.private import own_buffers
from crossfade.graph.program import InputKind, Program
from crossfade.ranks.shards import place_of


@dataclass(frozen=True)
class StepInputs:
    """What the programs of one step are given."""

    model: nn.Module
    optimizer: Optimizer
    place: Place
    _workspaces: dict[Hashable, Tensor] = field(default_factory=dict)
    _residuals: dict[fx.Node, Tensor] = field(default_factory=dict)
    """By the placeholder: each program makes up for what it has left out itself."""

    def bound(self, program: Program, numbers: Mapping[str, Number]) -> Bound:
        """How to find each input's value: users may load checkpoints or change rates between steps."""
        lasting: dict[int, Callable[[], BoundValue]] = {}
        fresh: dict[int, Callable[[dict[str, Any]], Any]] = {}
        for place, (item, node) in enumerate(program.named_inputs()):
            if item.kind in (InputKind.INPUT, InputKind.ALIKE, InputKind.EARLIER):
                fresh[place] = partial(_taken_out, item.name)
            elif item.kind is InputKind.SCALAR and item.name in numbers:
                fresh[place] = partial(_number, numbers[item.name])
            else:
                lasting[place] = self._finder(item.kind, item.name, node)
        return Bound(lasting, fresh)

    def _finder(self, kind: InputKind, name: str, node: fx.Node) -> Callable[[], BoundValue]:
        match kind:
            case InputKind.WORKSPACE:
                return lambda: BoundValue(self._workspace(name, node))
            case InputKind.RESIDUAL:
                return lambda: BoundValue(self._residual(node))
            case InputKind.OPTIMIZER_STATE:
                return partial(self._found_state, *name.rsplit(":", 1))
            case InputKind.SCALAR:
                assert name == "rank" or self.place.shards is not None, f"{name} of a program without parts"
                shards = None if name == "rank" else self.place.shards
                rank = self.place.part_of_batch if shards is None else shards.rank
                return lambda: BoundValue(rank)
            case InputKind.PARAMETER:
                registry, attribute = place_of(self.model, name)
            case _:
                owner, _, attribute = name.rpartition(".")
                registry = own_buffers(self.model.get_submodule(owner))
        return partial(self._found_tensor, kind, name, registry, attribute)

    def _found_tensor(self, kind: InputKind, name: str, registry: dict[str, Any], attribute: str) -> BoundValue:
        """A parameter, or what this rank keeps of it; or a buffer."""
        seen, shards = registry[attribute], self.place.shards
        split = kind is InputKind.PARAMETER and shards is not None and shards.has(name)
        return BoundValue(shards.parameter(name) if split and shards else seen, (watch(registry, attribute),))

    def _found_state(self, name: str, key: str) -> BoundValue:
        """An entry of the optimizer's state, or what this rank keeps of it."""
        registry, attribute = place_of(self.model, name)
        parameter, states = registry[attribute], self.optimizer.state
        entries = states[parameter]
        value = (
            self.place.shards.state(name, key) if self.place.shards is not None else entries[key]
        )  # may take over the entry
        relied_on = (
            watch(registry, attribute),
            watch(vars(self.optimizer), "state"),
            watch(states, parameter),
            watch(entries, key),
        )
        return BoundValue(value, relied_on)

    def _workspace(self, name: str, node: fx.Node) -> Tensor:
        """Memory that lives as long as the step, shared by its programs, made at the first call."""
        like, key = node.meta["val"], _workspace_key(name, node)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._workspaces[key]

    def _residual(self, node: fx.Node) -> Tensor:
        """What a program has left out so far, zeros before its first run."""
        if node not in self._residuals:
            like = node.meta["val"]
            self._residuals[node] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return self._residuals[node]

    def forget_residuals(self) -> None:
        """Make up for nothing: what was trained before does not count."""
        for residual in self._residuals.values():
            residual.zero_()

    def kept_memory(self) -> list[Tensor]:
        """The memory that programs keep from call to call, and write again in the next."""
        return [*self._workspaces.values(), *self._residuals.values()]

    def keep_for(self, programs: Iterable[Program]) -> None:
        """Free the workspaces that none of these programs uses."""
        named = [pair for program in programs for pair in program.named_inputs()]
        used = {_workspace_key(item.name, node) for item, node in named if item.kind is InputKind.WORKSPACE}
        for key in [key for key in self._workspaces if key not in used]:
            del self._workspaces[key]
        mine = {node for item, node in named if item.kind is InputKind.RESIDUAL}
        for node in [node for node in self._residuals if node not in mine]:
            del self._residuals[node]


def earlier_inputs(program: Program, earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a program that exchanges kept gradients is given of them: zeros for those that nothing was kept of."""
    taken = {item.name: node.meta["val"] for item, node in program.named_inputs() if item.kind is InputKind.EARLIER}
    if left := [name for name in earlier if name not in taken]:
        raise CrossfadeError(
            f"{left[0]}: a gradient that waits for its exchange, which this batch has none of",
            expected="a last micro-batch that has gradients of the same parameters",
            remedy="leave no_sync() out around batches that use other parameters",
        )
    zeros = {
        name: torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        for name, like in taken.items()
        if name not in earlier
    }
    return {**zeros, **earlier}


def _workspace_key(name: str, node: fx.Node) -> Hashable:
    like = node.meta["val"]
    return name, like.shape, like.dtype, like.device


def _number(number: Number, batch: dict[str, Any]) -> Any:
    return number.read()


def _taken_out(name: str, batch: dict[str, Any]) -> Any:
    return batch.pop(name)
