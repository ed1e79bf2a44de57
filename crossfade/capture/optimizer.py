"""Capture of the optimizer's step, appended to a program that computes gradients.

The optimizer's own code is traced, on fake parameters and state, so that every option it has means what it means in
eager torch. The learning rate of each parameter group is an input of the program; all other options are baked in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import SGD, Adam, AdamW, Optimizer

from crossfade.capture.tracing import to_fake, trace
from crossfade.errors import OptimizerError
from crossfade.graph import collectives
from crossfade.graph.private import FakeTensor, has_step_hooks, symbolic_float
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.splice import inline

GRAD_NORM = "grad_norm"
"""Name of the output that carries the gradient norm before clipping."""


def _sgd_state(group: Mapping[str, Any], parameter: Tensor, present: Mapping[str, Any]) -> dict[str, Tensor]:
    if not group["momentum"]:
        return {}
    if group["dampening"] and present.get("momentum_buffer") is None:
        raise OptimizerError(
            f"SGD has dampening={group['dampening']} and no momentum buffers yet",
            expected="dampening=0, or buffers from an earlier step (the first step is not dampened)",
            remedy="take the first step with optimizer.step(), then compile; or use dampening=0",
        )
    return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}


def _adam_state(group: Mapping[str, Any], parameter: Tensor, present: Mapping[str, Any]) -> dict[str, Tensor]:
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    zeros = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in moments}
    return {"step": torch.tensor(0.0, dtype=torch.get_default_dtype()), **zeros}


_INITIAL_STATE: dict[type[Optimizer], Callable[..., dict[str, Tensor]]] = {
    SGD: _sgd_state,
    Adam: _adam_state,
    AdamW: _adam_state,
}
"""What each supported optimizer would create at its first step: the state must exist before it can be an input."""

_REFUSED_OPTIONS = ("fused", "capturable", "differentiable")


def parameter_names(model: torch.nn.Module) -> dict[Tensor, str]:
    """The name of each of a model's parameters; a tied one has its first name only."""
    return {parameter: name for name, parameter in model.named_parameters()}


