"""Batch normalisation over the samples of all ranks, as on a single device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import erase_if_dead, splice
from crossfade.shard.batch_dims import batch_dims

_aten = torch.ops.aten
_FORWARD = _aten._native_batch_norm_legit_functional.default
_FORWARD_ALONE = _aten._native_batch_norm_legit.no_stats
"""The forward of a module that keeps no running statistics."""
_BACKWARD = _aten.native_batch_norm_backward.default
_TRAINING = {_FORWARD: 5, _FORWARD_ALONE: 3, _BACKWARD: 7}
"""The argument that says whether statistics are taken."""


def is_synchronized(node: fx.Node, dims: tuple[int, ...]) -> bool:
    """Whether a node is a batch norm's forward over samples, which lie along `dims` of what it is given."""
    return node.target in (_FORWARD, _FORWARD_ALONE) and bool(node.args[_TRAINING[node.target]]) and _are_reduced(dims)


def _are_reduced(dims: tuple[int, ...]) -> bool:
    """Whether samples that lie along `dims` are among what statistics are taken over: all but channels."""
    return any(dim != 1 for dim in dims)


@dataclass(frozen=True)
class SynchronizeBatchNorm(Pass):
    """Take batch statistics over all ranks: one small all-gather in the forward, one small all-reduce in the backward.

    Means and variances of the ranks' parts are combined exactly (no difference of large squares). Running statistics
    and gradients are then those of the whole batch.

    With `gather=False` two all-reduces take the all-gather's place, for backends that cannot gather (gloo on CUDA).

    Also known as: `torch.nn.SyncBatchNorm`; Flax's `BatchNorm(axis_name=...)`.

    Before:
        x: f32[4, 2] = input("x")
        norm: (f32[4, 2], f32[2], f32[2]) = aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-05)
        y: f32[4, 2] = norm[0]
        return output("y", y)

    After:
        x: f32[4, 2] = input("x")
        var_mean: (f32[2], f32[2]) = aten.var_mean.correction(x, [0], correction=0)
        getitem: f32[2] = var_mean[0]
        getitem_1: f32[2] = var_mean[1]
        cat: f32[4] = aten.cat([getitem_1, getitem])
        all_gather_into_tensor: f32[8] = c10d.all_gather_into_tensor(cat, 2, "dp")
        wait_tensor: f32[8] = c10d.wait_tensor(all_gather_into_tensor)
        view: f32[2, 2, 2] = aten.view(wait_tensor, [2, 2, -1])
        unbind: (f32[2, 2], f32[2, 2]) = aten.unbind.int(view, 1)
        getitem_2: f32[2, 2] = unbind[0]
        getitem_3: f32[2, 2] = unbind[1]
        mean: f32[2] = aten.mean.dim(getitem_2, [0])
        sub: f32[2, 2] = aten.sub.Tensor(getitem_2, mean)
        pow_1: f32[2, 2] = aten.pow.Tensor_Scalar(sub, 2)
        add: f32[2, 2] = aten.add.Tensor(getitem_3, pow_1)
        mean_1: f32[2] = aten.mean.dim(add, [0])
        add_1: f32[2] = aten.add.Tensor(mean_1, 1e-05)
        rsqrt: f32[2] = aten.rsqrt(add_1)
        view_1: f32[1, 2] = aten.view(mean, [1, -1])
        sub_1: f32[4, 2] = aten.sub.Tensor(x, view_1)
        view_2: f32[1, 2] = aten.view(rsqrt, [1, -1])
        mul: f32[4, 2] = aten.mul.Tensor(sub_1, view_2)
        return output("y", mul)
    """

    name = "synchronize-batch-norm"
    numerics = Numerics.REASSOCIATES

    group: str = "dp"
    ranks: int = 2
    gather: bool = True

    def run(self, program: Program) -> PassResult:
        """Replace each training-mode batch norm over samples, forward and backward."""
        verdicts = []
        given = {collective.node for collective in collectives.find(program.graph)}
        norms = [n for n in program.graph.nodes if n.op == "call_function" and "batch_norm" in str(n.target)]
        reasons = [self._reason_against(node) for node in norms]  # first of all: what replaces a norm is not marked
        for node, reason in zip(norms, reasons, strict=True):
            if reason is None:
                self._replace(program, node)
                what = "gradient sums" if node.target is _BACKWARD else "statistics"
                verdicts.append(Verdict.of(node, Outcome.REPLACED, f"{what} taken over all {self.ranks} ranks"))
            else:
                verdicts.append(Verdict.of(node, Outcome.LEFT, reason))
        count = sum(v.outcome is Outcome.REPLACED for v in verdicts)
        reason = "it spreads a batch norm over all ranks"
        verdicts += [
            Verdict.of(collective.node, Outcome.INSERTED, reason, bytes=collective.bytes)
            for collective in collectives.find(program.graph)
            if collective.node not in given
        ]
        return PassResult(bool(count), {"synchronized": count}, tuple(verdicts))

    def _reason_against(self, node: fx.Node) -> str | None:
        if node.target not in _TRAINING:
            return f"{node.target} is not one of the spellings known here: statistics stay per rank"
        if not node.args[_TRAINING[node.target]]:
            return "it uses running statistics, the same on every rank"
        source: Any = node.args[0]
        if not _are_reduced(batch_dims(source)):
            return "its statistics are not taken over samples (instance normalisation)"
        return None

    def _replace(self, program: Program, node: fx.Node) -> None:
        functions: dict[Any, Any] = {
            _FORWARD: self._forward,
            _FORWARD_ALONE: self._forward_alone,
            _BACKWARD: self._backward,
        }
        results = splice(program, functions[node.target], *node.args, before=node, like=node)
        for part in list(node.users):
            part.replace_all_uses_with(results[part.args[1]])
            program.graph.erase_node(part)
        erase_if_dead(node)

    def _forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, training: bool, momentum: float, eps: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        dims = _all_but_channels(x)
        wide = _wide(x)
        var, mean = torch.var_mean(wide, dims, correction=0)
        mean, var = self._combined(mean, var)
        inverse = torch.rsqrt(var + eps)
        out = (wide - _over(mean, x)) * _over(inverse, x)
        out = out if weight is None else out * _over(weight, x)
        out = out if bias is None else out + _over(bias, x)
        count = x.numel() // x.shape[1] * self.ranks
        new_mean = None if running_mean is None else _moved(running_mean, mean, momentum)
        unbiased = count / max(count - 1, 1)
        new_var = None if running_var is None else _moved(running_var, var * unbiased, momentum)
        return out.to(x.dtype), mean, inverse, new_mean, new_var

    def _forward_alone(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
    ) -> tuple[Tensor | None, ...]:
        return self._forward(x, weight, bias, None, None, training, momentum, eps)[:3]

    def _combined(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of all ranks' samples from those of each rank's, which are equally many."""
        if self.gather:
            everyone = collectives.wait(collectives.all_gather(torch.cat([mean, var]), self.ranks, self.group))
            means, variances = everyone.view(self.ranks, 2, -1).unbind(1)
            whole = means.mean(0)
            return whole, (variances + (means - whole).square()).mean(0)
        whole = collectives.wait(collectives.all_reduce(mean, "avg", self.group))
        spread = var + (mean - whole).square()
        return whole, collectives.wait(collectives.all_reduce(spread, "avg", self.group))

    def _backward(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Any, running_var: Any, mean: Tensor,
        inverse: Tensor, training: bool, eps: float, wanted: list[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        dims = _all_but_channels(x)
        normal = (_wide(x) - _over(mean, x)) * _over(inverse, x)
        wide = _wide(grad)
        grad_bias, grad_weight = wide.sum(dims), (wide * normal).sum(dims)
        sums = torch.cat([grad_bias, grad_weight])
        total = collectives.wait(collectives.all_reduce(sums, "sum", self.group))
        mean_grad, mean_product = (total / (x.numel() // x.shape[1] * self.ranks)).chunk(2)
        grad_normal = wide - _over(mean_grad, x) - normal * _over(mean_product, x)
        scale = inverse if weight is None else inverse * weight
        kind = grad.dtype if weight is None else weight.dtype
        return (grad_normal * _over(scale, x)).to(grad.dtype), grad_weight.to(kind), grad_bias.to(kind)


def _wide(x: Tensor) -> Tensor:
    """Sums of many short numbers need a longer one."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _moved(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    return (running * (1 - momentum) + new * momentum).to(running.dtype)


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _over(per_channel: Tensor, x: Tensor) -> Tensor:
    """A per-channel value shaped to spread over x."""
    return per_channel.view(1, -1, *([1] * (x.dim() - 2)))
