"""Machines by name, for when none was measured: `crossfade calibrate` on the real one is always better.

Every number says in its machine's `source` where it comes from: measured, a vendor's specification, or assumed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from crossfade.cost.machine import ANY_AXIS, Fabric, Launching, Link, Machine
from crossfade.cost.machine_parts import HostLink
from crossfade.cost.network import Network, Wire, routed
from crossfade.cost.products import Products
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind

GBIT = 1e9 / 8
GB = 1e9
TERA = 1e12

_TCP_SHARE = 1448 / 1538
"""Payload of a full Ethernet frame of 1538 bytes on the wire: headers of Ethernet, IP and TCP take the rest."""


def preset(name: str) -> Machine:
    """The machine of this name; an unknown one is answered with the nearest.

    >>> preset("ethernet-1gbit").collective_seconds(Kind.ALL_REDUCE, 60_200_000, ranks=2)
    0.5302...
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        raise MachineError(
            f"there is no machine named {name!r}",
            expected=f"one of {', '.join(PRESETS)}",
            remedy=f"did you mean {near[0]}" if near else "take one of them, or measure your own: crossfade calibrate",
        )
    return PRESETS[name]


def _links(bandwidth: float, latency: float, **others: float) -> dict[Kind, Link]:
    """One link for all kinds, with another bandwidth for those named."""
    return {kind: Link(latency, others.get(kind, bandwidth)) for kind in Kind}


_SERVER_CPU = {
    "flops": {"float32": 1.2e11, "bfloat16": 4.5e11, "float16": 1.2e11, "float64": 5.6e10},
    "memory_bandwidth": 1.6e10,
    "overhead": 1.5e-6,
    "host": HostLink(1.5e-6, 8e9, apart=False),
}
_SERVER_CPU_SOURCE = (
    "computation measured by crossfade calibrate, 2026-11-16: one core a rank of an x86 server CPU with AVX-512 and "
    "AMX, torch 2.13; the computing thread copies to other memory itself, and reads and writes for it"
)

_HOPPER_FLOPS = {"float32": 51 * TERA, "bfloat16": 760 * TERA, "float16": 750 * TERA, "float64": 62 * TERA}
_HOPPER_SOURCE = (
    "matrix products of random numbers measured by crossfade calibrate on one H200, 2026-11-16, torch 2.11, float32 "
    "without TF32: 77% of the 989.4 TFLOP/s of dense bf16 in the data sheet of NVIDIA's H100 SXM5, which has the same "
    "cores"
)
_KERNEL_SECONDS = 1.6e-6
_KERNEL_SOURCE = "a small kernel behind others takes 1.6 us (measured likewise)"
_NVLINK = Fabric(_links(450 * GB * 0.8, latency=8e-6), launch=5e-6, slows_compute=0.1)
_NVLINK_SOURCE = (
    "NVLink 4: 450 GB/s each way for each GPU; assumed: NCCL's bus bandwidth is 80% of that, 8 us a step, 5 us to "
    "launch, and its kernels slow computation down by a tenth"
)

_PCIE_5 = HostLink(1e-5, 63 * GB * 0.85)
_PCIE_5_SOURCE = "PCIe 5.0 x16 to the host: 63 GB/s each way; assumed: pinned copies reach 85% of it, 10 us to start"
_PCIE_4 = HostLink(1e-5, 31.5 * GB * 0.8)
_PCIE_4_SOURCE = "PCIe 4.0 x16 to the host: 31.5 GB/s each way; assumed: pinned copies reach 80% of it, 10 us to start"


