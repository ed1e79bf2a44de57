"""Products fused through symmetric memory, by 2 and 4 processes on one GPU, against products of whole tensors.

The processes meet over gloo, and torch is told to let them share a device. Operands are -1, 0 and 1, so that every sum
is exact, in whatever order pieces are added.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import crossfade as cf
import crossfade.collective_matmul
from crossfade.errors import NotYetError
from crossfade.graph.collective_matmul import gather_matmul, matmul_scatter, matmul_scatter_meanwhile, read_product
from crossfade.graph.private import symmetric_products

pytestmark = pytest.mark.gpu


def numbers(shape: list[int], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """-1, 0 and 1 on the device, the same in every process."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def exact(product: str, first: Tensor, second: Tensor) -> Tensor:
    return torch.einsum(str(read_product(product)), first.double(), second.double())


def settings(dim: int, chunks: int = 1) -> dict[str, Any]:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return {"dim": dim, "ranks": dist.get_world_size(), "group": group, "form": "symmetric", "chunks": chunks}


def wrong(case: str, found: Tensor, expected: Tensor) -> list[str]:
    """What is wrong with a result, if anything."""
    if found.shape != expected.shape or found.dtype != expected.dtype or not found.is_contiguous():
        return [f"{case}: {found.dtype} {list(found.shape)}, strides {list(found.stride())}"]
    if not torch.equal(found, expected):
        return [f"{case}: differs by {float((found.double() - expected.double()).abs().max())}"]
    return []


def gathers() -> list[str]:
    """Gathers along every dim that this torch knows, with one and three products, a bias, and the whole tensor."""
    torch.cuda.set_device(0)
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    for product, shape in (("mk,kn->mn", [128, 64]), ("bsk,kn->bsn", [4, 64, 32])):
        for dim in range(len(shape) if symmetric_products().gathers_last_dim else len(shape) - 1):
            parts = [numbers(shape, 10 + one) for one in range(ranks)]
            whole = torch.cat(parts, dim)
            for count in (1, 3):
                others = [numbers([whole.shape[-1], 32 * (1 + index)], 20 + index) for index in range(count)]
                biases = [numbers([32], 30), None, None][:count]
                keep = count == 1
                results = gather_matmul(
                    parts[rank], others, [product] * count, biases=biases, keep=keep, **settings(dim)
                )
                case = f"{product} along {dim}, {count} products"
                for index, other in enumerate(others):
                    expected = exact(product, whole, other)
                    expected = expected if biases[index] is None else expected + biases[index].double()  # type: ignore[union-attr]
                    found += wrong(case, results[index], expected.bfloat16())
                found += wrong(f"{case}, kept", results[-1], whole) if keep else []
    return found


def scatters() -> list[str]:
    """Scatters along every dim that this torch knows, summed and averaged, with and without a bias."""
    torch.cuda.set_device(0)
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    for product, shape in (("mk,kn->mn", [128, 64]), ("bsk,kn->bsn", [4, 64, 32])):
        for dim in range(len(shape) if symmetric_products().scatters_last_dim else len(shape) - 1):
            lefts = [numbers(shape, 10 + one) for one in range(ranks)]
            rights = [numbers([shape[-1], 64], 20 + one) for one in range(ranks)]
            for reduce_op in ("sum", "avg"):
                for bias in (None, numbers([64], 30)):
                    totals = [exact(product, left, right) for left, right in zip(lefts, rights, strict=True)]
                    total = torch.stack(totals).sum(0) + (0 if bias is None else bias.double() * ranks)
                    expected = (total / ranks if reduce_op == "avg" else total).chunk(ranks, dim)[rank]
                    result = matmul_scatter(
                        lefts[rank], rights[rank], product, reduce_op=reduce_op, bias=bias, **settings(dim)
                    )
                    case = f"{product} along {dim} by {reduce_op}, bias: {bias is not None}"
                    pair = rights[0].t(), rights[rank]
                    again, other = matmul_scatter_meanwhile(
                        lefts[rank], rights[rank], product, [pair], reduce_op=reduce_op, bias=bias, **settings(dim)
                    )
                    found += wrong(f"{case}, meanwhile", again, result)
                    found += wrong(f"{case}, what is computed meanwhile", other, exact("mk,kn->mn", *pair).bfloat16())
                    # A mean is rounded before the bias is added: exact only without one.
                    close = reduce_op == "avg" and bias is not None
                    if close:
                        torch.testing.assert_close(result, expected.bfloat16(), msg=lambda text, case=case: case + text)
                    else:
                        found += wrong(case, result, expected.bfloat16())
    return found


