"""Adam's update of a large parameter as one operator: one walk through memory instead of one for each step of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.finish.group_small_operators import is_number
from crossfade.graph import adam
from crossfade.graph.in_place import MemoryUse
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.splice import insert_call

_aten = torch.ops.aten
_PRECISE = {torch.float32, torch.float64}
_FARTHEST = 256
"""How many nodes apart the steps of one update may be."""

_WHY = "one walk through memory instead of seven"
_OTHER = "what it divides by is not Adam's"
_USED = "something else uses a step of the update"
_FAR = "its steps are far apart"
_WRITTEN = "its gradient is overwritten before the update ends"
_LAYOUT = "it is not contiguous, or not in single or double precision, on the CPU"


@dataclass(frozen=True)
class FuseAdamUpdates(Pass):
    """Make Adam's update of a parameter one call, where that is large and on the CPU; after `update-in-place`.

    What an update costs is memory: seven operators read and write moments, denominator and parameter in turns. Torch's
    fused kernel (`crossfade.graph.adam`) does it in one walk, rounding a little differently. Decay of the weight stays
    what it is. Up to `smallest_kb` updates are left to `group-small-operators`.

    Also known as: Adam(fused=True) (torch), FusedAdam (Apex, Megatron), CPUAdam (DeepSpeed).

    Before:
        p: f32[70000] = parameter("p")
        m: f32[70000] = optimizer_state("m")
        v: f32[70000] = optimizer_state("v")
        g: f32[70000] = input("g")
        mean: f32[70000] = aten.lerp_.Scalar(m, g, 0.25)
        decayed: f32[70000] = aten.mul_.Tensor(v, 0.5)
        square: f32[70000] = aten.addcmul_(decayed, g, g, value=0.5)
        root: f32[70000] = aten.sqrt(square)
        corrected: f32[70000] = aten.div_.Tensor(root, 0.5)
        denominator: f32[70000] = aten.add_.Tensor(corrected, 0.125)
        new: f32[70000] = aten.addcdiv_(p, mean, denominator, value=-0.25)
        return output("g", g)

    After:
        p: f32[70000] = parameter("p")
        m: f32[70000] = optimizer_state("m")
        v: f32[70000] = optimizer_state("v")
        g: f32[70000] = input("g")
        adam_: None = crossfade.adam_(p, g, m, v, 0.75, 0.5, 0.5, 0.125, -0.25)
        return output("g", g)
    """

    name = "fuse-adam-updates"
    numerics = Numerics.REASSOCIATES

    smallest_kb: float = 256.0

    def run(self, program: Program) -> PassResult:
        """Read each update backwards from its last step, and fuse those that can be."""
        memory = MemoryUse(program)
        verdicts: list[Verdict] = []
        for last in program.graph.find_nodes(op="call_function", target=_aten.addcdiv_.default):
            if tensor_bytes(last.meta["val"]) <= self.smallest_kb * 1024:
                continue
            update = _read(last)
            against = _OTHER if update is None else update.reason_against(memory)
            if update is None or against is not None:
                verdicts.append(Verdict.of(last, Outcome.LEFT, against or _OTHER))
                continue
            verdicts.append(Verdict.of(last, Outcome.FUSED, _WHY))
            _fuse(program, update)
        return PassResult.of(verdicts, Outcome.FUSED, done="fused", left="left")


@dataclass(frozen=True)
class _Update:
    """Adam's update in steps: what each works on, and the numbers."""

    parameter: fx.Node
    gradient: fx.Node
    mean: fx.Node
    square: fx.Node
    beta1: Any
    beta2: Any
    correction: Any
    eps: Any
    size: Any
    """What mean over denominator is multiplied with: minus the learning rate, corrected."""
    steps: tuple[fx.Node, ...]

    @property
    def last(self) -> fx.Node:
        return self.steps[-1]

    def reason_against(self, memory: MemoryUse) -> str | None:
        """Why not all steps may be done where the last one is."""
        tensors = [self.parameter, self.gradient, self.mean, self.square]
        if not all(_is_plain(tensor.meta["val"], self.last.meta["val"]) for tensor in tensors):
            return _LAYOUT
        steps = set(self.steps)
        for moment in (self.mean, self.square):
            known = memory.aliases[memory.region[moment].root]
            if not steps.issuperset(user for alias in known for user in alias.users):
                return _USED
        if not all(steps.issuperset(step.users) for step in self.steps[:-1]):
            return _USED
        return self._reason_against_reading_late(memory, steps)

    def _reason_against_reading_late(self, memory: MemoryUse, steps: set[fx.Node]) -> str | None:
        """Why the gradient may not be read where the last step is."""
        first = min(memory.position[step] for step in self.steps if self.gradient in step.all_input_nodes)
        end, held = memory.position[self.last], memory.region[self.gradient]
        if end - first > _FARTHEST:
            return _FAR
        between = (node for node in memory.nodes[first:end] if node not in steps)
        written = (region for node in between for region in memory.touched(node)[1])
        return _WRITTEN if any(region.overlaps(held) for region in written) else None


