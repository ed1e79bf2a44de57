"""Gathers by copy engines, by 2 and 4 processes on one GPU, against what gloo gathers on the host, bit for bit.

The processes meet over gloo, and torch is told to let them share a device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import crossfade as cf
from crossfade.communicate.gather_by_copy_engines import GatherByCopyEngines
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.copy_engines import all_gather_by_copy_engines
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse

pytestmark = pytest.mark.gpu


def group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def part(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of this rank on the device."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    numbers = torch.randint(-100, 100, shape, generator=generator)
    return (numbers % 2 == 0 if dtype is torch.bool else numbers).to(dtype).cuda()


def gathered_on_the_host(x: Tensor) -> Tensor:
    """What plain all-gathers give, of bytes."""
    plain = x.contiguous().cpu()
    parts = [torch.empty_like(plain.view(torch.uint8)) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, plain.view(torch.uint8))
    return torch.cat([found.view(x.dtype) for found in parts])


def is_wrong(case: str, found: Tensor, x: Tensor) -> list[str]:
    expected = gathered_on_the_host(x)
    same = found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    alike = same and torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    return [] if alike else [f"{case}: {found.dtype} {list(found.shape)}, the same numbers: {same}"]


def gathers() -> list[str]:
    """One after another, in memory that grows, of every kind of number, laid out in any way."""
    torch.cuda.set_device(0)
    ranks, found = dist.get_world_size(), []
    kinds = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool, torch.complex64)
    for seed, dtype in enumerate(kinds):
        for rows in (3, 1024):
            x = part([rows, 8], dtype, seed)
            found += is_wrong(
                f"{dtype}, {rows} rows", collectives.wait(all_gather_by_copy_engines(x, ranks, group())), x
            )
    whole = part([64, 8], torch.float32, 20)
    for case, x in (("columns first", whole.t()), ("from the middle", whole[7:31])):
        found += is_wrong(case, collectives.wait(all_gather_by_copy_engines(x, ranks, group())), x)
    return found


def memory_of_inputs() -> list[str]:
    """What a gather reads is not overwritten though nobody else holds it, while the device is kept busy."""
    torch.cuda.set_device(0)
    ranks, found, size = dist.get_world_size(), [], [2048, 2048]
    for seed in range(8):
        x = part(size, torch.float32, seed)
        kept = x.clone()
        torch.cuda.synchronize()
        busy = torch.ones(size, device="cuda")
        for _ in range(10):
            busy = busy @ busy * 0
        started = all_gather_by_copy_engines(x + busy, ranks, group())
        others = [torch.full(size, -1.0, device="cuda") for _ in range(4)]
        found += is_wrong(f"turn {seed}", collectives.wait(started), kept)
        del others
    return found


PROGRAM = """
x: f32[1024, 1024] = input("x")
w: f32[{rows}, 1024] = parameter("w")
s: f32[1024, 1024] = c10d.all_gather_into_tensor(w, {ranks}, "dp")
mm: f32[1024, 1024] = aten.mm(x, x)
g: f32[1024, 1024] = c10d.wait_tensor(s)
y: f32[1024, 1024] = aten.mm(mm, g)
return output("g", g), output("y", y)
"""


def programs() -> list[str]:
    """A program with the pass and without it, several times."""
    torch.cuda.set_device(0)
    ranks = dist.get_world_size()
    before = parse(PROGRAM.format(rows=1024 // ranks, ranks=ranks), groups={"dp": ranks})
    after = run_passes(before, [GatherByCopyEngines(least_mb=0.1)])
    assert after.history[0].counts == {"replaced": 1, "left": 0}
    run, found = Executable(after, {"dp": group()}), []
    x = torch.randint(-1, 2, [1024, 1024], generator=torch.Generator().manual_seed(0)).float().cuda()
    for seed in range(3):
        w = part([1024 // ranks, 1024], torch.float32, seed) % 2
        whole, y = run([x, w])
        found += is_wrong(f"the gather of turn {seed}", whole, w)
        found += [] if torch.equal(y, x @ x @ gathered_on_the_host(w).cuda()) else [f"the product of turn {seed}"]
    return found


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Any:
    """Processes that share the first GPU; the setting must be there before they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        with cf.Ranks(request.param, timeout=240) as ranks:
            yield ranks


@pytest.mark.ranks
@pytest.mark.parametrize("tried", [gathers, memory_of_inputs, programs], ids=lambda tried: tried.__name__)
def test_gathers_by_copy_engines(world: cf.Ranks, tried: Any) -> None:
    assert world.run(tried) == [[]] * world.count
