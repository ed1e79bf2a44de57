"""Save a split model once, then serve it: every rank loads the program and its own weights, and decodes in a loop.

crossfade launch --ranks 2 examples/08_serve_sharded.py
"""

import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import crossfade as cf

WIDTH, HEADS, WORDS = 64, 4, 128


class Decoder(nn.Module):
    """One layer that reads a token and a cache of earlier keys and values, and returns both longer by one."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, token: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.token(token)
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.out(mixed)), k, v


def empty_cache(heads: int, length: int = 1) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, heads, length, WIDTH // HEADS), torch.zeros(1, heads, length, WIDTH // HEADS)


def save(folder: str, mesh: dict[str, int], rank: int) -> None:
    """Usually another program, on one machine: `crossfade shard` does this for all ranks."""
    torch.manual_seed(0)
    length = torch.export.Dim("length", max=1024)
    shapes = (None, {2: length}, {2: length})
    exported = torch.export.export(Decoder(), (torch.tensor([[1]]), *empty_cache(HEADS, 2)), dynamic_shapes=shapes)
    plan = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
    by_head = Shard(1)
    inputs, outputs = {"past_k": by_head, "past_v": by_head}, {1: by_head, 2: by_head}
    cf.shard(exported, mesh, plan, rank=rank, inputs=inputs, outputs=outputs).save(folder)


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
save(folder[0], {"tp": ranks}, rank)
dist.barrier()

sharded = cf.Sharded.load(folder[0], init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
step = sharded.module()
token, cache = torch.tensor([[1]]), empty_cache(HEADS // ranks)
said = []
began = time.perf_counter()
with torch.no_grad():
    for _ in range(20):
        logits, *cache = step(token, *cache)
        token = logits[:, -1:].argmax(-1)
        said.append(int(token))
seconds = time.perf_counter() - began

everywhere = [None] * ranks
dist.all_gather_object(everywhere, said)
if rank == 0:
    print(f"each rank keeps {tuple(cache[0].shape)} of the keys; collectives of a step: {sharded.collectives()}")
    print(f"{len(said)} tokens in {seconds * 1e3:.0f} ms: {said}")
assert everywhere == [said] * ranks
dist.destroy_process_group()
