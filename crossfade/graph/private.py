"""Every private torch import of the package, each with its reason and the torch versions it is known on.

Public replacements are welcome: delete the line here when torch grows one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "default_store",
    "dispatch_functionalize",
    "mark_optimizer_stepped",
    "preserve_source_lines",
    "symbolic_float",
    "symbolic_shapes",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
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
    """The key-value store that the default process group met on; torch offers no public way to it. Known on 2.11, 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


@contextlib.contextmanager
def preserve_source_lines() -> Iterator[None]:
    """Let nodes traced in autograd's backward carry the line of their forward. Known on 2.11, 2.13."""
    import torch.fx.traceback as traceback

    with traceback.preserve_node_meta():
        yield


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, or they warn at each step. Known on 2.11, 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


Traced = Callable[..., Any]
