"""Turning torch code into one functional graph on fake tensors, with errors that name the user's line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from crossfade.errors import CaptureError, CrossfadeError
from crossfade.graph.private import (
    FakeTensorMode,
    composite_operators_in_python,
    dispatch_functionalize,
    symbolic_shapes,
)
from crossfade.graph.program import complete_metadata
from crossfade.tracebacks import without_torchs_account

_ABOUT_DATA = "control flow depends on tensor values"
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def new_fake_mode() -> FakeTensorMode:
    """Fake tensors with static shapes, whose `.item()` is a graph value rather than an error."""
    return FakeTensorMode(shape_env=symbolic_shapes(), allow_non_fake_inputs=True)


def to_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake twin of a tensor: same shape, strides, dtype and device, no data. Of a distributed one, of the whole."""
    from torch.distributed.tensor import DTensor  # here, since importing it is slow

    if isinstance(tensor, DTensor):
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def trace(
    mode: FakeTensorMode,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    what: str,
    *,
    symbolic: bool = False,
    with_sources: bool = True,
) -> fx.GraphModule:
    """Record `function(*inputs)` as a graph of functional ATen ops; mutation becomes new values.

    The function takes and returns flat lists. `what` names it in errors. Sizes of inputs may be `symbolic`. Without
    sources, nodes do not know the lines that made them.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        # The mode also for tensors made inside: drawing them for real would shift the user's random stream. What the
        # user compiled with torch.compile is called as it was written, and its compiled code is left as it is.
        open_sizes = composite_operators_in_python() if symbolic else contextlib.nullcontext()
        with mode, open_sizes, without_torchs_account(), torch.compiler.set_stance("force_eager"):
            module = make_fx(dispatch_functionalize(function), record_stack_traces=with_sources)(*inputs)
    except CrossfadeError:
        raise
    except Exception as error:
        raise _capture_error(error, what) from error
    _drop_profiler_marks(module.graph)
    complete_metadata(module.graph)
    return module


def _capture_error(error: Exception, what: str) -> CaptureError:
    where = users_line(traceback.extract_tb(error.__traceback__))
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else ""
    if (known := _known_to_depend_on_data(error)) is not None:
        return CaptureError(
            f"{known[0]} in {what}{where}", expected="one graph that is right for every batch", remedy=known[1]
        )
    depends_on_data = any(word in f"{type(error).__name__} {error}" for word in ("DataDependent", "data-dependent"))
    if depends_on_data:
        return CaptureError(
            f"{_ABOUT_DATA} in {what}{where}",
            expected="one graph that is right for every batch",
            remedy="compute both sides and choose with torch.where, or move the decision out of the step",
        )
    return CaptureError(
        f"{type(error).__name__} while capturing {what}{where}: {message}",
        remedy="see that it runs on such a batch without crossfade; and on fake tensors: no numpy, no data access, no "
        "tensors on other devices",
    )


def _known_to_depend_on_data(error: Exception) -> tuple[str, str] | None:
    """What of torch's own asks for a tensor's value, and what to write instead."""
    if "_ctc_loss" in str(error):
        return (
            "F.ctc_loss reads the lengths that it is given to lay out its memory",
            "compute it inside an operator of your own, with fixed sizes of what it returns: torch.library.custom_op, "
            "register_fake and register_autograd, as docs/limits.md shows",
        )
    modules = [
        owner
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(owner := frame.f_locals.get("self"), torch.nn.Module)
    ]
    norm = modules[-1] if modules else None
    if not isinstance(norm, _BATCH_NORMS) or norm.momentum is not None:
        return None
    name = next((name for outer in modules for name, module in outer.named_modules() if module is norm), "")
    return (
        f"{type(norm).__name__} {name!r} with momentum=None reads how many batches it has seen",
        f"give it a number: {type(norm).__name__}({norm.num_features}, momentum=0.1)",
    )


def is_about_data(error: CaptureError) -> bool:
    """Whether tracing failed since code asked for a tensor's value."""
    return error.found.startswith(_ABOUT_DATA)


def users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Where the user's code is: the innermost frame outside torch and this package."""
    ours = ("/torch/", "/crossfade/capture/")
    users = [frame for frame in frames if frame.line and not any(part in frame.filename for part in ours)]
    return f" at {users[-1].filename}:{users[-1].lineno}: `{users[-1].line}`" if users else ""


def _drop_profiler_marks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)
