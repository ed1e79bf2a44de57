"""Hosts on one machine: network namespaces joined by rate-limited links, one torchrun node in each. Needs root.

with two_hosts("1gbit") as hosts:
    hosts.torchrun("benchmarks.step", "--worker")

Two are joined by one link; more by a switch, to which each has a link of that rate in either direction.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossfade.ranks.launch import KEEPS_MEMORY

_NAMES = ("crossfade1", "crossfade2")
_SWITCH = "crossfade0"
_PROBE = f"crossfade-probe-{os.getpid()}"
_LINKS = ("cfveth1", "cfveth2")
_ADDRESSES = ("10.79.0.1", "10.79.0.2")
_SUBNET = "10.79.0.0/24"
_CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this machine's is. BBR lets next to nothing through a connection for 0.2 s in 10, which
hits contenders by chance, and most those that have connections to themselves and a turn every 10 s."""


@dataclass(frozen=True)
class Hosts:
    """Namespaces that see each other over their links."""

    rate: str
    count: int = 2

    def torchrun(self, module: str, *arguments: str, timeout: float = 900.0) -> None:
        """Run a module under torchrun with one rank on each host; all end together."""
        port = str(random.randint(20000, 50000))
        processes = [self._start(node, port, module, arguments) for node in range(self.count)]
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"the hosts ended with exit codes {codes}")

    def _start(self, node: int, port: str, module: str, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", f"crossfade{node + 1}", sys.executable, "-m", "torch.distributed.run"]
        command += [
            f"--nnodes={self.count}",
            f"--node-rank={node}",
            "--nproc-per-node=1",
            f"--master-addr={_ADDRESSES[0]}",
        ]
        command += [f"--master-port={port}", "-m", module, *arguments]
        own = {"GLOO_SOCKET_IFNAME": f"cfveth{node + 1}", "OMP_NUM_THREADS": "1"}
        environment = {**KEEPS_MEMORY, **os.environ, **own}  # for all contenders alike
        return subprocess.Popen(command, env=environment)


def reason_against() -> str | None:
    """Why two hosts cannot be had on this machine, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (Debian: iproute2)"
    probe = subprocess.run(["ip", "netns", "add", _PROBE], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", _PROBE], capture_output=True, check=False)
    return f"namespaces cannot be made here: {probe.stderr.strip()}" if probe.returncode else None


@contextlib.contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[Hosts]:
    """Set up two namespaces whose link is limited to `rate` in each direction; removed at the end."""
    _remove()
    try:
        for name in _NAMES:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", _LINKS[0], "type", "veth", "peer", "name", _LINKS[1])
        for name, link, address in zip(_NAMES, _LINKS, _ADDRESSES, strict=True):
            _run("ip", "link", "set", link, "netns", name)
            _connect(name, link, address)
            _limit(name, link, rate)
        yield Hosts(rate)
    finally:
        _remove()


@contextlib.contextmanager
def hosts_on_a_switch(count: int, rate: str = "1gbit") -> Iterator[Hosts]:
    """Set up namespaces joined by a switch, each link limited to `rate` in each direction; removed at the end."""
    names = [f"crossfade{number}" for number in range(count + 1)]
    _remove(names)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", _SWITCH, "link", "add", "cfswitch", "type", "bridge")
        _run("ip", "-n", _SWITCH, "link", "set", "cfswitch", "up")
        for number, name in enumerate(names[1:], start=1):
            link, port = f"cfveth{number}", f"cfport{number}"
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", port)
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "link", "set", port, "netns", _SWITCH)
            _run("ip", "-n", _SWITCH, "link", "set", port, "master", "cfswitch", "up")
            _connect(name, link, f"10.79.0.{number}")
            _limit(name, link, rate)
            _limit(_SWITCH, port, rate)
        yield Hosts(rate, count)
    finally:
        _remove(names)


def _connect(name: str, link: str, address: str) -> None:
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
    _run("ip", "-n", name, "link", "set", link, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "route", "replace", _SUBNET, "dev", link, "congctl", _CONGESTION_CONTROL)


def _limit(name: str, link: str, rate: str) -> None:
    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", *limit)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _remove(names: Sequence[str] = _NAMES) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