def _loopback() -> Machine:
    links = {
        Kind.ALL_REDUCE: Link(3.2e-4, 6.8e8),
        Kind.ALL_GATHER: Link(1.5e-4, 8.2e8),
        Kind.REDUCE_SCATTER: Link(3.8e-4, 5.5e8),
        Kind.ALL_TO_ALL: Link(1.6e-4, 1.6e9),
        Kind.BROADCAST: Link(1.8e-4, 2.8e9),
    }
    return Machine(
        "loopback-gloo",
        {ANY_AXIS: Fabric(links, launch=5e-5, slows_compute=0.6)},
        **_SERVER_CPU,  # type: ignore[arg-type]
        source=f"two gloo ranks on the two cores of one host, measured likewise; {_SERVER_CPU_SOURCE}",
    )


def _gloo_ethernet(name: str, all_reduce: float, slows_compute: float, source: str) -> Machine:
    """Gloo over a network: kinds differ as they did when measured at 1 Gbit/s."""
    others = {"all_gather": 114.0 / 113.6, "reduce_scatter": 56.8 / 113.6, "all_to_all": 116.7 / 113.6}
    links = _links(all_reduce, 3e-4, **{kind: all_reduce * share for kind, share in others.items()})
    for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL):
        links[kind] = dataclasses.replace(links[kind], piece=2 * 2**20)
    fabric = Fabric(links, launch=5e-5, slows_compute=slows_compute)
    return Machine(name, {ANY_AXIS: fabric}, **_SERVER_CPU, source=f"{source}; {_SERVER_CPU_SOURCE}")  # type: ignore[arg-type]


def _ethernet_1gbit() -> Machine:
    return _gloo_ethernet(
        "ethernet-1gbit",
        113.6e6,
        0.2,
        "two gloo ranks over links of 1 Gbit/s, measured 2026-11-15: 60.2 MB all-reduced in 530 ms, gathered in 264 "
        "(in pieces of 1 MB), reduce-scattered in 530 (gloo's own moves as much as its all-reduce), exchanged "
        "all-to-all in 258; 389 small all-reduces in flight together took 0.3 ms each beyond their bytes; 90 ms of a "
        "core for each 60 MB, hence slower computation; a gather of 60 MB in one piece took 411, hence pieces of 2 MB, "
        "assumed of exchanges too; "
        "broadcast is assumed to be as fast as all-reduce",
    )


def _ethernet_10gbit() -> Machine:
    return _gloo_ethernet(
        "ethernet-10gbit",
        6.7e8,
        1.0,
        f"gloo over 10 Gbit/s: the wire would carry {10 * GBIT * _TCP_SHARE / GB:.2f} GB/s, but gloo takes 90 ms of a "
        "core for each 60 MB (measured at 1 Gbit/s), so that one core a rank carries 0.67 GB/s: assumed to be the "
        "limit, and to take half of a core that also computes; ratios of kinds, latency and pieces as at 1 Gbit/s",
    )


def _h100(name: str, fabrics: Mapping[str, Fabric], source: str) -> Machine:
    memory = "memory of 80 GB at 3.35 TB/s (data sheet), of which 83% are assumed, as measured on the H200"
    return Machine(
        name,
        fabrics,
        flops=_HOPPER_FLOPS,
        memory_bandwidth=3.35 * TERA * 0.83,
        overhead=_KERNEL_SECONDS,
        device="cuda",
        memory=80 * 10**9,
        source=f"{source}; {memory}; {_HOPPER_SOURCE}; {_KERNEL_SOURCE}; {_PCIE_5_SOURCE}",
        host=_PCIE_5,
    )


def _ethernet_100gbit() -> Machine:
    fabric = Fabric(_links(100 * GBIT * 0.9, latency=1.5e-5), launch=5e-6, slows_compute=0.05)
    source = (
        "hosts with an H100 each on Ethernet of 100 Gbit/s with RDMA (RoCE): 12.5 GB/s; assumed: NCCL carries 90% of "
        "that, 15 us a step, 5 us to launch, computation 5% slower"
    )
    return _h100("ethernet-100gbit", {ANY_AXIS: fabric}, source)


