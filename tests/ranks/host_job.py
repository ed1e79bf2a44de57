"""What each host runs in test_hosts.py, under torchrun: train, and write the losses where the test finds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.ranks.cases import train_crossfade

if __name__ == "__main__":
    dist.init_process_group("gloo")
    trained = train_crossfade("mlp", dist.get_world_size())
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(trained.losses))
    dist.barrier()
    dist.destroy_process_group()
