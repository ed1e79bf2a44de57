"""Capture of a training step's forward, loss and backward as one program.

The user's model is not rewritten: it runs once on fake tensors, its parameters and buffers swapped for traced ones.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crossfade.capture.as_laid_out import AsLaidOut
from crossfade.capture.constants import NoWrites
from crossfade.capture.divide_batch import BatchLayout, arguments_of, is_split
from crossfade.capture.draws import Draws, reuse_draws
from crossfade.capture.symbolic_sizes import SymbolicSizes
from crossfade.capture.tracing import new_fake_mode, to_fake, trace, users_line
from crossfade.errors import CaptureError, ModelError, NotYetError
from crossfade.graph.private import (
    as_if_compiling,
    note_conditions,
    rename_node,
    swapped_state,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, identifier
from crossfade.graph.strides import strides_for

LossFunction = Callable[..., Tensor]


def check_model(model: nn.Module) -> None:
    """Refuse models that cannot be trained as they are, before anything is captured."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"no parameter of this {type(model).__name__} requires a gradient",
            remedy="pass a model with trainable parameters",
        )
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device, which holds no numbers",
                remedy="materialise the model first: model.to_empty(device='cpu'), then initialise or load its weights",
            )
    devices = {str(tensor.device) for _, tensor in tensors}
    if len(devices) > 1:
        raise ModelError(
            f"parameters and buffers are on {', '.join(sorted(devices))}", remedy="move the model to one device"
        )


def capture_forward_backward(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: tuple[Any, ...],
    *,
    batch_size: int,
    trained: Sequence[str],
    layout: BatchLayout,
    plain_norms: bool = False,
    forward: Callable[[dict[str, Tensor], tuple[Any, ...]], Tensor] | None = None,
    sizes: SymbolicSizes | None = None,
    lines: dict[str, str] | None = None,
    with_sources: bool = True,
    name_of: Callable[[Tensor], str] = lambda tensor: "",
) -> Program:
    """Forward, loss and backward on a batch of `batch_size` samples, as one functional program.

    Inputs are the parameters, the buffers and the batch's tensors; outputs are the loss, a gradient for each of the
    parameters named in `trained` that has one, and the new value of each buffer that the forward changes. Where none is
    trained there is no backward. With
    `plain_norms`, batch normalisation is captured in ATen's own spelling also where cuDNN would be used. `forward`
    gives the loss for a state by name and a batch, instead of the model and the loss function. With `sizes`, those of
    the batch's tensors are symbols; `lines` is given the line that asked for each condition on these. Without
    sources, which take a fifth of the time, nodes do not know the lines that made them. What the code stores meanwhile
    stays: see `as_it_was`. `name_of` says in errors where a tensor was found.

        >>> model, batch = nn.Linear(2, 1), (torch.ones(4, 2), torch.ones(4, 1))
        >>> layout = BatchLayout.of(batch, ranks=1, accumulate=1, given="global")
        >>> program = capture_forward_backward(
        ...     model, nn.functional.mse_loss, batch, batch_size=4, trained=["weight", "bias"], layout=layout)
        >>> [f"{output.kind} {output.name}" for output in program.outputs]
        ['loss loss', 'gradient weight', 'gradient bias']
    """
    mode, draws = new_fake_mode(), Draws()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    leaves, spec = tree_flatten(batch)
    shown: dict[str, Tensor] = {}
    with mode:
        tensors = [leaf for leaf in tree_flatten(resized(batch, batch_size, layout))[0] if isinstance(leaf, Tensor)]
    tracing = {True}
    if sizes is not None:
        tensors = sizes.fakes(mode, tensors)
        note_conditions(mode, partial(_note_line, {} if lines is None else lines, tracing))

    def forward_backward(parameter_values: list[Tensor], buffer_values: list[Tensor], *batch_values: Tensor) -> Any:
        fresh = [_as_leaf(p, like) for p, like in zip(parameter_values, parameters.values(), strict=True)]
        state = dict(zip([*parameters, *buffers], [*fresh, *buffer_values], strict=True))
        wanted = [state[name] for name in trained]
        # Until after the backward, which may run parts again.
        with torch.enable_grad(), swapped_state(model, state), as_if_compiling(), draws:
            filled = tree_unflatten(_fill(leaves, batch_values), spec)
            with NoWrites(name_of), AsLaidOut():
                loss, more = loss_and_more(model, loss_fn, filled) if forward is None else (forward(state, filled), {})
                shown.update({name: value.detach() for name, value in more.items()})
            with NoWrites(name_of), AsLaidOut():
                gradients = _gradients(loss, wanted)
        if layout.ranks * layout.accumulate > 1:
            _check_dense(dict(zip(trained, gradients, strict=True)))
        return [loss.detach(), *gradients, *(state[name] for name in buffers), *parameter_values, *shown.values()]

    fakes = [to_fake(mode, p) for p in parameters.values()], [to_fake(mode, b) for b in buffers.values()], *tensors
    device = next(iter(parameters.values())).device
    with _plain_kernels(model, plain_norms), draws.counted(device):
        what = f"the forward and backward of {type(model).__name__}"
        is_symbolic = sizes is not None
        module = trace(mode, forward_backward, fakes, what, symbolic=is_symbolic, with_sources=with_sources)
    tracing.clear()
    names = [name for name, leaf in zip(layout.names, leaves, strict=True) if isinstance(leaf, Tensor)]
    inputs = (
        *(Input(InputKind.PARAMETER, name) for name in parameters),
        *(Input(InputKind.BUFFER, name) for name in buffers),
        *(Input(InputKind.INPUT, name) for name in names),
    )
    outputs = (
        Output(OutputKind.LOSS, "loss"),
        *(Output(OutputKind.GRADIENT, name) for name in trained),
        *(Output(OutputKind.UPDATE, name) for name in [*buffers, *parameters]),
        *(Output(OutputKind.OUTPUT, name) for name in shown),
    )
    program = _tidy(module, inputs, outputs)
    reuse_draws(program, draws.log)
    return program


