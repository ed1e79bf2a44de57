"""What a capture bakes into a graph: when any of it changes, the program is captured anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str)


def baked_in(module: nn.Module) -> tuple[Any, ...]:
    """What a module's forward bakes into a graph: its own numbers, words and switches (dropout's p, training), which
    parameters it has, and the shapes of its buffers. Asked at every step, so without walking the tree of modules."""
    plain = [item for item in vars(module).items() if type(item[1]) in _PLAIN]
    parameters = [(id(p), p.requires_grad, p.dtype) for p in module._parameters.values() if p is not None]
    buffers = [(b.shape, b.dtype) for b in module._buffers.values() if b is not None]
    return tuple(plain), tuple(parameters), tuple(buffers)


def ambient() -> tuple[Any, ...]:
    """What torch itself bakes in: autocast and the default dtype."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return (*autocast, torch.get_default_dtype())
