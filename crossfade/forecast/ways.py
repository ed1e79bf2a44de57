"""Ways to run a model on many ranks: Crossfade's own and those of others, each a small list of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.errors import MeshError
from crossfade.forecast.recompute_layers import RecomputeLayers
from crossfade.forecast.shard_layers import ShardLayers
from crossfade.graph.passes import Pass
from crossfade.shard.average_gradients import AverageGradients

DATA_AXIS = "dp"


@dataclass(frozen=True)
class Way:
    """How gradients and parameters are kept and exchanged over so many ranks: passes, and what they need kept.

    `held` is what a rank keeps of each parameter beside its gradient and the optimizer's state, in parts where
    `split`; with `after`, gradients are all-reduced in one piece after the backward, and no pass does it.
    """

    name: str
    says: str
    passes: Callable[[int, str, bool], list[Pass]]
    """The passes for so many ranks, by the type of their devices and whether parameters are kept in float32."""
    split: bool = False
    after: bool = False
    planned: bool = False
    buckets: bool = False
    """Whether buckets for all gradients lie beside these as long as training goes."""


def _ddp(ranks: int, device: str, master: bool) -> list[Pass]:
    return [AverageGradients(DATA_AXIS), BucketAllReduces(cap_mb=25.0, first_mb=1.0), SinkWaits()]


def _megatron_bucketed(ranks: int, device: str, master: bool) -> list[Pass]:
    return [AverageGradients(DATA_AXIS), BucketAllReduces(cap_mb=80.0), SinkWaits()]


def _fsdp(ranks: int, device: str, master: bool, reshard: bool = True) -> list[Pass]:
    """FSDP2 waits for each collective where it starts it if parameters are on CPUs."""
    precision = "float32" if master else ""
    return [ShardLayers(DATA_AXIS, ranks, reshard, precision, precision, ahead=device != "cpu")]


def _fsdp_kept(ranks: int, device: str, master: bool) -> list[Pass]:
    return _fsdp(ranks, device, master, reshard=False)


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way("ddp", "replicated; gradients all-reduced in buckets of 25 MB while the backward runs (torch's DDP)", _ddp,
            buckets=True),
        Way("fsdp", "parameters in parts, each layer's gathered one layer ahead, dropped and gathered again (FSDP2)",
            _fsdp, split=True),
        Way("fsdp-kept", "the same, but gathered once and kept for the backward",
            _fsdp_kept, split=True),
        Way("megatron", "replicated; gradients all-reduced in one piece after the backward",
            lambda ranks, device, master: [], after=True),
        Way("megatron-bucketed", "replicated; gradients all-reduced in large buckets while the backward runs",
            _megatron_bucketed),
        Way("crossfade", "replicated; buckets and order planned for the machine by simulation",
            lambda ranks, device, master: [AverageGradients(DATA_AXIS)], planned=True),
    )
}  # fmt: skip
"""All ways, by name."""


def way_named(name: str) -> Way:
    """The way of this name; an unknown one is answered with those there are.

    >>> way_named("ddp").says[:10]
    'replicated'
    """
    if name not in WAYS:
        raise MeshError(f"there is no way to run named {name!r}", expected=f"one of {', '.join(WAYS)}",
                        remedy="pass one of them as way=")  # fmt: skip
    return WAYS[name]


def recomputation(kind: str) -> list[Pass]:
    """Passes that compute layers' forwards again: `none`, `full`, or `selective`.

    >>> [step.spelling for step in recomputation("selective")]
    ["recompute-layers(keep='products')"]
    """
    known: dict[str, list[Pass]] = {
        "none": [],
        "full": [RecomputeLayers()],
        "selective": [RecomputeLayers(keep="products")],
    }
    if kind not in known:
        raise MeshError(f"recompute={kind!r}", expected=f"one of {', '.join(known)}", remedy="pass one of them")
    return known[kind]
