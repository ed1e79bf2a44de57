"""Prove that ranks fit together before they run, and fail where an optimisation is missing. Needs no ranks."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.errors import StrictError
from crossfade.graph import collectives
from crossfade.graph.program import from_graph_module


def backward(x: torch.Tensor) -> list[torch.Tensor]:
    """Two gradients, one exchanged with each group."""
    return [collectives.wait(collectives.all_reduce(x.sin(), "sum", group)) for group in ("dp", "tp")]


def in_another_order(x: torch.Tensor) -> list[torch.Tensor]:
    """The same gradients, the other group first."""
    return [collectives.wait(collectives.all_reduce(x.sin(), "sum", group)) for group in ("tp", "dp")]


first, second = (
    from_graph_module(make_fx(order, tracing_mode="fake")(torch.ones(4))) for order in (backward, in_another_order)
)
everyone = {"dp": (0, 1), "tp": (0, 1)}
print(cf.check_compatible([first, first], everyone))
print(cf.check_compatible([first, second], everyone))


def exchanges(x: torch.Tensor) -> list[torch.Tensor]:
    """Three gradients of 4 MB."""
    return [collectives.wait(collectives.all_reduce(x * number, "sum", "dp")) for number in range(3)]


module = make_fx(exchanges, tracing_mode="fake")(torch.ones(1024, 1024))
try:
    cf.optimize(module, groups={"dp": 2}, strict="bucketed:all")
except StrictError as error:
    print(error)
larger = [BucketAllReduces(cap_mb=16, first_mb=16)]  # as the remedy says
print(cf.optimize(module, groups={"dp": 2}, passes=larger, strict="bucketed:all").report)
