"""Several hosts: torchrun in two network namespaces joined by a rate-limited link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import network
from tests.ranks.cases import train_eager


@pytest.mark.ranks
@pytest.mark.skipif(network.reason_against() is not None, reason=str(network.reason_against()))
def test_two_hosts_under_torchrun_equal_one_device(tmp_path: Path) -> None:
    with network.two_hosts("1gbit") as hosts:
        hosts.torchrun("tests.ranks.host_job", str(tmp_path), timeout=100)
    losses = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert losses[0] == losses[1] == pytest.approx(train_eager("mlp").losses, rel=2e-5)