def _read(last: fx.Node) -> _Update | None:
    """The update that ends in a node, if it is one."""
    end = arguments(last)
    lerp = _call(end["tensor1"], _aten.lerp_.Scalar)
    add = _call(end["tensor2"], _aten.add_.Tensor, _aten.add.Tensor)
    div = _call(add and add.args[0], _aten.div_.Tensor, _aten.div.Tensor)
    root = _call(div and div.args[0], _aten.sqrt.default)
    addcmul = _call(root and root.args[0], _aten.addcmul_.default)
    mul = _call(addcmul and addcmul.args[0], _aten.mul_.Tensor)
    if not (lerp and add and div and root and addcmul and mul):
        return None
    mean, square, decayed, added = arguments(lerp), arguments(addcmul), arguments(mul), arguments(add)
    gradient, correction = mean["end"], arguments(div)["other"]
    weight, share, beta2, eps = mean["weight"], square["value"], decayed["other"], added["other"]
    if not (square["tensor1"] is square["tensor2"] is gradient) or added["alpha"] != 1:
        return None
    if not all(is_number(number) for number in (weight, share, beta2, eps, correction, end["value"])):
        return None
    beta1 = _rest(weight)
    if beta1 is None or not _same(_rest(share), beta2):
        return None
    steps = (lerp, mul, addcmul, root, div, add, last)
    return _Update(
        end["self"], gradient, mean["self"], decayed["self"], beta1, beta2, correction, eps, end["value"], steps
    )


def _rest(share: Any) -> Any:
    """What a share is of when the rest is one minus it: a number, or an input of the program; None if not known."""
    if not isinstance(share, fx.Node):
        return 1 - share
    whole = share.args[0] if share.target is operator.sub else None
    return share.args[1] if isinstance(whole, int | float) and whole == 1 else None


def _same(number: Any, other: Any) -> bool:
    if isinstance(number, fx.Node) or isinstance(other, fx.Node):
        return number is other
    return number is not None and abs(number - other) <= 1e-12


def _call(node: Any, *targets: Any) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.target in targets else None


def _is_plain(value: Tensor, like: Tensor) -> bool:
    known = not any(isinstance(size, torch.SymInt) for size in value.shape)
    alike = value.shape == like.shape and value.dtype == like.dtype and value.device == like.device
    return known and alike and value.device.type == "cpu" and value.dtype in _PRECISE and value.is_contiguous()


def _fuse(program: Program, update: _Update) -> None:
    last = update.last
    tensors = (update.parameter, update.gradient, update.mean, update.square)
    numbers = (update.beta1, update.beta2, update.correction, update.eps, update.size)
    insert_call(program, adam.OPERATOR, *tensors, *numbers, before=last, like=last)
    last.replace_all_uses_with(update.parameter)
    for step in reversed(update.steps):
        program.graph.erase_node(step)