def _note_line(lines: dict[str, str], tracing: set[bool], condition: Any) -> None:
    # The innermost frames are this one and the list's that told it.
    if tracing and (line := users_line(traceback.extract_stack()[:-2])):
        lines.setdefault(str(condition), line)


def _gradients(loss: Tensor, wanted: list[Tensor]) -> list[Tensor | None]:
    """The gradients of a loss. Functions written in Python may run a backward inside of theirs, as reentrant
    checkpoints do, which leaves gradients in `.grad` and is not run at all where gradients are asked for by name."""
    if not wanted:
        return []
    if not _has_python_functions(loss):
        return list(torch.autograd.grad(loss, wanted, allow_unused=True))
    loss.backward()
    return [tensor.grad for tensor in wanted]


def _check_dense(gradients: Mapping[str, Tensor | None]) -> None:
    """Refuse sparse gradients where they are to be put together from those of several parts."""
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {name} is sparse",
                expected="dense gradients, which ranks and micro-batches can add up",
                remedy=f"build the embedding that has {name} with sparse=False, and pass an optimizer for dense "
                "gradients (Adam for SparseAdam)",
            )


def _has_python_functions(loss: Tensor) -> bool:
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        stack.extend(source for source, _ in node.next_functions)
    return False


@contextlib.contextmanager
def _plain_kernels(model: nn.Module, plain_norms: bool) -> Iterator[None]:
    """Capture in ATen's own spelling where a library's kernel would hide what it computes.

    oneDNN's recurrent layers return a workspace that fake tensors describe wrongly.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with contextlib.ExitStack() as stack:
        if plain_norms or recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if recurrent:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


def loss_of(model: Callable[..., Any], loss_fn: LossFunction | None, batch: tuple[Any, ...]) -> Tensor:
    """The loss of a batch alone."""
    loss, more = loss_and_more(model, loss_fn, batch)
    if more:
        raise NotYetError(
            f"{', '.join(more)} beside the loss of a model that is split by a plan",
            expected="the loss alone",
            remedy="compute it from the model between steps (step.gathered())",
        )
    return loss


def loss_and_more(
    model: Callable[..., Any], loss_fn: LossFunction | None, batch: tuple[Any, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and what is returned with it, by name: `return loss, {"accuracy": accuracy}`.

    With a loss function, the batch's first element is the model's inputs, the rest its own. What is named is the loss
    function's; the model's where there is none, or nothing else.
    """
    given, named = arguments_of(batch)
    if loss_fn is None:
        args, kwargs = _call_arguments(given[0] if len(given) == 1 and isinstance(given[0], dict) else given)
        twice = ", ".join(kwargs.keys() & named.keys())
        if twice:
            raise CaptureError(f"{twice} both in the batch's dict and by name", remedy="pass it in one of the two")
        returned = model(*args, **kwargs, **named)
    elif not given:
        returned = loss_fn(model(**named))
    else:
        args, kwargs = _call_arguments(given[0])
        returned = loss_fn(model(*args, **kwargs), *given[1:], **named)
    returned, more = _apart(returned)
    loss = _loss_in(returned) if loss_fn is None else returned
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(
            f"the loss is {shape}",
            expected="one floating-point number",
            remedy=("reduce it with .mean()" if isinstance(loss, Tensor) else "return the loss tensor from loss_fn")
            + (", or pass a loss_fn" if loss_fn is None else ""),
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any trained parameter",
            remedy="check for detach(), no_grad or inference_mode in the model, and that parameters require gradients",
        )
    return loss, more