def _h100_node() -> Machine:
    return _h100("h100-nvlink-node", {ANY_AXIS: _NVLINK}, f"eight H100 in one node; {_NVLINK_SOURCE}")


def _h200_node() -> Machine:
    memory = "memory of 141 GB at 4.8 TB/s (data sheet), of which additions reached 4.0 (measured likewise)"
    return Machine(
        "h200-nvlink-node",
        {ANY_AXIS: _NVLINK},
        flops=_HOPPER_FLOPS,
        memory_bandwidth=4.0 * TERA,
        overhead=_KERNEL_SECONDS,
        device="cuda",
        memory=141 * 10**9,
        source=f"eight H200 in one node; {memory}; {_HOPPER_SOURCE}; {_KERNEL_SOURCE}; {_NVLINK_SOURCE}; "
        f"{_PCIE_5_SOURCE}",
        host=_PCIE_5,
    )


def _infiniband() -> Machine:
    between = Fabric(_links(400 * GBIT * 0.9, latency=1.2e-5), launch=5e-6, slows_compute=0.1)
    source = (
        "nodes of H100s, one port of InfiniBand NDR (400 Gbit/s, 50 GB/s) for each GPU; assumed: NCCL carries 90% of "
        f"that, 12 us a step; the axis tp lies inside a node, every other between nodes; {_NVLINK_SOURCE}"
    )
    return _h100("infiniband-cluster", {ANY_AXIS: between, "tp": _NVLINK}, source)


def _pcie_node() -> Machine:
    return Machine(
        "pcie-node",
        {ANY_AXIS: Fabric(_links(31.5 * GB * 0.6, latency=1.5e-5), launch=5e-6, slows_compute=0.1)},
        flops={
            "float32": 91.6 * TERA * 0.7,
            "bfloat16": 362.05 * TERA * 0.7,
            "float16": 362.05 * TERA * 0.7,
            "float64": 1.43 * TERA * 0.7,
        },
        memory_bandwidth=864 * GB * 0.83,
        overhead=_KERNEL_SECONDS,
        device="cuda",
        memory=48 * 10**9,
        source="NVIDIA L40S data sheet: 362 TFLOP/s dense bf16 and fp16, 91.6 fp32, a 64th of that fp64, GDDR6 at 864 "
        "GB/s, 48 GB, PCIe 4.0 x16 at 31.5 GB/s each way; assumed: large matrix products reach 70%, memory 83%, "
        "a kernel takes 1.6 us to start, NCCL reaches 60% of PCIe since neighbours share switches and host bridges, "
        f"15 us a step, computation a tenth slower; {_PCIE_4_SOURCE}",
        host=_PCIE_4,
    )


_LAUNCHED = "eager: a host takes 8 us to launch an operator (assumed), ranks' hosts differ by a tenth (assumed)"


def _cluster(
    name: str,
    network: Network,
    flops: Mapping[str, float],
    memory_bandwidth: float,
    memory: float,
    processors: int,
    peak: float,
    source: str,
    host: tuple[HostLink, str],
) -> Machine:
    """Nodes of eight GPUs: fabrics follow from where the ranks of an axis lie (`Machine.on_mesh`)."""
    return Machine(
        name,
        {ANY_AXIS: Fabric(dict.fromkeys(Kind, routed(network)), launch=5e-6, slows_compute=0.05)},
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        overhead=2e-6,
        device="cuda",
        memory=int(memory),
        source=f"{source}; assumed: 80% of the memory's bandwidth, a kernel takes 2 us beyond its bytes, collectives "
        f"slow computation down by a twentieth, a tile of half the size reaches 85% of the rate; {_LAUNCHED}; "
        f"{host[1]}",
        host=host[0],
        network=network,
        products=Products(processors, peak=peak),
        launching=Launching(8e-6, 0.1),
    )


