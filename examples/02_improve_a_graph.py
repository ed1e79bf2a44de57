"""Improve a graph that already has collectives, as make_fx or torch.compile produce it. Needs no ranks."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.graph import collectives


def backward(x: torch.Tensor) -> list[torch.Tensor]:
    """Three gradients, each exchanged and waited for where it is computed."""
    gradients = [x.sin(), x.cos(), x.exp()]
    return [collectives.wait(collectives.all_reduce(gradient, "sum", "0")) for gradient in gradients]


module = make_fx(backward, tracing_mode="fake")(torch.ones(4))
improved = cf.optimize(module, groups={"0": 2})
improved.report.show()
improved.module.print_readable()