def check_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Refuse what cannot be captured: other optimizers, options that change its kind, foreign parameters."""
    if type(optimizer) not in _INITIAL_STATE:
        raise OptimizerError(
            f"the optimizer {type(optimizer).__name__} cannot be captured",
            expected=f"one of {', '.join(kind.__name__ for kind in _INITIAL_STATE)}",
            remedy="use one of those, or keep this optimizer and compile only the forward and backward",
        )
    if has_step_hooks(optimizer):
        raise OptimizerError(
            "the optimizer has hooks around its step", remedy="remove them, and call them between steps"
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in _REFUSED_OPTIONS:
            if group.get(option):
                raise OptimizerError(
                    f"{option}=True in parameter group {index}",
                    remedy=f"leave {option} out: the captured step does not need it",
                )
        if isinstance(group["lr"], Tensor):
            raise OptimizerError(
                f"the learning rate of group {index} is a tensor", remedy="pass a float; it stays an input of the step"
            )
        for parameter in group["params"]:
            if parameter not in names:
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} in group {index} is not the model's",
                    remedy="build the optimizer from model.parameters()",
                )


def initial_state(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    stepped: Collection[str],
    parts: Mapping[str, Tensor] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """The state that the optimizer would create at its first step, for each of the parameters `stepped`.

    `parts` has tensors like those that the optimizer works on, for parameters of which a rank updates only a part.
    """
    create, parts = _INITIAL_STATE[type(optimizer)], parts or {}
    return {
        names[parameter]: create(group, parts.get(names[parameter], parameter), optimizer.state.get(parameter, {}))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if names[parameter] in stepped
    }


def options_key(optimizer: Optimizer) -> Hashable:
    """Everything about the groups that is baked into a captured step: a change of it needs a new capture."""
    return tuple(
        tuple((key, str(value)) for key, value in group.items() if key not in ("params", "lr", "initial_lr"))
        + tuple(id(parameter) for parameter in group["params"])
        for group in optimizer.param_groups
    )


def append_optimizer(
    program: Program,
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    *,
    clip_grad_norm: float | None = None,
    split_over: Mapping[str, str] | None = None,
) -> Program:
    """Add the optimizer's step to a program with gradient outputs; gradients become updates of parameters and state.

    Parameters are updated in the order in which their gradients become ready, so that early updates run while late
    gradients still travel. `foreach` optimizers are captured as one update per parameter, for the same reason: the
    numbers are the same. Where the program returns a shard of a parameter, that is what is updated. `split_over`
    gives the parameters whose gradients are split, with the group: their norm is then that of all ranks' parts.
    """
    program = program.copy()
    ready = _gradients_in_order(program)
    operands = _operands(program, ready)
    state = _fake_state(program, optimizer, names, operands)
    rates = [
        symbolic_float(program.fake_mode.shape_env, f"lr{i}", float(g["lr"]))
        for i, g in enumerate(optimizer.param_groups)
    ]
    shadow: Optimizer = type(optimizer)([torch.zeros(1)], lr=1.0)  # type: ignore[call-arg]

    def update(
        parameter_values: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], *lr: Any
    ) -> Any:
        by_name = dict(zip(ready, parameter_values, strict=True))
        _point_at(
            shadow,
            optimizer,
            names,
            by_name,
            dict(zip(ready, gradients, strict=True)),
            dict(zip(ready, states, strict=True)),
            lr,
        )
        norm = _clip({n: by_name[n] for n in names.values() if n in by_name}, clip_grad_norm, split_over or {})
        shadow.step()
        return [*parameter_values, *(value for state in states for value in state.values()), *norm]

    fakes = (
        [operands[n].meta["val"] for n in ready],
        [ready[n].meta["val"] for n in ready],
        [state[n] for n in ready],
        *rates,
    )
    with torch.no_grad():
        body = trace(program.fake_mode, update, fakes, f"the step of {type(optimizer).__name__}", with_sources=False)
    return _append(program, body.graph, ready, operands, state, len(rates), clipped=clip_grad_norm is not None)


def state_name(parameter: str, key: str) -> str:
    """The program's name for one entry of one parameter's optimizer state."""
    return f"{parameter}:{key}"


def _gradients_in_order(program: Program) -> dict[str, fx.Node]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    found = [(out.name, value) for out, value in program.named_results() if out.kind is OutputKind.GRADIENT]
    return dict(sorted(found, key=lambda item: position[item[1]]))


def _operands(program: Program, ready: Mapping[str, Any]) -> dict[str, fx.Node]:
    """What the optimizer works on for each parameter: its shard where the program returns one, else its input."""
    inputs = program.input_nodes()
    shards = {out.name: value for out, value in program.named_results() if out.kind is OutputKind.SHARD}
    return {name: shards.get(name, inputs[name]) for name in ready}


def _fake_state(
    program: Program, optimizer: Optimizer, names: Mapping[Tensor, str], operands: Mapping[str, fx.Node]
) -> dict[str, dict[str, Tensor]]:
    parameters = {name: parameter for parameter, name in names.items()}
    initial = initial_state(optimizer, names, operands, {n: operands[n].meta["val"] for n in operands})
    present = {n: optimizer.state.get(parameters[n], {}) for n in operands}
    real = {n: {**initial[n], **{k: v for k, v in present[n].items() if v is not None}} for n in operands}

    def fake(name: str, entry: Tensor) -> Tensor:
        if isinstance(entry, FakeTensor):
            return entry
        operand, parameter = operands[name].meta["val"], parameters[name]
        if entry.shape != parameter.shape or operand.shape == parameter.shape:
            return to_fake(program.fake_mode, entry)
        return operand.new_empty(operand.shape, dtype=entry.dtype)  # of the part that is updated

    return {
        n: {key: fake(n, value) for key, value in entries.items() if isinstance(value, Tensor)}
        for n, entries in real.items()
    }


def _point_at(
    shadow: Optimizer,
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    states: Mapping[str, dict[str, Tensor]],
    rates: tuple[Any, ...],
) -> None:
    """Make `shadow` the user's optimizer over traced tensors."""
    shadow.state.clear()
    shadow.param_groups.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        members = {names[parameter] for parameter in group["params"]}
        chosen = [name for name in parameters if name in members]
        shadow.param_groups.append({**group, "foreach": False, "lr": rate, "params": [parameters[n] for n in chosen]})
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
        shadow.state[parameter] = states[name]


