"""Every private torch import of the package, each with its reason and the torch versions it is known on.

Public replacements are welcome: delete the line here when torch grows one.
"""

from __future__ import annotations

from typing import Any

import torch

# FakeTensorMode: tensors without data; torch.export and torch.compile stand on it. Known on 2.11, 2.13.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# dispatch_functionalize: rewrites mutation into values while tracing, with autograd inside
# (the public torch.func.functionalize forbids autograd inside). Known on 2.11, 2.13.
from torch._subclasses.functional_tensor import dispatch_functionalize

# TorchDispatchMode: sees every ATen call of a function; how spliced functions are recorded. Known on 2.11, 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

# pytree: nested containers of user inputs; torch.utils.pytree is not public on 2.11. Known on 2.11, 2.13.
from torch.utils._pytree import keystr as tree_keystr
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "default_store",
    "dispatch_functionalize",
    "has_hooks",
    "has_step_hooks",
    "mark_optimizer_stepped",
    "swapped_state",
    "symbolic_float",
    "symbolic_shapes",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_keystr",
    "tree_map_only",
    "tree_unflatten",
    "unwrapped_operator",
]


def symbolic_shapes() -> Any:
    """A fresh ShapeEnv that also lets `.item()` become a graph value. Known on 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(allow_scalar_outputs=True)


def symbolic_float(env: Any, name: str, value: float) -> Any:
    """A SymFloat that stays a graph input, for learning rates. Known on 2.11, 2.13."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def default_store() -> Any:
    """The key-value store the default process group met on, which torch does not offer. Known on 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, or they warn at each step. Known on 2.11, 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def unwrapped_operator(operator: torch._ops.OpOverload) -> Any:
    """The C++ function inside an operator: calling it saves a Python frame for each node. Known on 2.11, 2.13."""
    return operator._op


def swapped_state(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> Any:
    """Run a model on other parameters and buffers for a while; `state` then holds what it left. Known on 2.11, 2.13."""
    from torch.nn.utils import stateless

    return stateless._reparametrize_module(model, state, tie_weights=True)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user put gradient hooks on a parameter. Known on 2.11, 2.13."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user put hooks around the optimizer's step. Known on 2.11, 2.13."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
