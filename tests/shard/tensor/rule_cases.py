"""Calls of every operator that has a sharding rule, and where each goes with its first operand split.

`goes` has a letter for each dim of the first operand: the dim of the (first) result that is split if that one is, P if
the result is then a partial sum, and - if the operand is put together first.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.models import zoo

aten = torch.ops.aten
_seeded = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Case:
    """One call."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    goes: str = ""

    def __str__(self) -> str:
        shapes = [tuple(argument.shape) if isinstance(argument, Tensor) else argument for argument in self.args]
        return f"{self.target}{shapes}{self.kwargs or ''}"


def case(target: Any, *args: Any, goes: str, **kwargs: Any) -> Case:
    """A call written as it is made."""
    return Case(target, args, kwargs, goes)


def f(*shape: int) -> Tensor:
    """Floats."""
    return torch.randn(shape, generator=_seeded)


def h(*shape: int) -> Tensor:
    """Halves: small whole numbers in bfloat16, whose products and sums are exact."""
    return torch.randint(-2, 3, shape, generator=_seeded).to(torch.bfloat16)


def n(high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 up."""
    return torch.randint(high, shape, generator=_seeded)


def b(*shape: int) -> Tensor:
    """Yes or no."""
    return torch.rand(shape, generator=_seeded) < 0.5


def each(*names: str, goes: str, args: tuple[Any, ...] = ()) -> list[Case]:
    """The same call of several operators, of an 8 by 8 value."""
    return [case(getattr(aten, name).default, f(8, 8), *args, goes=goes) for name in names]


zoo.library()
importlib.import_module("transformers.integrations.moe")  # which makes an operator
_ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)

PRODUCTS = [
    case(aten.mm.default, f(8, 16), f(16, 8), goes="0P"),
    case(aten.bmm.default, f(8, 8, 16), f(8, 16, 8), goes="01P"),
    case(aten.mv.default, f(8, 16), f(16), goes="0P"),
    case(aten.dot.default, f(8), f(8), goes="P"),
    case(aten.outer.default, f(8), f(16), goes="0"),
    case(aten.linear.default, f(8, 8, 16), f(8, 16), f(8), goes="01P"),
    case(aten.linear.default, f(8, 16), f(8, 16), goes="0P"),
    case(aten.linear.default, f(16), f(8, 16), goes="P"),
    case(aten.addmm.default, f(8, 16), f(8, 8), f(8, 16), beta=0.5, alpha=2.0, goes="01"),
    case(aten.addmm.default, f(16), f(8, 8), f(8, 16), goes="1"),
    case(aten.addmm.default, f(8, 1), f(8, 8), f(8, 16), goes="0-"),
    case(aten.baddbmm.default, f(8, 8, 16), f(8, 8, 8), f(8, 8, 16), goes="012"),
    case(aten.baddbmm.default, f(1, 16), f(8, 8, 8), f(8, 8, 16), goes="-2"),
    case(aten._grouped_mm.default, h(8, 32), h(4, 32, 64), _ends, goes="-P"),
    case(aten._grouped_mm.default, h(8, 8), h(4, 8, 16), _ends, goes="--"),  # rows of 8 bytes
    case(aten._grouped_mm.default, h(4, 32, 64), h(8, 64).mT, _ends, goes="-0P"),
    case(aten._grouped_mm.default, h(8, 32).mT, h(8, 64), _ends, goes="1-"),
    case(aten._grouped_mm.default, h(4, 32, 64), h(4, 64, 32), goes="01P"),
    case(torch.ops.transformers.grouped_mm_fallback.default, f(8, 16), f(4, 16, 8), _ends, goes="-P"),
    case(aten.matmul.default, f(8, 16), f(16, 8), goes="0P"),
    case(aten.matmul.default, f(16), f(16), goes="P"),
    case(aten.matmul.default, f(16), f(8, 16, 8), goes="P"),
    case(aten.matmul.default, f(8, 8, 16), f(16), goes="01P"),
    case(aten.matmul.default, f(8, 1, 8, 16), f(8, 16, 8), goes="0-2P"),
    case(aten.einsum.default, "bij,bjk->bik", [f(8, 8, 8), f(8, 8, 16)], goes="01P"),
    case(aten.einsum.default, "ij->ji", [f(8, 16)], goes="10"),
    case(aten.einsum.default, "ii->i", [f(8, 8)], goes="--"),
    case(aten.einsum.default, "bii,i->b", [f(8, 8, 8), f(8)], goes="0--"),
    case(aten.einsum.default, "i...,i->...", [f(8, 8), f(8)], goes="P0"),
    case(aten.einsum.default, "...id,...jd", [f(8, 8, 8), f(8, 16, 8)], goes="01P"),
    case(aten.conv1d.default, f(8, 8, 12), f(16, 8, 3), f(16), goes="0P-"),
    case(aten.conv1d.default, f(8, 12), f(16, 8, 3), goes="P-"),
    case(aten.conv1d.default, f(8, 8, 12), f(8, 1, 3), f(8), [1], [2], [1], 8, goes="01-"),
    case(aten.conv1d.default, f(8, 12), f(8, 1, 3), None, [1], [0], [1], 8, goes="0-"),
    case(aten.conv1d.default, f(8, 8, 12), f(16, 4, 3), f(16), [1], [0], [1], 2, goes="01-"),
    case(aten.conv1d.default, f(8, 9, 12), f(6, 3, 3), f(6), [1], [0], [1], 3, goes="0--"),
    case(aten.conv1d.padding, f(8, 8, 12), f(16, 8, 3), None, [1], "same", goes="0P-"),
    case(aten.conv2d.default, f(8, 8, 8, 8), f(16, 8, 3, 3), f(16), [2, 2], [1, 1], goes="0P--"),
    case(aten.conv3d.default, f(8, 8, 4, 4, 4), f(8, 8, 2, 2, 2), goes="0P---"),
    case(aten.convolution.default, f(8, 8, 8), f(16, 8, 3), f(16), [1], [0], [1], False, [0], 1, goes="0P-"),
    case(aten.convolution.default, f(8, 8, 8), f(8, 16, 3), None, [1], [0], [1], True, [0], 1, goes="0P-"),
    case(aten.conv_transpose1d.default, f(8, 8, 8), f(8, 16, 3), f(16), goes="0P-"),
    case(aten.conv_transpose2d.input, f(8, 8, 4, 4), f(8, 2, 2, 2), f(8), [2], [0], [0], 4, goes="01--"),
    case(aten.conv_transpose3d.input, f(8, 4, 4, 4), f(8, 16, 2, 2, 2), goes="P---"),
]

_sdpa = aten.scaled_dot_product_attention.default
_kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION = [
    case(_sdpa, f(8, 8, 8, 8), f(8, 8, 4, 8), f(8, 8, 4, 16), goes="012-"),
    case(_sdpa, f(8, 8, 8, 8), f(8, 8, 8, 8), f(8, 8, 8, 8), is_causal=True, goes="01--"),
    case(_sdpa, f(8, 8, 8), f(8, 4, 8), f(8, 4, 8), goes="01-"),
    case(_sdpa, f(8, 8, 8), f(8, 4, 8), f(8, 4, 8), b(8, 4) | (torch.arange(4) == 0), goes="01-"),
    case(_sdpa, f(2, 8, 8, 8, 8), f(2, 8, 8, 4, 8), f(2, 8, 8, 4, 8), goes="0123-"),
    case(_sdpa, f(4, 8, 8, 8), f(4, 8, 4, 8), f(4, 8, 4, 8), None, 0.5, goes="01--"),
    case(_sdpa, f(4, 8, 8, 8), f(4, 8, 8, 8), f(4, 8, 8, 8), None, 0.5, True, goes="01--"),
    case(_sdpa, f(4, 8, 8, 8), f(4, 4, 4, 8), f(4, 4, 4, 8), f(8, 4), 0.5, enable_gqa=True, goes="01--"),
    case(_sdpa, f(8, 8, 8), f(8, 4, 8), f(8, 4, 8), b(8, 4) | (torch.arange(4) == 0), 0.5, goes="0--"),
    case(_sdpa, f(4, 8, 8, 8), f(4, 4, 4, 8), f(4, 4, 4, 8), enable_gqa=True, goes="012-"),
    case(_sdpa, f(4, 8, 8, 8), f(4, 1, 4, 8), f(4, 1, 4, 8), enable_gqa=True, goes="012-"),
    *(
        case(_sdpa, f(4, 8, 8, 8), f(4, 8, 4, 8), f(4, 8, 4, 8), f(*shape), goes="012-")
        for shape in [(4, 8, 8, 4), (1, 8, 8, 4), (4, 1, 8, 4), (1, 1, 1, 4), (4, 1, 1, 4), (8, 4), (8, 8, 4)]
    ),
    case(_sdpa, f(4, 8, 8, 8), f(4, 4, 4, 8), f(4, 4, 4, 8), f(4, 8, 8, 4), enable_gqa=True, goes="012-"),
    case(_kernel, f(8, 8, 8, 8), f(8, 8, 8, 8), f(8, 8, 8, 8), goes="01--"),
    case(_kernel, f(8, 8, 8, 8), f(8, 8, 8, 8), f(8, 8, 8, 8), 0.0, True, goes="01--"),
    case(_kernel, f(8, 8, 8, 8), f(8, 8, 8, 8), f(8, 8, 8, 8), attn_mask=f(1, 1, 8, 8), goes="01--"),
]

ALONG = [
    case(aten.softmax.int, f(8, 8), -1, goes="0-"),
    case(aten.softmax.int, f(8, 8), 0, goes="-1"),
    case(aten.softmax.int, f(), 0, goes=""),
    case(aten.log_softmax.int, f(8, 8), -1, goes="0-"),
    case(aten._softmax.default, f(8, 8), 1, False, goes="0-"),
    case(aten._log_softmax.default, f(8, 8), 1, False, goes="0-"),
    case(aten.cumsum.default, f(8, 8), 1, goes="0-"),
    case(aten.cumprod.default, f(8, 8), 1, goes="0-"),
    case(aten.topk.default, f(8, 8), 3, goes="0-"),
    case(aten.topk.default, f(8, 8), 3, 0, goes="-1"),
    case(aten.sort.default, f(8, 8), goes="0-"),
    case(aten.sort.stable, f(8, 8), stable=True, dim=0, goes="-1"),
    case(aten.argsort.default, f(8, 8), goes="0-"),
    case(aten.flip.default, f(8, 8, 8), [0, -1], goes="-1-"),
]

REDUCTIONS = [
    case(aten.sum.default, f(8, 8), goes="PP"),
    case(aten.sum.default, b(8, 8), goes="PP"),
    case(aten.sum.default, b(8, 8), dtype=torch.bool, goes="--"),
    case(aten.sum.default, f(8, 8), dtype=torch.int64, goes="PP"),
    case(aten.sum.dim_IntList, f(8, 8), [-1], goes="0P"),
    case(aten.sum.dim_IntList, f(8, 8), [0], True, goes="P1"),
    case(aten.sum.dim_IntList, f(8, 8), [0, 1], True, goes="PP"),
    case(aten.sum.dim_IntList, f(8, 8), [], goes="--"),
    case(aten.sum.dim_IntList, f(8, 8), None, goes="PP"),
    case(aten.sum.dim_IntList, f(), [0], goes=""),
    case(aten.mean.dim, f(8, 8), [-1], True, goes="0P"),
    case(aten.mean.dim, f(8, 8, 8), [0, 2], goes="P0P"),
    case(aten.mean.default, f(8, 8), goes="PP"),
    case(aten.mean.default, n(9, 8, 8), dtype=torch.float32, goes="PP"),
    *(case(getattr(aten, name).default, f(8, 8), [1], goes="0-") for name in ("amax", "amin", "logsumexp", "nansum")),
    *(case(getattr(aten, name).default, f(8, 8), goes="--") for name in ("max", "min", "prod", "var", "std", "median")),
    *(case(getattr(aten, name).dim, f(8, 8), 1, goes="0-") for name in ("max", "min", "median")),
    *(case(getattr(aten, name).dim, f(8, 8), -1, True, goes="0-") for name in ("max", "min")),
    case(aten.max.other, f(8, 8), f(8), goes="01"),
    case(aten.min.other, f(8, 8), f(8, 1), goes="01"),
    case(aten.argmax.default, f(8, 8), goes="--"),
    case(aten.argmax.default, f(8, 8), 0, True, goes="-1"),
    case(aten.argmin.default, f(8, 8), -1, goes="0-"),
    case(aten.any.dim, b(8, 8), 1, goes="0-"),
    case(aten.any.dims, b(8, 8), [1], goes="0-"),
    case(aten.any.default, b(8, 8), goes="--"),
    case(aten.all.dim, b(8, 8), 0, goes="-0"),
    case(aten.all.default, b(8, 8), goes="--"),
    case(aten.prod.dim_int, f(8, 8), 1, goes="0-"),
    case(aten.var.correction, f(8, 8), [1], correction=0, keepdim=True, goes="0-"),
    case(aten.std.correction, f(8, 8), [0], goes="-0"),
    case(aten.var_mean.correction, f(8, 8), [1], goes="0-"),
    case(aten.norm.ScalarOpt_dim, f(8, 8), 2, [1], goes="0-"),
    case(aten.linalg_vector_norm.default, f(8, 8), 2, [1], True, goes="0-"),
    case(aten.layer_norm.default, f(8, 8, 8), [8], f(8), f(8), goes="012"),
    case(aten.layer_norm.default, f(8, 8, 8), [8, 8], goes="012"),
    case(aten.layer_norm.default, h(8, 8), [8], h(8), None, goes="01"),
    case(aten.native_layer_norm.default, f(8, 8), [8], f(8), None, 1e-5, goes="0-"),
    case(aten.rms_norm.default, f(8, 8), [8], f(8), goes="01"),
    case(aten.rms_norm.default, f(8, 8), [8], None, 1e-3, goes="01"),
    case(aten._fused_rms_norm.default, f(8, 8), [8], f(8), 1e-5, goes="0-"),
    case(aten._weight_norm.default, f(8, 8, 3), f(8, 1, 1), goes="01-"),
    case(aten._weight_norm.default, f(8, 8, 4), f(1, 1, 4), 2, goes="012"),
    case(aten._weight_norm.default, f(8, 8), f(), -1, goes="01"),
    case(aten._weight_norm.default, h(8, 8), h(8, 1), goes="01"),
    case(aten._weight_norm_interface.default, f(8, 8, 3), f(8, 1, 1), goes="0--"),
]

ELEMENTWISE = [
    case(aten.add.Tensor, f(8, 8), f(8), alpha=2, goes="01"),
    case(aten.add.Tensor, f(8, 8), 3.0, goes="01"),
    case(aten.add.Tensor, f(8, 1), f(16, 8, 8), goes="1-"),
    case(aten.add.Tensor, n(9, 8, 8), n(9, 8, 8), goes="01"),
    case(aten.sub.Tensor, f(8, 8), f(8, 8), goes="01"),
    case(aten.sub.Tensor, f(8, 8), 3.0, goes="01"),
    case(aten.mul.Tensor, f(8, 8), f(), goes="01"),
    case(aten.mul.Tensor, f(8, 8), f(8, 8), goes="01"),
    case(aten.mul.Tensor, f(8, 8), 3.0, goes="01"),
    case(aten.mul.Tensor, n(9, 8, 8), f(8, 8), goes="01"),
    case(aten.div.Tensor, f(8, 8), f(8, 8), goes="01"),
    case(aten.div.Tensor_mode, f(8, 8), f(8, 8), rounding_mode="floor", goes="01"),
    case(aten.div.Tensor_mode, n(90, 8, 8), 7, rounding_mode="trunc", goes="01"),
    case(aten.where.self, b(8, 8), f(8, 8), f(8), goes="01"),
    case(aten.where.ScalarOther, b(8, 8), f(8, 8), 2.0, goes="01"),
    case(aten.where.ScalarSelf, b(8, 8), 2.0, f(8, 8), goes="01"),
    *each("neg", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "hardswish", goes="01"),
    *each("negative", "absolute", "log_sigmoid", goes="01"),
    *(case(getattr(aten, name).Tensor, f(8, 8), f(8, 1), goes="01") for name in ("multiply", "divide", "subtract")),
    case(aten.masked_fill.Scalar, f(8, 8), b(8, 8), 2.0, goes="01"),
    case(aten.masked_fill.Tensor, f(8, 8), b(8), f(), goes="01"),
    case(aten.__and__.Tensor, b(8, 8), b(8), goes="01"),
    case(aten.__or__.Tensor, n(9, 8, 8), n(9, 8), goes="01"),
    case(aten.fill.Scalar, f(8, 8), 2.0, goes="01"),
    case(aten.fill.Tensor, f(8, 8), f(), goes="01"),
    case(aten.copy.default, f(8, 8), f(8), goes="01"),
    case(aten.dropout.default, f(8, 8), 0.5, False, goes="01"),
    case(aten.dropout.default, f(8, 8), 0.0, True, goes="01"),
    case(aten.dropout.default, f(8, 8, 8), 0.5, True, goes="012"),
    case(aten.dropout.default, f(8, 8, 8).mT, 0.5, True, goes="012"),
    case(aten.native_dropout.default, f(8, 8), 0.5, True, goes="--"),
    case(aten.native_dropout.default, f(8, 8), 0.5, False, goes="01"),
    case(aten.to.dtype, f(8, 8), torch.int64, goes="01"),
    case(aten.to.other, f(8, 8), n(3, 5, 8, 8), goes="01"),
    case(aten._to_copy.default, f(8, 8), dtype=torch.bfloat16, goes="01"),
    case(aten.type_as.default, f(8, 8), n(3, 5, 3, 8), goes="01"),
    *each("zeros_like", "ones_like", goes="01"),
    case(aten.full_like.default, f(8, 8), 3.0, goes="01"),
    case(aten.new_zeros.default, f(8, 8), [8, 3], goes="--"),
    case(aten.new_ones.default, f(8, 8), [8, 3], goes="--"),
    case(aten.new_full.default, f(8, 8), [8, 3], 2.0, goes="--"),
    case(aten.gelu.default, f(8, 8), goes="01"),
    case(aten.pow.Tensor_Scalar, f(8, 8), 2, goes="01"),
    case(aten.clamp.Tensor, f(8, 8), f(8, 1), f(8), goes="01"),
    case(aten.eq.Tensor, n(3, 8, 8), n(3, 8), goes="01"),
    case(aten.rsub.Scalar, f(8, 8), 2.0, goes="01"),
    case(aten.addcmul.default, f(8, 8), f(8), f(8, 1), goes="01"),
]

VIEWS = [
    case(aten.view.default, f(8, 32), [8, 8, 4], goes="01"),
    case(aten.view.default, f(8, 8, 4), [-1, 4], goes="001"),
    case(aten.view.dtype, f(8, 8), torch.int32, goes="--"),
    case(aten.reshape.default, f(8, 8, 4), [8, 32], goes="011"),
    case(aten.reshape.default, f(8, 8), [-1], goes="00"),
    case(aten.reshape.default, f(8, 3), [3, 8], goes="--"),
    case(aten._unsafe_view.default, f(8, 8), [64], goes="00"),
    case(aten.flatten.using_ints, f(8, 8, 8), 0, 1, goes="001"),
    case(aten.ravel.default, f(8, 8), goes="00"),
    case(aten.unsqueeze.default, f(8, 8), 1, goes="02"),
    case(aten.view_as.default, f(8, 32), f(8, 8, 4), goes="01"),
    case(aten.reshape_as.default, f(8, 8, 4), f(8, 32), goes="011"),
    case(aten.reshape_as.default, f(8, 3), f(3, 8), goes="--"),
    case(aten.unflatten.int, f(8, 32), 1, [8, -1], goes="01"),
    case(aten.unflatten.int, f(32, 8), 0, [8, 4], goes="02"),
    case(aten.squeeze.default, f(8, 1, 4), goes="0-1"),
    case(aten.squeeze.dim, f(8, 4), 1, goes="01"),
    case(aten.squeeze.dim, f(1, 8), 0, goes="-0"),
    case(aten.squeeze.dims, f(4, 1, 8), [0, 1], goes="0-1"),
    case(aten.expand.default, f(8, 1, 8), [2, -1, 3, 8], goes="1-3"),
    case(aten.broadcast_to.default, f(8, 8), [3, 8, 8], goes="12"),
    case(aten.expand_as.default, f(8, 1), f(3, 8, 8), goes="1-"),
    case(aten.repeat.default, f(8, 8), [2, 1, 3], goes="12"),
    case(aten.repeat.default, f(8, 8), [0, 1], goes="-1"),
    case(aten.repeat_interleave.self_int, f(8, 8), 3, 1, goes="01"),
    case(aten.repeat_interleave.self_int, f(8, 8), 3, 1, output_size=24, goes="01"),
    case(aten.repeat_interleave.self_int, f(8, 8), 3, goes="--"),
    case(aten.permute.default, f(8, 8, 8), [-1, 0, 1], goes="120"),
    case(aten.transpose.int, f(8, 8, 8), 0, -1, goes="210"),
    case(aten.swapdims.default, f(8, 8, 8), 0, 1, goes="102"),
    case(aten.swapaxes.default, f(8, 8, 8), 0, 1, goes="102"),
    case(aten.t.default, f(8, 8), goes="10"),
    case(aten.t.default, f(8), goes="0"),
    case(aten.mT.default, f(8, 8, 8), goes="021"),
    case(aten.adjoint.default, f(8, 8, 8), goes="021"),
    case(aten.numpy_T.default, f(8, 8, 8), goes="210"),
    case(aten.movedim.int, f(8, 8, 8), 0, -1, goes="201"),
    case(aten.movedim.intlist, f(8, 8, 8), [0, 1], [2, 0], goes="201"),
    case(aten.moveaxis.int, f(8, 8, 8), 2, 0, goes="120"),
    case(aten.select.int, f(8, 8, 8), 1, -2, goes="0-1"),
    case(aten.unbind.int, f(8, 4, 8), 1, goes="0-1"),
    case(aten.slice.Tensor, f(8, 8), 1, 1, 2**63 - 1, 2, goes="01"),
    case(aten.slice.Tensor, f(8, 8), 0, 0, 7, 3, goes="-1"),
    case(aten.slice.Tensor, f(8, 12), 1, 0, 12, 4, goes="0-"),
    case(aten.slice.Tensor, f(8, 8), 1, -9, 2**63 - 1, 2, goes="01"),
    case(aten.slice.Tensor, f(8, 8), 1, -8, 2**63 - 1, goes="01"),
    case(aten.slice.Tensor, f(8, 8), 1, 0, 9223372036854775807, goes="01"),
    case(aten.slice.Tensor, f(8, 8), 1, 0, 8, goes="01"),
    case(aten.slice.Tensor, f(8, 16), 1, 0, -8, goes="0-"),
    case(aten.slice.Tensor, f(8, 16), 1, -8, 9223372036854775807, goes="0-"),
    case(aten.slice.Tensor, f(8, 16), 1, 0, 16, 2, goes="01"),
    case(aten.slice.Tensor, f(8, 8), 1, 1, None, goes="0-"),
    case(aten.narrow.default, f(8, 8), 1, 0, 8, goes="01"),
    case(aten.narrow.default, f(8, 8), 1, -8, 8, goes="01"),
    case(aten.narrow.default, f(8, 16), 1, 8, 8, goes="0-"),
    case(aten.split.Tensor, f(8, 16), 8, -1, goes="0-"),
    case(aten.split.sizes, f(8, 16), [8, 8], 1, goes="0-"),
    case(aten.split_with_sizes.default, f(8, 16), [8, 8], 1, goes="0-"),
    case(aten.split_with_sizes.default, f(8, 16), [16], 1, goes="01"),
    case(aten.chunk.default, f(8, 16), 2, -1, goes="0-"),
    case(aten.tensor_split.sections, f(8, 16), 2, 1, goes="0-"),
    case(aten.tensor_split.indices, f(8, 16), [8], 1, goes="0-"),
    case(aten.cat.default, [f(8, 8), f(8, 16)], 1, goes="0-"),
    case(aten.cat.default, [f(0), f(8, 16)], 0, goes="-"),
    case(aten.concat.default, [f(8, 8), f(8, 8)], -1, goes="0-"),
    case(aten.concatenate.default, [f(8, 8), f(8, 8)], -1, goes="0-"),
    case(aten.stack.default, [f(8, 8), f(8, 8)], 1, goes="02"),
    case(aten.stack.default, [f(8, 8), f(8, 8)], -1, goes="01"),
    case(aten.constant_pad_nd.default, f(8, 8), [1, 2], 3.0, goes="0-"),
    case(aten.constant_pad_nd.default, f(8, 8), [0, 0, 1, 0], goes="-1"),
    case(aten.pad.default, f(8, 8, 8), [1, 2], "reflect", goes="01-"),
    case(aten.tril.default, f(8, 8, 8), goes="0--"),
    case(aten.triu.default, f(8, 8, 8), 1, goes="0--"),
    case(aten.unfold.default, f(8, 8, 8), 1, 2, 2, goes="0-2"),
]

INDEXED = [
    case(aten.select_scatter.default, f(8, 8, 8), f(8, 8), 1, 2, goes="0-2"),
    case(aten.slice_scatter.default, f(8, 8, 8), f(8, 4, 8), 1, 2, 6, goes="0-2"),
    case(aten.index_select.default, f(8, 8), 1, n(8, 8), goes="0-"),
    case(aten.index_select.default, f(8), 0, n(8, 8), goes="-"),
    case(aten.gather.default, f(8, 8), 1, n(8, 8, 8), goes="0-"),
    case(aten.gather.default, f(8, 8), -1, n(8, 4, 8), goes="--"),
    case(aten.gather.default, f(8, 8), -1, n(8, 1, 8), goes="--"),
    case(aten.scatter.src, f(8, 8), 1, n(8, 8, 1), f(8, 1), goes="0-"),
    case(aten.scatter.src, f(8, 8), 1, n(8, 4, 1), f(8, 1), goes="--"),
    case(aten.scatter.value, f(8, 8), 1, n(8, 8, 4), 2.0, goes="0-"),
    case(aten.scatter.reduce, f(8, 8), 1, n(8, 8, 1), f(8, 1), reduce="multiply", goes="0-"),
    case(aten.scatter_add.default, f(8, 8), 1, n(8, 8, 4), f(8, 4), goes="0-"),
    case(aten.scatter_reduce.two, f(8, 8), 1, n(8, 8, 4), f(8, 4), "amax", goes="0-"),
    case(aten.index_add.default, f(8, 8), 0, n(8, 4), f(4, 8), alpha=2, goes="-1"),
    case(aten.index_copy.default, f(8, 8), 0, torch.tensor([3, 1]), f(2, 8), goes="-1"),
    case(aten.index_fill.int_Scalar, f(8, 8), 0, n(8, 4), 2.0, goes="-1"),
    case(aten.index_fill.int_Tensor, f(8, 8), 0, n(8, 4), f(), goes="-1"),
    case(aten.index.Tensor, f(8, 8, 8), [None, n(8, 4)], goes="0-2"),
    case(aten.index.Tensor, f(8, 8, 8), [n(8, 8, 4)], goes="-23"),
    case(aten.index.Tensor, f(8, 8, 8), [None, n(8, 4), n(8, 4)], goes="0--"),
    case(aten.index.Tensor, f(8, 8, 8), [n(8, 4, 1), None, n(8, 4)], goes="---"),
    case(aten.embedding.default, f(16, 8), n(16, 8, 8), goes="P2"),
    case(aten.embedding.default, f(16, 8), n(16, 8), 3, goes="P1"),
    case(aten.embedding.default, f(16, 8), n(16, 8), -1, True, goes="-1"),
]

_bn = aten.batch_norm.default
_gn = aten.group_norm.default
IMAGES = [
    case(_bn, f(8, 8, 4, 4), f(8), f(8), f(8), f(8).abs(), False, 0.1, 1e-5, False, goes="0123"),
    case(_bn, f(8, 8, 4), None, None, f(8), f(8).abs(), False, 0.1, 1e-5, False, goes="012"),
    case(_bn, f(8, 8, 4), f(8), f(8), None, None, True, 0.1, 1e-5, False, goes="-1-"),
    case(
        aten._native_batch_norm_legit_no_training.default,
        f(8, 8, 4),
        f(8),
        f(8),
        f(8),
        f(8).abs(),
        0.1,
        1e-5,
        goes="012",
    ),
    case(_gn, f(8, 16, 4), 8, f(16), f(16), goes="01-"),
    case(_gn, f(8, 16, 4, 4), 8, goes="01--"),
    case(_gn, f(8, 12, 4), 3, f(12), goes="0--"),
    case(aten.max_pool1d.default, f(8, 8, 8), [2], goes="01-"),
    case(aten.max_pool2d.default, f(8, 8, 8, 8), [2, 2], goes="01--"),
    case(aten.max_pool2d.default, f(8, 8, 8), [2, 2], goes="0--"),
    case(aten.max_pool3d.default, f(8, 8, 4, 4, 4), [2, 2, 2], goes="01---"),
    case(aten.max_pool1d_with_indices.default, f(8, 8, 8), [2], goes="01-"),
    case(aten.max_pool2d_with_indices.default, f(8, 8, 8, 8), [2, 2], goes="01--"),
    case(aten.max_pool3d_with_indices.default, f(8, 8, 4, 4, 4), [2, 2, 2], goes="01---"),
    case(aten.avg_pool1d.default, f(8, 8, 8), [3], [2], [1], goes="01-"),
    case(aten.avg_pool2d.default, f(8, 8, 8, 8), [2, 2], goes="01--"),
    case(aten.avg_pool3d.default, f(8, 8, 4, 4, 4), [2, 2, 2], goes="01---"),
    case(aten.adaptive_avg_pool1d.default, f(8, 8, 8), [1], goes="01-"),
    case(aten.adaptive_avg_pool2d.default, f(8, 8, 8, 8), [1, 1], goes="01--"),
    case(aten.adaptive_avg_pool3d.default, f(8, 8, 4, 4, 4), [2, 1, 1], goes="01---"),
    case(aten._adaptive_avg_pool2d.default, f(8, 8, 8, 8), [2, 2], goes="01--"),
    case(aten._adaptive_avg_pool3d.default, f(8, 8, 4, 4, 4), [2, 1, 1], goes="01---"),
    case(aten.adaptive_max_pool1d.default, f(8, 8, 8), [2], goes="01-"),
    case(aten.adaptive_max_pool2d.default, f(8, 8, 8, 8), [2, 2], goes="01--"),
    case(aten.adaptive_max_pool3d.default, f(8, 8, 4, 4, 4), [2, 1, 1], goes="01---"),
    case(aten.upsample_nearest1d.vec, f(8, 8, 4), [8], None, goes="01-"),
    case(aten.upsample_nearest2d.vec, f(8, 8, 4, 4), [8, 8], None, goes="01--"),
    case(aten.upsample_nearest3d.vec, f(8, 8, 4, 4, 4), None, [2.0, 1.0, 1.0], goes="01---"),
    case(aten.upsample_linear1d.vec, f(8, 8, 4), [8], False, None, goes="01-"),
    case(aten.upsample_bilinear2d.vec, f(8, 8, 4, 4), [8, 6], False, None, goes="01--"),
    case(aten.upsample_bicubic2d.vec, f(8, 8, 4, 4), None, True, [2.0, 2.0], goes="01--"),
    case(aten._upsample_bilinear2d_aa.vec, f(8, 8, 4, 4), [2, 2], False, None, goes="01--"),
    case(aten._upsample_bicubic2d_aa.vec, f(8, 8, 4, 4), [2, 2], False, None, goes="01--"),
    case(aten.glu.default, f(8, 16), goes="0-"),
    case(aten.glu.default, f(8, 16, 8), 1, goes="0-2"),
    case(aten.roll.default, f(8, 8, 8), [1, 2], [0, -1], goes="-1-"),
    case(aten.roll.default, f(8, 8), [3], goes="--"),
]

_loss = aten.cross_entropy_loss.default
_classes = n(16, 8)
_some_ignored = torch.where(torch.arange(8) % 3 == 0, -100, _classes)
LOSSES = [
    *(case(_loss, f(8, 16), _some_ignored, None, reduction, goes="--") for reduction in (0, 1, 2)),
    case(_loss, f(8, 16), _classes, None, 1, 5, goes="--"),
    case(_loss, f(8, 16), torch.full((8,), -100), goes="--"),
    case(_loss, f(16), n(16), goes="-"),
    case(_loss, f(8, 16, 8), n(16, 8, 8), goes="---"),
    case(_loss, f(8, 16), _classes, f(16).abs(), goes="--"),
    case(_loss, f(8, 16), _classes, None, 1, -100, 0.1, goes="--"),
    case(_loss, f(8, 16), f(8, 16).softmax(1), goes="--"),
    case(_loss, f(8, 16) * 100, _classes, goes="--"),
]

CASES = [*PRODUCTS, *ATTENTION, *ALONG, *REDUCTIONS, *ELEMENTWISE, *VIEWS, *INDEXED, *IMAGES, *LOSSES]