def scaled() -> list[str]:
    """Products of numbers of 8 bits, scaled by tensor and by row, gathered and scattered."""
    torch.cuda.set_device(0)
    ranks, rank, found, small = dist.get_world_size(), dist.get_rank(), [], torch.float8_e4m3fn
    for product, shape, dim in (
        ("mk,kn->mn", [128, 64], 0),
        ("bsk,kn->bsn", [4, 64, 32], 0),
        ("bsk,kn->bsn", [4, 64, 32], 1),
    ):
        firsts = [numbers(shape, 10 + one, small) for one in range(ranks)]
        second = numbers([64, shape[-1]], 20, small).t()
        part = firsts[0].view(torch.uint8).chunk(ranks, dim)[rank].contiguous().view(small)
        for by_rows in (False, True):
            rows = firsts[0].numel() // shape[-1]
            first_scale = 2.0 ** numbers([rows, 1] if by_rows else [], 40, torch.float32)
            second_scale = 2.0 ** numbers([1, 64] if by_rows else [], 41, torch.float32)
            scaled_rows = first_scale.double().view(*shape[:-1], 1) if by_rows else first_scale.double()
            wholes = [exact(product, one.double() * scaled_rows, second.double() * second_scale) for one in firsts]
            scales = [first_scale, second_scale]
            case = f"{product} along {dim}, by rows: {by_rows}"
            (gathered,) = gather_matmul(part, [second], [f"{product} bfloat16"], scales=scales, **settings(dim))
            found += wrong(f"gathered {case}", gathered, wholes[0].bfloat16())
            scattered = matmul_scatter(firsts[rank], second, f"{product} bfloat16", scales=scales, **settings(dim))
            expected = torch.stack([one.bfloat16() for one in wholes]).double().sum(0).chunk(ranks, dim)[rank]
            found += wrong(f"scattered {case}", scattered, expected.bfloat16())
    return found


def refusals() -> list[str]:
    """What the forms say of what they cannot do on this device."""
    torch.cuda.set_device(0)
    part, said = numbers([64, 64], 0), []
    for product, form, given in (
        ("km,kn->mn", "symmetric", part),
        ("mk,kn->mn", "symmetric", part.t()),
        ("mk,kn->mn", "chunked", part),
        ("mk,kn->mn", "ring", part),
    ):
        try:
            other = numbers([64 * dist.get_world_size() if product.startswith("k") else 64, 64], 1)
            gather_matmul(given, [other], [product], **{**settings(0), "form": form})
            said.append("no error")
        except NotYetError as error:
            said.append(error.found)
    return said


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Any:
    """Processes that share the first GPU; the setting must be there before they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        with cf.Ranks(request.param, timeout=240) as ranks:
            yield ranks


@pytest.mark.ranks
def test_gathers_through_symmetric_memory(world: cf.Ranks) -> None:
    assert world.run(gathers) == [[]] * world.count


@pytest.mark.ranks
def test_scatters_through_symmetric_memory(world: cf.Ranks) -> None:
    assert world.run(scatters) == [[]] * world.count


@pytest.mark.ranks
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs products of 8 bits"
)
def test_scaled_products_through_symmetric_memory(world: cf.Ranks) -> None:
    assert world.run(scaled) == [[]] * world.count


@pytest.mark.ranks
def test_what_cannot_be_done_is_said(world: cf.Ranks) -> None:
    for said in world.run(refusals):
        assert said[0].startswith("the product km,kn->mn in a product fused through symmetric memory")
        assert said[1].startswith("a tensor of shape [64, 64] and strides [1, 64]")
        assert said[2] == "a product of CUDA tensors is exchanged in the form chunked over gloo"
        assert said[3] == "a product of CUDA tensors is exchanged in the form ring over gloo"
