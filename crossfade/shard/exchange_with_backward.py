"""Exchanges of rows that know their backward, for programs that autograd may differentiate later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossfade.graph import collectives, exchange_rows
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, insert_call

_LIBRARY = torch.library.Library("crossfade", "FRAGMENT")
_SIGNATURE = "(Tensor x, Tensor sent, Tensor received, int rows, str group) -> Tensor"


def _exchanged(x: Tensor, sent: Tensor, received: Tensor, rows: int, group: str) -> Tensor:
    return collectives.wait(collectives.all_to_all_rows(x, sent, received, rows, group))


class _Exchange(torch.autograd.Function):
    """What is sent in the forward comes back in the backward; rows that were not sent have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Tensor, received: Tensor, rows: int, group: str) -> Tensor:
        ctx.save_for_backward(sent, received)
        ctx.settings = x.shape[0], group
        return _exchanged(x, sent, received, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, received = ctx.saved_tensors
        return _exchanged(grad, received, sent, *ctx.settings), None, None, None, None


def _exchange(x: Tensor, sent: Tensor, received: Tensor, rows: int, group: str) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Exchange.apply(x, sent, received, rows, group)
    return _exchanged(x, sent, received, rows, group)


_LIBRARY.define(f"ep_exchange{_SIGNATURE}")
_LIBRARY.impl("ep_exchange", _exchange, "CompositeImplicitAutograd")

EXCHANGE = torch.ops.crossfade.ep_exchange.default
"""What a graph calls to exchange rows with a backward."""


@dataclass(frozen=True)
class ExchangeWithBackward(Pass):
    """Exchange rows in one call that knows its backward, the exchange back, in place of a start and a wait.

    For programs that are called as modules, where autograd does not see through a start: `cf.shard`. Where a graph is
    traced or compiled, the call becomes a start and a wait again.

    Before:
        x: f32[6, 8] = input("x")
        sent: i64[2] = input("sent")
        received: i64[2] = input("received")
        start: f32[12, 8] = crossfade.exchange_rows(x, sent, received, 12, "ep")
        done: f32[12, 8] = c10d.wait_tensor(start)
        return output("y", done)

    After:
        x: f32[6, 8] = input("x")
        sent: i64[2] = input("sent")
        received: i64[2] = input("received")
        ep_exchange: f32[12, 8] = crossfade.ep_exchange(x, sent, received, 12, "ep")
        return output("y", ep_exchange)
    """

    name = "exchange-with-backward"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """Replace each exchange of rows and its wait."""
        done, verdicts = Replacements(program), []
        for exchange in collectives.find(program.graph):
            if exchange.node.target is not exchange_rows.OPERATOR or len(exchange.waits) != 1:
                continue
            (wait,) = exchange.waits
            made = insert_call(program, EXCHANGE, *exchange.node.args, before=wait, like=wait)
            verdicts.append(Verdict.of(exchange.node, Outcome.REPLACED, "knows its backward", bytes=exchange.bytes))
            done.replace(wait, made)
            done.drop(exchange.node)
        done.finish()
        return PassResult(bool(verdicts), {"replaced": len(verdicts)}, tuple(verdicts))