def _apart(returned: Any) -> tuple[Any, dict[str, Tensor]]:
    """A loss and a dict of other tensors, where that is what a function returns.

    >>> _apart((torch.tensor(0.5), {"right": torch.tensor(3)}))
    (tensor(0.5000), {'right': tensor(3)})
    """
    match returned:
        case (Tensor() as loss, dict() as more) if all(isinstance(value, Tensor) for value in more.values()):
            return loss, {str(name): value for name, value in more.items()}
    return returned, {}


def _loss_in(output: Any) -> Any:
    """The loss in what a model returns: itself, its `loss`, or the number that it begins with.

    >>> _loss_in((torch.tensor(0.5), "logits")), _loss_in({"loss": torch.tensor(0.25)})
    (tensor(0.5000), tensor(0.2500))
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0] if isinstance(output[0], Tensor) and not output[0].dim() else None
    if found is None:
        raise CaptureError(
            f"the model returned {type(output).__name__} without a loss",
            expected="a loss from the model, as there is no loss_fn",
            remedy="pass labels with the batch if the model computes its loss from them (step(..., labels=labels)), "
            "or a loss_fn that takes what it returns",
        )
    return found


def _call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called on its inputs: a tuple or list spreads, a dict names, anything else is the one input."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _as_leaf(value: Tensor, like: Tensor) -> Tensor:
    return value.detach().requires_grad_(like.requires_grad)


def resized(batch: tuple[Any, ...], batch_size: int, layout: BatchLayout) -> tuple[Any, ...]:
    """A batch like the given one with `batch_size` samples, of zeros, laid out as `take` does.

    >>> batch = (torch.ones(4, 2), "words")
    >>> layout = BatchLayout.of(batch, ranks=1, accumulate=1, given="global")
    >>> resized(batch, 1, layout)
    (tensor([[0., 0.]]), 'words')
    """

    def zeros(leaf: Tensor) -> Tensor:
        if not is_split(leaf):
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        rows = leaf.shape[0] * batch_size // layout.size
        strides = strides_for(leaf, rows)
        return torch.empty_strided((rows, *leaf.shape[1:]), strides, dtype=leaf.dtype, device=leaf.device).zero_()

    return tree_map_only(Tensor, zeros, batch)


def _fill(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _tidy(module: torch.fx.GraphModule, inputs: tuple[Input, ...], outputs: tuple[Output, ...]) -> Program:
    """Keep only the results that say something: gradients that exist, buffers that changed."""
    placeholders = dict(zip([item.name for item in inputs], module.graph.find_nodes(op="placeholder"), strict=True))
    results: Any = module.graph.output_node().args[0]
    kept = [
        (out, value)
        for out, value in zip(outputs, results, strict=True)
        if value is not None and not (out.kind is OutputKind.UPDATE and value is placeholders[out.name])
    ]
    for out, _ in kept:
        if out.kind is OutputKind.UPDATE and Input(InputKind.PARAMETER, out.name) in inputs:
            raise CaptureError(
                f"the forward itself changes parameter {out.name}",
                expected="parameters that only the optimizer changes",
                remedy="do it between steps (an embedding's max_norm, a clamp), or make it a buffer",
            )
    module.graph.output_node().args = (tuple(value for _, value in kept),)
    for name, node in placeholders.items():
        node.target = identifier(name)
        rename_node(node, node.target)
    constants = {
        name: getattr(module, name) for name in {str(n.target) for n in module.graph.find_nodes(op="get_attr")}
    }
    return Program(module.graph, inputs, tuple(out for out, _ in kept), constants=constants)
