"""Capture of the optimizer's step, appended to a program that computes gradients.

The optimizer's own code is traced, on fake parameters and state, so that every option it has means what it means in
eager torch. The numbers that it computes with are inputs of the program; other options are baked in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from crossfade.capture.alike_updates import alike, may_repeat, updates_each_by_itself
from crossfade.capture.clipping import clipped_norm
from crossfade.capture.numbers import Learned, Number, StepNumbers, SymbolicNumbers, numbers_of
from crossfade.capture.optimizer_state import counters_in, initial_state, lacking_state
from crossfade.capture.shadow import (
    check_shadowed,
    check_unchanged,
    give_groups,
    is_any_number,
    put_number,
    shadow_of,
    take_step,
)
from crossfade.capture.tracing import is_about_data, to_fake, trace
from crossfade.capture.update_order import order_by_readiness
from crossfade.capture.update_pieces import Piece, append_pieces, state_name
from crossfade.errors import CaptureError, ModelError, OptimizerError
from crossfade.graph.private import FakeTensor, as_if_compiling, has_hooks, has_step_hooks, version_of
from crossfade.graph.program import OutputKind, Program


class NoOptimizer(Optimizer):
    """Stands in a step that ends with gradients: it knows all of a model's parameters, keeps no state, changes nothing.

    >>> NoOptimizer(torch.nn.Linear(2, 1)).step()
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(list(model.parameters()), {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave everything as it is."""


_OF_KERNELS = ("foreach", "fused", "capturable")


def parameter_names(model: torch.nn.Module) -> dict[Tensor, str]:
    """The name of each of a model's parameters; a tied one has its first name only."""
    return {parameter: name for name, parameter in model.named_parameters()}


def check_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Refuse what cannot be captured: what runs outside of its step, `differentiable`, foreign parameters."""
    if isinstance(optimizer, NoOptimizer):
        return
    _check_hooks(names)
    check_shadowed(optimizer)
    if has_step_hooks(optimizer):
        raise OptimizerError(
            "the optimizer has hooks around its step", remedy="remove them, and call them between steps"
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptimizerError(
                f"differentiable=True in parameter group {index}",
                remedy="leave differentiable out: a compiled step is not differentiated through",
            )
        for parameter in group["params"]:
            if parameter not in names:
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} in group {index} is not the model's",
                    remedy="build the optimizer from model.parameters()",
                )


def _check_hooks(names: Mapping[Tensor, str]) -> None:
    """Refuse gradient hooks, which a step that keeps its gradients to itself would never call."""
    hooked = next((name for parameter, name in names.items() if has_hooks(parameter)), None)
    if hooked is not None:
        raise ModelError(
            f"parameter {hooked} has a gradient hook",
            expected="none: gradients live inside the compiled step",
            remedy="remove it, or compile up to the gradients only (crossfade.compile_gradients)",
        )


def optimizer_said(optimizer: Optimizer) -> str:
    """An optimizer's name for reports, with the options that choose kernels, which a compiled step does for itself.

    >>> optimizer_said(torch.optim.SGD([torch.zeros(1)], foreach=True))
    'SGD (foreach=True: kernels are chosen by the step instead)'
    """
    asked = [key for key in _OF_KERNELS if any(group.get(key) for group in optimizer.param_groups)]
    said = ", ".join(f"{key}=True" for key in asked)
    return type(optimizer).__name__ + (f" ({said}: kernels are chosen by the step instead)" if said else "")


@dataclass(frozen=True)
class OptimizerStep:
    """A program with the optimizer's step, and the numbers that it takes."""

    program: Program
    numbers: StepNumbers


def append_optimizer(program: Program, optimizer: Optimizer, names: Mapping[Tensor, str], **options: Any) -> Program:
    """The program that `trace_optimizer` makes."""
    return trace_optimizer(program, optimizer, names, **options).program


def trace_optimizer(
    program: Program,
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    *,
    clip_grad_norm: float | None = None,
    split_over: Mapping[str, tuple[str, ...]] | None = None,
    learned: Learned | None = None,
    begins: Collection[str] = (),
    alone: bool = False,
) -> OptimizerStep:
    """Add the optimizer's step to a program with gradient outputs; gradients become updates of parameters and state.

    Parameters are updated in the order in which their gradients become ready, so that early updates run while late
    gradients still travel. `foreach` optimizers are captured as one update per parameter, for the same reason: the
    numbers are the same. Where the program returns a shard of a parameter, that is what is updated. `split_over`
    gives the parameters whose gradients are split, with the groups: their norm is then that of all ranks' parts.
    `begins` are parameters of which this is the first step, which does something else than later ones.
    What the code asked about numbers, and which of them it changes, is added to `learned`. With `alone` it is a trial:
    parameters without gradients, which have some in training, are not shown to it.
    """
    tracer = _Tracer(program.copy(), optimizer, names, clip_grad_norm, split_over or {}, frozenset(begins), alone)
    learned = Learned() if learned is None else learned
    try:
        return tracer.appended(learned, capturable=False)
    except CaptureError as error:
        if not is_about_data(error) or not any("capturable" in group for group in optimizer.param_groups):
            raise
    with as_if_compiling():  # torch has such code run on accelerators only, unless it is compiled
        return tracer.appended(learned, capturable=True)


@dataclass
class _Tracer:
    """The optimizer's step, traced onto the gradients of a program; as often as it takes to know all its numbers."""

    program: Program
    optimizer: Optimizer
    names: Mapping[Tensor, str]
    clip_grad_norm: float | None
    split_over: Mapping[str, tuple[str, ...]]
    begins: frozenset[str]
    alone: bool = False
    attempts: int = 0

    def __post_init__(self) -> None:
        self.ready = _gradients_in_order(self.program)
        self.operands = _operands(self.program, self.ready)
        self.initial, self.state = _initial_and_fake(self.program, self.optimizer, self.names, self.operands)
        self.parameters = {name: parameter for parameter, name in self.names.items()}

    def appended(self, learned: Learned, *, capturable: bool) -> OptimizerStep:
        """The program with the step; what it was traced with is tried again where the step changes more numbers."""
        while True:
            later = {name: self.initial.get(name, {}) for name in self.ready if name not in self.begins}
            numbers = numbers_of(self.optimizer, self.names, later, learned.changing)
            self.attempts += 1
            symbolic = SymbolicNumbers(self.program.fake_mode.shape_env, numbers, self.attempts)
            step = _TracedStep(self, symbolic, capturable, list(self.ready))
            pieces = self._repeated(symbolic, capturable) or [step.trace()]
            if step.changing <= learned.changing:
                break
            learned.changing |= step.changing
        learned.branches.update({branch.text: branch for branch in symbolic.branches()})
        updates = symbolic.updates(step.left)
        program = self.program
        used = append_pieces(program, pieces, symbolic, operands=self.operands, ready=self.ready, state=self.state)
        return OptimizerStep(program, StepNumbers({name: numbers[name] for name in used}, updates))

    def _repeated(self, symbolic: SymbolicNumbers, capturable: bool) -> list[Piece]:
        """The step in pieces, one a parameter, of which only those that differ are traced; none if it must be whole."""
        if self.begins or not updates_each_by_itself(self.optimizer) or not self._states_are_tensors():
            return []
        values = {name: (self.operands[name].meta["val"], self.ready[name].meta["val"]) for name in self.ready}
        first = alike(self.optimizer, self.parameters, values, self.state)
        if 2 * len(set(first.values())) > len(first):  # a trace of its own for each costs more than one of all
            return []
        traced: dict[str, Piece] = {}
        for name in dict.fromkeys(first.values()):
            step = _TracedStep(self, symbolic, capturable, [name])
            traced[name] = step.trace(clips=False)
            graph = traced[name].body.graph
            if (
                step.changing
                or symbolic.updates(step.left)
                or not may_repeat(graph, graph.find_nodes(op="placeholder"))
            ):
                return []
        clipping = [] if self.clip_grad_norm is None or not first else [self._clipping()]
        return [*clipping, *(replace(traced[first[name]], names=[name]) for name in first)]

    def _states_are_tensors(self) -> bool:
        known = [{**self.initial.get(n, {}), **self.optimizer.state.get(self.parameters[n], {})} for n in self.ready]
        return all(isinstance(value, Tensor) for state in known for value in state.values())

    def _clipping(self) -> Piece:
        """The gradients of all parameters scaled down, and their norm."""

        def clip(values: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
            by_name = dict(zip(self.ready, values, strict=True))
            for value, gradient in zip(values, gradients, strict=True):
                value.grad = gradient
            ordered = {name: by_name[name] for name in self.names.values() if name in by_name}
            norm = clipped_norm(ordered, self.clip_grad_norm, self.split_over)
            return [*gradients, *norm]

        values = [self.operands[n].meta["val"] for n in self.ready]
        fakes = values, [self.ready[n].meta["val"] for n in self.ready]
        with torch.no_grad():
            body = trace(self.program.fake_mode, clip, fakes, "the norm of gradients", with_sources=False)
        return Piece(list(self.ready), body, norm=True, updates=False)


def _check_untouched(without: Mapping[str, Tensor]) -> None:
    """Refuse a step that changes parameters which have no gradient: the program does not hold them."""
    changed = next((name for name, tensor in without.items() if version_of(tensor)), None)
    if changed is not None:
        raise OptimizerError(
            f"the optimizer changes {changed}, which has no gradient",
            expected="updates of parameters with gradients",
            remedy="skip parameters whose .grad is None, as torch's optimizers do",
        )


class _TracedStep:
    """One trace: a function of parameters, gradients, state and numbers, and what it left in the numbers' places."""

    def __init__(self, tracer: _Tracer, symbolic: SymbolicNumbers, capturable: bool, stepped: Sequence[str]) -> None:
        self.tracer, self.symbolic, self.capturable, self.stepped = tracer, symbolic, capturable, stepped
        self.counters = {
            name: counters_in(tracer.optimizer, tracer.parameters[name], tracer.state[name]) if capturable else set()
            for name in stepped
        }
        self.left: dict[Number, Any] = {}
        self.changing: set[str] = set()

    def trace(self, *, clips: bool = True) -> Piece:
        """The step of the parameters that are `stepped`, which first `clips` their gradients if that is asked for."""
        tracer = self.tracer
        self.limit = tracer.clip_grad_norm if clips else None
        fakes = (
            [tracer.operands[n].meta["val"] for n in self.stepped],
            [tracer.ready[n].meta["val"] for n in self.stepped],
            [tracer.state[n] for n in self.stepped],
            *self.symbolic.symbols.values(),
        )
        what = f"the step of {type(tracer.optimizer).__name__}"
        with torch.no_grad():
            body = trace(tracer.program.fake_mode, self._update, fakes, what, with_sources=False)
        if not updates_each_by_itself(tracer.optimizer):
            count = len(self.stepped)
            order_by_readiness(body.graph, list(body.graph.find_nodes(op="placeholder"))[count : 2 * count])
        return Piece(self.stepped, body, norm=self.limit is not None)

    def _update(
        self, values: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], *given: Any
    ) -> list[Tensor]:
        tracer, optimizer = self.tracer, self.tracer.optimizer
        by_name = dict(zip(self.stepped, values, strict=True))
        entries = {name: self._entries(name, state) for name, state in zip(self.stepped, states, strict=True)}
        shadow = shadow_of(optimizer)
        shadow.state = defaultdict(dict, {by_name[name]: held for name, held in entries.items()})
        members = self._members()
        without = self._without_gradients(members)
        chosen = [
            [(by_name | without)[name] for name in names if name in by_name or name in without] for names in members
        ]
        give_groups(shadow, optimizer, chosen, capturable=self.capturable)
        numbers = self.symbolic.numbers.values()
        for number, value in zip(numbers, given, strict=True):
            put_number(shadow, number, value, entries.get(state_of_number(number, tracer.names), {}))
        for name, gradient in zip(self.stepped, gradients, strict=True):
            by_name[name].grad = gradient
        ordered = {name: by_name[name] for name in tracer.names.values() if name in by_name}
        norm = clipped_norm(ordered, self.limit, tracer.split_over)
        take_step(shadow)
        _check_untouched(without)
        self.changing = check_unchanged(shadow, optimizer, self.symbolic.numbers)
        for name in self.stepped:
            self._check_entries(name, shadow.state[by_name[name]])
        self.left = self._numbers_left(shadow, {name: shadow.state[by_name[name]] for name in self.stepped})
        new = [
            self._kept(name, key, like, shadow.state[by_name[name]][key])
            for name, state in zip(self.stepped, states, strict=True)
            for key, like in state.items()
        ]
        return [*values, *new, *norm]

    def _without_gradients(self, members: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Stand-ins for parameters that have no gradient: code of users may count them too."""
        if self.tracer.alone or updates_each_by_itself(self.tracer.optimizer):
            return {}
        missing = {
            name: self.tracer.parameters[name] for names in members for name in names if name not in self.stepped
        }
        return {name: torch.empty(tuple(p.shape), dtype=p.dtype, device=p.device) for name, p in missing.items()}

    def _members(self) -> list[list[str]]:
        """The parameters of each group in their own order, which code of users may count on."""
        names, groups = self.tracer.names, self.tracer.optimizer.param_groups
        members = [[names[parameter] for parameter in group["params"]] for group in groups]
        if not updates_each_by_itself(self.tracer.optimizer):
            return members
        position = {name: index for index, name in enumerate(self.stepped)}
        return [sorted(group, key=lambda name: position.get(name, -1)) for group in members]

    def _entries(self, name: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the code finds in a parameter's state: nothing before its first step, if that makes a difference."""
        tracer = self.tracer
        if name in tracer.begins:
            return {}
        present = tracer.optimizer.state.get(tracer.parameters[name], {})
        known = {**tracer.initial.get(name, {}), **present}
        others = {key: value for key, value in known.items() if not isinstance(value, Tensor) and key not in state}
        # counters in double precision, as in the code that this one stands in for
        precise = {key: value.double() for key, value in state.items() if key in self.counters[name]}
        return {**others, **state, **precise}

    def _numbers_left(self, shadow: Optimizer, entries: Mapping[str, Mapping[str, Any]]) -> dict[Number, Any]:
        """Every number that is an input, or was put into a state that was empty, as the step has left it."""
        tracer, found = self.tracer, {}
        for number in self.symbolic.numbers.values():
            kind, where, key = number.place
            if kind == "state":
                found[number] = entries[tracer.names[where]][key]
            elif kind == "attribute":
                found[number] = vars(shadow)[key]
            else:
                value = shadow.param_groups[where][key[0]]
                found[number] = value if key[1] is None else value[key[1]]
        for name in tracer.begins & set(self.stepped):
            parameter = tracer.parameters[name]
            for key, value in entries[name].items():
                if is_any_number(value):
                    place = ("state", parameter, key)
                    found[Number(state_name(name, key), tracer.optimizer, place)] = value
        for index, (group, before) in enumerate(zip(shadow.param_groups, tracer.optimizer.param_groups, strict=True)):
            new = {key: value for key, value in group.items() if before.get(key) is None and is_any_number(value)}
            for key, value in new.items():  # put there by the step itself
                found[Number(f"{key}.{index}", tracer.optimizer, ("group", index, (key, None)))] = value
        return found

    def _check_entries(self, name: str, left: Mapping[str, Any]) -> None:
        """Refuse entries that come later than the first step, or that change and are neither tensors nor numbers."""
        tracer, kind = self.tracer, type(self.tracer.optimizer).__name__
        present = {**tracer.initial.get(name, {}), **tracer.optimizer.state.get(tracer.parameters[name], {})}
        for key, value in left.items():
            is_number = is_any_number(value)
            if key in tracer.state[name] or (is_number and (name in tracer.begins or key in present)):
                continue
            if name not in tracer.begins and not isinstance(value, Tensor) and key in present and value == present[key]:
                continue
            if value is None:
                continue
            raise OptimizerError(
                f"{kind} puts {key!r} into the state of {name} in a later step than its first, or changes it there",
                expected="a state of tensors and numbers that is complete after the first step",
                remedy="create every entry at the first step",
            )

    def _kept(self, name: str, key: str, like: Tensor, value: Any) -> Tensor:
        """An entry's new value, in the entry's own precision."""
        if not isinstance(value, Tensor) or value.shape != like.shape or value.is_complex() != like.is_complex():
            raise OptimizerError(
                f"{type(self.tracer.optimizer).__name__} replaces {key!r} in the state of {name} by something else",
                expected=f"a tensor of shape {tuple(like.shape)} again",
                remedy="keep what changes its shape under another key, or out of the state",
            )
        return value if value.dtype == like.dtype else value.to(like.dtype)


def state_of_number(number: Number, names: Mapping[Tensor, str]) -> str:
    """The parameter in whose state a number is; nothing of others."""
    return names[number.place[1]] if number.place[0] == "state" else ""


def _gradients_in_order(program: Program) -> dict[str, fx.Node]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    found = [(out.name, value) for out, value in program.named_results() if out.kind is OutputKind.GRADIENT]
    return dict(sorted(found, key=lambda item: position[item[1]]))


def _operands(program: Program, ready: Mapping[str, Any]) -> dict[str, fx.Node]:
    """What the optimizer works on for each parameter: its shard where the program returns one, else its input."""
    inputs = program.input_nodes()
    shards = {out.name: value for out, value in program.named_results() if out.kind is OutputKind.SHARD}
    return {name: shards.get(name, inputs[name]) for name in ready}


def _initial_and_fake(
    program: Program, optimizer: Optimizer, names: Mapping[Tensor, str], operands: Mapping[str, fx.Node]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """The state that the first step would make where there is none, and fake twins of all tensors in the state."""
    parameters = {name: parameter for parameter, name in names.items()}
    parts = {n: operands[n].meta["val"] for n in operands}
    initial = initial_state(optimizer, names, lacking_state(optimizer, names, operands), parts)
    present = {n: optimizer.state.get(parameters[n], {}) for n in operands}
    real = {n: {**initial.get(n, {}), **{k: v for k, v in present[n].items() if v is not None}} for n in operands}

    def fake(name: str, entry: Tensor) -> Tensor:
        if isinstance(entry, FakeTensor):
            return entry
        operand, parameter = operands[name].meta["val"], parameters[name]
        if entry.shape != parameter.shape or operand.shape == parameter.shape:
            return to_fake(program.fake_mode, entry)
        return operand.new_empty(operand.shape, dtype=entry.dtype)  # of the part that is updated

    return initial, {
        n: {key: fake(n, value) for key, value in entries.items() if isinstance(value, Tensor)}
        for n, entries in real.items()
    }