_A100_SOURCE = (
    "NVIDIA A100 80 GB SXM data sheet: 312 TFLOP/s dense bf16 and fp16, 2.039 TB/s, 108 processors, NVLink 300 GB/s "
    "each way; assumed: full waves of large tiles reach 85%; network inside a node as in the NCCL all-reduces of "
    "benchmarks/published (start 25 us, 4 us a step, 280 GB/s, one pass at 600 GB/s)"
)
_A100_FLOPS = {"float16": 265 * TERA, "bfloat16": 265 * TERA, "float32": 17 * TERA, "float64": 17 * TERA}


def _a100(name: str, between: float, source: str) -> Machine:
    network = Network(8, Wire(4e-6, 280 * GB), Wire(1e-5, between), start=2.5e-5, copy=600 * GB)
    return _cluster(name, network, _A100_FLOPS, 2.039 * TERA * 0.8, 80e9, 108, 312 * TERA, f"{source}; {_A100_SOURCE}",
                    (_PCIE_4, _PCIE_4_SOURCE))  # fmt: skip


def _a100_node() -> Machine:
    return _a100("a100-node", 12.5 * GB, "eight A100 in one node")


def _a100_cluster() -> Machine:
    return _a100("a100-cluster", 12.5 * GB * 0.85, "nodes of eight A100, 800 Gbit/s between nodes (100 for each GPU)")


_H100_RATES = {
    "float8_e4m3fn": 1300 * TERA,
    "bfloat16": 680 * TERA,
    "float16": 680 * TERA,
    "float32": 51 * TERA,
    "float64": 51 * TERA,
}


def _hopper(
    name: str, between: float, memory_bandwidth: float, memory: float, source: str, *, clock: float = 1.0
) -> Machine:
    network = Network(8, Wire(3e-6, 370 * GB), Wire(1e-5, between), start=2e-5, copy=1200 * GB)
    rates = {dtype: rate * clock for dtype, rate in _H100_RATES.items()}
    return _cluster(
        name, network, rates, memory_bandwidth, memory, 132, 989.4 * TERA,
        f"{source}; 132 processors; assumed: 69% of the data sheet's 989 TFLOP/s of bf16 for full waves in long runs "
        "(clocks fall under load; short runs measured 77%), 1300 of fp8's 1979; NCCL reaches 370 of NVLink's 450 GB/s "
        "each way",
        (_PCIE_5, _PCIE_5_SOURCE),
    )  # fmt: skip


def _h100_cluster() -> Machine:
    return _hopper("h100-cluster", 45 * GB, 3.35 * TERA * 0.8, 80e9,
                   "nodes of eight H100 SXM5 of 80 GB at 3.35 TB/s, 400 Gbit/s of InfiniBand or RoCE for each GPU "
                   "(90% assumed)")  # fmt: skip


def _h100_96() -> Machine:
    return _hopper("h100-96gb-cluster", 45 * GB, 2.4 * TERA * 0.85, 96e9,
                   "nodes of eight H100 of 96 GB of HBM2e at 2.4 TB/s, 400 Gbit/s of RDMA for each GPU (90% assumed); "
                   "500 W instead of 700, with which the clock is assumed to keep 85% under load: power beyond some "
                   "130 W at rest grows with its power of 2.4", clock=0.85)  # fmt: skip


def _h200_cluster() -> Machine:
    return _hopper("h200-cluster", 45 * GB, 4.8 * TERA * 0.83, 141e9,
                   "nodes of eight H200 of 141 GB at 4.8 TB/s (83% as measured), 400 Gbit/s for each GPU")  # fmt: skip


_MAKERS = (_loopback, _ethernet_1gbit, _ethernet_10gbit, _ethernet_100gbit, _h100_node, _h200_node, _infiniband,
           _pcie_node, _a100_node, _a100_cluster, _h100_cluster, _h100_96, _h200_cluster)  # fmt: skip

PRESETS: Mapping[str, Machine] = {machine.name: machine for machine in (make() for make in _MAKERS)}
"""All machines, by name."""
