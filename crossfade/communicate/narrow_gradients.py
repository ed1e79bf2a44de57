"""Gradients sent in 16 bits, or in 8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from crossfade.communicate.gradient_exchanges import GradientExchange, described_as, gradient_exchanges
from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.splice import splice

NarrowDtype = Literal["bfloat16", "float16", "int8"]


@dataclass(frozen=True)
class NarrowGradients(Pass):
    """Send the gradients of one `group` in 16 bits, half the bytes of float32, or in 8.

    In 16 bits, what is sent is rounded once, and so is the sum; `split-all-reduces` and `lower-reduce-scatters` see to
    it that it is added up in float32. float16 keeps three more bits than bfloat16, but overflows above 65,504 and loses
    what is below 6e-8. What the program does with a gradient afterwards, it does in the gradient's own dtype.

    For `"int8"` the reduction is only named otherwise, such as `"avg:int8"`: buckets form of such, and
    `quantize-reductions` spells them out. Gradients of less than `least_kb` stay as they are then.

    Also known as: DDP's `bf16_compress_hook` and `fp16_compress_hook`, FSDP's `reduce_dtype`, DeepSpeed's
    `communication_data_type`, Megatron's bf16 gradient reduction.

    Before:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "avg", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return gradient("p", w)

    After:
        x: f32[4] = input("x")
        _to_copy: bf16[4] = aten._to_copy(x, dtype=bf16)
        s: bf16[4] = c10d.all_reduce(_to_copy, "avg", "dp")
        w: bf16[4] = c10d.wait_tensor(s)
        _to_copy_1: f32[4] = aten._to_copy(w, dtype=f32)
        return gradient("p", _to_copy_1)
    """

    name = "narrow-gradients"
    numerics = Numerics.CHANGES_DTYPE

    group: str = "dp"
    dtype: NarrowDtype = "bfloat16"
    least_kb: float = 16.0

    def __post_init__(self) -> None:
        if self.dtype not in get_args(NarrowDtype):
            expected = " or ".join(map(repr, get_args(NarrowDtype)))
            raise PassError(f"{self.name}(dtype={self.dtype!r})", expected=expected, remedy="pass one of those")

    def run(self, program: Program) -> PassResult:
        """Narrow each gradient's reductions along the group."""
        verdicts = []
        for exchange in gradient_exchanges(program, self.group):
            reason = exchange.reason_against() or self._reason_against(exchange)
            narrow = self._quantize if self.dtype == "int8" else self._narrow
            verdicts.append(exchange.left(reason) if reason else narrow(program, exchange))
        return PassResult.of(verdicts, Outcome.REPLACED, done="narrowed", left="left")

    def _reason_against(self, exchange: GradientExchange) -> str | None:
        collective = exchange.collective
        if self.dtype == "int8" and collective.bytes < self.least_kb * 1024:
            return "it is too small for scales to be worth it"
        if self.dtype == "int8" and isinstance(collective.node.meta["val"].numel(), torch.SymInt):
            return "its size is not known before it runs"
        return "it is no wider than that" if collective.dtype.itemsize <= getattr(torch, self.dtype).itemsize else None

    def _quantize(self, program: Program, exchange: GradientExchange) -> Verdict:
        collective, before = exchange.collective, exchange.collective.bytes
        collectives.rename_reduction(collective.node, f"{collective.reduce_op}{collectives.QUANTIZED}")
        reason, sent = "sent in 8 bits, with error feedback", f"{before} B become {before // collective.dtype.itemsize}"
        return Verdict.of(collective.node, Outcome.REPLACED, reason, detail=sent, bytes=before)

    def _narrow(self, program: Program, exchange: GradientExchange) -> Verdict:
        collective, dtype = exchange.collective, getattr(torch, self.dtype)
        start, source, wide = collective.node, collective.inputs[0], collective.dtype
        before = collective.bytes
        narrowed = splice(program, lambda value: value.to(dtype), source, before=start, like=start)
        start.replace_input_with(source, narrowed)
        for node in (start, *collective.waits):
            node.meta["val"] = described_as(program, node.meta["val"], dtype)
        for wait in collective.waits:
            users = list(wait.users)  # widened where it is used: it may be waited for until then
            widened = splice(program, lambda value: value.to(wide), wait, before=min(users), like=start)
            for user in users:
                user.replace_input_with(wait, widened)
        sent = f"{before} B become {tensor_bytes(narrowed.meta['val'])}"
        return Verdict.of(start, Outcome.REPLACED, f"sent in {self.dtype}", detail=sent, bytes=before)