def _clip(parameters: Mapping[str, Tensor], limit: float | None, split_over: Mapping[str, str]) -> list[Tensor]:
    if limit is None:
        return []
    if not split_over:
        return [torch.nn.utils.clip_grad_norm_(list(parameters.values()), limit, foreach=False)]
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    kind = functools.reduce(torch.promote_types, (gradient.dtype.to_real() for gradient in gradients.values()))
    norm = _norm_of_all(gradients, split_over, torch.promote_types(kind, torch.float32))
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    for gradient in gradients.values():
        gradient.mul_(scale)
    return [norm.to(kind)]


def _norm_of_all(gradients: Mapping[str, Tensor], split_over: Mapping[str, str], wide: torch.dtype) -> Tensor:
    """The norm of gradients of which each rank of a group has a part, or all where they are not split.

    Squares are summed in float32 at least: those of half precision overflow at a norm of 256.
    """
    total = next(iter(gradients.values())).new_zeros((), dtype=wide)
    for group in dict.fromkeys(split_over.values()):
        own = [gradient for name, gradient in gradients.items() if split_over.get(name) == group]
        if own:
            squares = torch.stack([_square_of_norm(gradient, wide) for gradient in own]).sum()
            total = total + collectives.wait(collectives.all_reduce(squares, "sum", group))
    for name, gradient in gradients.items():
        if name not in split_over:
            total = total + _square_of_norm(gradient, wide)
    return total.sqrt()


def _square_of_norm(gradient: Tensor, wide: torch.dtype) -> Tensor:
    """The sum of squares, of complex numbers of their absolute values, in a dtype that holds that of all gradients."""
    own = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=own).to(wide).square()


def _append(
    program: Program,
    body: fx.Graph,
    ready: Mapping[str, fx.Node],
    operands: Mapping[str, fx.Node],
    state: Mapping[str, dict[str, Tensor]],
    groups: int,
    *,
    clipped: bool,
) -> Program:
    entries = [(name, key) for name in ready for key in state[name]]
    new_inputs = [Input(InputKind.OPTIMIZER_STATE, state_name(name, key)) for name, key in entries]
    new_inputs += [Input(InputKind.SCALAR, f"lr.{index}") for index in range(groups)]
    body_inputs = list(body.find_nodes(op="placeholder"))
    count = len(ready)
    parameters = dict(zip(body_inputs[:count], [operands[n] for n in ready], strict=True))
    gradients = dict(zip(body_inputs[count : 2 * count], ready.values(), strict=True))
    added = {
        old: program.add_input(item, old.meta["val"])
        for item, old in zip(new_inputs, body_inputs[2 * count :], strict=True)
    }
    results = inline(program, body, {**parameters, **gradients, **added}, before=program.output_node)
    taken = (OutputKind.GRADIENT, OutputKind.SHARD)
    kept = [(out, value) for out, value in program.named_results() if out.kind not in taken]
    updated = [*ready, *(state_name(name, key) for name, key in entries)]
    kept += list(zip([Output(OutputKind.UPDATE, name) for name in updated], results[: len(updated)], strict=True))
    if clipped:
        kept.append((Output(OutputKind.OUTPUT, GRAD_NORM), results[-1]))
    program.set_results([value for _, value in kept], tuple(out for out, _ in kept))
    program.facts |= {"optimizer"}
    return program
