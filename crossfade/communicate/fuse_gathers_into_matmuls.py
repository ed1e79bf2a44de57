"""All-gathers that feed matmuls, gathered piece by piece while the pieces before are multiplied."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.communicate.collective_matmul import (
    CYCLE,
    IN_PIECES,
    WRITTEN,
    Choice,
    CollectiveMatmulPass,
    Gate,
    current,
    laid_out,
    left,
    raise_above,
    raised,
    shaped,
    spelled_product,
    viewed,
)
from crossfade.cost.collective_matmul import forecast_gather, rows_of_each
from crossfade.graph.collective_matmul import gather_matmul
from crossfade.graph.effects import memory_of
from crossfade.graph.gathers import Gather, find_gathers
from crossfade.graph.layouts import same
from crossfade.graph.matmuls import SIZE_ONLY, Product, products_of
from crossfade.graph.order import Order, Reachability
from crossfade.graph.passes import Numerics, Outcome, PassResult, Verdict
from crossfade.graph.program import Program, size_hint, tensor_bytes
from crossfade.graph.relayouts import Refusal
from crossfade.graph.splice import Replacements, insert_call, splice

NO_MATMUL = "no matmul reads what it gathers"
TRIMMED = "the matmul sums over rows of which the last are cut off"
CUT = "something else that the matmul takes has only the rows that are not cut off"
ANOTHER = "the matmul is part of another collective matmul"
BETWEEN = "another collective matmul takes what it gathers whole"


@dataclass(frozen=True)
class GatherMatmul:
    """One all-gather, the matmuls that it becomes one with, where that stands and how it runs."""

    gather: Gather
    products: tuple[Product, ...]
    place: fx.Node
    raises: tuple[fx.Node, ...]
    keep: bool
    choice: Choice
    sizes: tuple[fx.Node, ...] = ()
    """Sizes of the gathered value that are asked for, where it is not kept."""

    def __str__(self) -> str:
        products = ", ".join(f"{product.matmul.name} {product.equation}" for product in self.products)
        kept = ", gathered value kept" if self.keep else ""
        return f"{self.gather.collective.node.name} along dim {self.gather.dim} with {products}: {self.choice}{kept}"


@dataclass(frozen=True)
class FuseGathersIntoMatmuls(CollectiveMatmulPass):
    """Gather in pieces what matmuls read, and multiply each piece while the next travels.

    The all-gather, in whatever spelling, and all matmuls that read its result become one operator. What it is gathered
    for beside them is kept. `form` is how it runs: `"chunked"` (functional collectives, on every backend), `"ring"`
    (from neighbour to neighbour) or `"symmetric"` (torch's kernels on symmetric memory of CUDA devices); `"auto"` takes
    what is predicted to be fastest on `machine` of what `forms` has for the group (pairs of a group and its forms; by
    default the first two), and leaves alone what is not faster than plain, or hidden anyway by computation beside it.
    `measured` has the seconds of single nodes by key. `chunks` fixes the number of pieces of a rank's part.

    Also known as: async tensor parallelism, Inductor's micro_pipeline_tp, XLA's collective matmul (windowed einsum).

    Before:
        x: f32[512, 512] = input("x")
        w: f32[512, 512] = parameter("w")
        s: f32[1024, 512] = c10d.all_gather_into_tensor(x, 2, "tp")
        g: f32[1024, 512] = c10d.wait_tensor(s)
        mm: f32[1024, 512] = aten.mm(g, w)
        return output("y", mm)

    After:
        x: f32[512, 512] = input("x")
        w: f32[512, 512] = parameter("w")
        gather_matmul: (f32[1024, 512],) = crossfade.gather_matmul(x, [w], [None], [], ["ab,bc->ac"], 0, 2, "chunked", 2, False, "tp")
        getitem: f32[1024, 512] = gather_matmul[0]
        return output("y", getitem)
    """  # noqa: E501

    name = "fuse-gathers-into-matmuls"
    numerics = Numerics.REASSOCIATES

    def plan(self, program: Program) -> tuple[list[GatherMatmul], list[Verdict]]:
        """Choose what becomes a collective matmul, and say why the rest does not; pure."""
        gathers, verdicts = find_gathers(program.graph)
        if not gathers:
            return [], verdicts
        gate = self.gate(program)
        planner = _GatherPlanner(program, gathers, gate)
        planned = [planner.plan(gather) for gather in gathers]
        verdicts += [*planner.verdicts, *(found for found in planned if isinstance(found, Verdict))]
        return [found for found in planned if isinstance(found, GatherMatmul)], verdicts

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        fusions, verdicts = self.plan(program)
        replaced = Replacements(program)
        for plan in fusions:
            verdicts += _apply(program, plan, replaced)
        replaced.finish()
        products = sum(len(plan.products) for plan in fusions)
        considered = len({verdict.subject for verdict in verdicts})
        counts = {"collective matmuls": len(fusions), "matmuls": products, "left": considered - len(fusions) - products}
        return PassResult(bool(fusions), counts, tuple(verdicts))


class _GatherPlanner:
    """Decides gather by gather, in program order; what one collective matmul takes no other may."""

    def __init__(self, program: Program, gathers: Sequence[Gather], gate: Gate) -> None:
        self.gate, self.verdicts = gate, list[Verdict]()
        self.order = Order(program.graph)
        self.written = self.order.rewritten()
        self.reach = Reachability(self.order, [gather.collective.node for gather in gathers], within_group=False)
        self.gathered = {node: gather for gather in gathers for node in (gather.result, *gather.also)}
        self.claimed = set[fx.Node]()
        self.decided = set[fx.Node]()
        self.taken_whole = set[fx.Node]()

    def plan(self, gather: Gather) -> GatherMatmul | Verdict:
        """What a gather becomes, or a verdict; matmuls that stay as they are have theirs in `verdicts`."""
        start = gather.collective
        if start.node in self.taken_whole:
            return left(start, BETWEEN)
        holders = (gather.result, *gather.also)
        if rewritten := [node.name for node in (gather.part, *holders) if node in self.written]:
            return left(start, WRITTEN, ", ".join(rewritten))
        readers = products_of(gather.result, gather.also)
        products = [reader for reader in readers if isinstance(reader, Product)]
        if not products:
            return left(start, NO_MATMUL, str(readers[0]) if readers else "nothing reads it")
        place = min((user for node in holders for user in node.users), key=self.order.position.__getitem__)
        refused = list[Verdict]()
        chosen, raises = self._fitting(gather, products, place, refused)
        self.verdicts += refused
        if not chosen:
            return left(start, refused[0].reason, refused[0].detail)
        choice = self._choice(gather, chosen)
        if not isinstance(choice, Choice):
            reason, detail = choice
            self.verdicts += [_left(product, reason, detail) for product in chosen]
            return left(start, reason, detail)
        self.decided.add(start.node)
        self.claimed |= {product.matmul for product in chosen}
        self.gate.take(start, (product.matmul for product in chosen))
        for product in chosen:
            self.taken_whole |= {other.collective.node for other in self._gathers_behind(gather, product, raises)}
        sizes = tuple(reader.node for reader in readers if isinstance(reader, Refusal) and _asks_size(gather, reader))
        keep = len(chosen) + len(sizes) < len(readers)
        return GatherMatmul(gather, tuple(chosen), place, tuple(raises), keep, choice, () if keep else sizes)

    def _fitting(
        self, gather: Gather, products: Sequence[Product], place: fx.Node, refused: list[Verdict]
    ) -> tuple[list[Product], list[fx.Node]]:
        """The products that can be computed at a place, and what has to be raised above it for them."""
        chosen, raises = [], dict[fx.Node, None]()
        for product in products:
            found = self._reason_against(gather, product, place)
            if isinstance(found, tuple):
                refused.append(_left(product, *found))
            else:
                chosen.append(product)
                raises |= dict.fromkeys(found)
        return chosen, sorted(raises, key=self.order.position.__getitem__)

    def _reason_against(self, gather: Gather, product: Product, place: fx.Node) -> tuple[str, str] | list[fx.Node]:
        """Why a product cannot join, with its numbers; or the nodes that must be raised for it."""
        if product.matmul in self.claimed:
            return ANOTHER, product.matmul.name
        operands = product.beside
        for node in operands:
            if self.reach.reaches(gather.collective.node, node):
                return CYCLE, f"{node.name} needs {gather.collective.node.name}"
            if node in self.written:
                return WRITTEN, node.name
        if gather.trim is not None and (reason := _against_trimming(gather, product)) is not None:
            return reason, f"{gather.trim} of {_whole_size(gather)}"
        found = raised(self.order, operands, place, self.written)
        if isinstance(found, str):
            return found, f"{', '.join(node.name for node in operands)} above {place.name}"
        if self.decided & {other.collective.node for other in self._gathers_behind(gather, product, found)}:
            return ANOTHER, "its other operand is gathered in another collective matmul"
        return found

    def _gathers_behind(self, gather: Gather, product: Product, raises: Sequence[fx.Node]) -> list[Gather]:
        """The other gathers whose whole results a product would be given directly, or by what is raised for it."""
        reads = [*product.beside, *(source for node in raises for source in node.all_input_nodes)]
        found = [self.gathered[node] for node in reads if node in self.gathered]
        return [other for other in found if other is not gather]

    def _choice(self, gather: Gather, products: Sequence[Product]) -> Choice | tuple[str, str]:
        """How to run, if it pays."""
        start = gather.collective
        seconds = sum(self.gate.costs.compute.get(product.matmul, 0.0) for product in products)
        found = forecast_gather(
            self.gate.machine,
            start.group,
            gather.ranks,
            tensor_bytes(gather.part.meta["val"]) * gather.ranks,
            seconds,
            size_hint(gather.part.meta["val"].shape[gather.dim]),
            self.gate.forms_of(start.group),
            self.gate.pieces,
            products=len(products),
            each=rows_of_each(gather.part.meta["val"].shape, gather.dim),
        )
        return self.gate.judge(start, found)


def _left(product: Product, reason: str, detail: str) -> Verdict:
    return Verdict.of(product.matmul, Outcome.LEFT, reason, detail=detail)


def _asks_size(gather: Gather, reader: Refusal) -> bool:
    """Whether a reader asks for a size of the gathered value that its part has too."""
    asked = reader.node.target is torch.ops.aten.sym_size.int and reader.node.args[0] in (gather.result, *gather.also)
    return asked and reader.reason == SIZE_ONLY and gather.trim is None


def _letter(gather: Gather, product: Product) -> str:
    """The letter of the gathered dim."""
    return product.operand_letters[gather.dim]


def _against_trimming(gather: Gather, product: Product) -> str | None:
    """Why a product cannot be computed with rows that are cut off only afterwards."""
    letter, result = _letter(gather, product), product.result_letters
    if letter not in result:
        return TRIMMED
    if letter in product.other_letters:
        return CUT
    scale = product.scales[0] if product.scales is not None else None
    if scale is not None and not same(scale.meta["val"].numel(), 1):
        return CUT
    if product.bias is None:
        return None
    shape = product.bias_shape if product.bias_shape is not None else product.bias.meta["val"].shape
    place = result.index(letter) - len(result) + len(shape)
    return CUT if place >= 0 and not same(shape[place], 1) else None


def _whole_size(gather: Gather) -> Any:
    return gather.part.meta["val"].shape[gather.dim] * gather.ranks


def _apply(program: Program, plan: GatherMatmul, replaced: Replacements) -> list[Verdict]:
    """Put the collective matmul where it stands, and what it makes where that was made.

    It stands at the first use of the gathered value, so operands made below are raised above it. Plans before this one
    may have replaced what it reads: `current` looks that up. Nothing is erased before all plans are applied.
    """
    gather, start = plan.gather, plan.gather.collective
    raise_above(plan.place, plan.raises)
    inputs = [(product.other, product.bias, *(product.scales or (None, None))) for product in plan.products]
    kept = (gather.result, *gather.also) if plan.keep else ()
    part, inputs = fx.map_arg((gather.part, inputs), lambda node: current(replaced, node))
    compute = functools.partial(_computed, plan, kept)
    results = splice(program, compute, part, inputs, before=plan.place, like=start.node)
    for node, result in zip((*(product.node for product in plan.products), *kept), results, strict=True):
        replaced.replace(node, result)
    for size in plan.sizes:
        replaced.replace(size, _size_by_part(program, gather, size))
    _drop(plan, replaced)
    names = ", ".join(product.matmul.name for product in plan.products)
    detail, said = f"{plan.choice}, with {names}", f"with {start.node.name}, {plan.choice.form}"
    return [
        Verdict.of(start.node, Outcome.FUSED, IN_PIECES, detail=detail, bytes=start.bytes),
        *(
            Verdict.of(product.matmul, Outcome.FUSED, IN_PIECES, detail=f"{product.equation} {said}")
            for product in plan.products
        ),
    ]


def _computed(
    plan: GatherMatmul, kept: Sequence[fx.Node], part: Tensor, operands: Sequence[tuple[Any, ...]]
) -> list[Tensor]:
    """The results of a collective matmul in the shapes that their readers expect, then what is kept for each node.

    Nodes that share memory share what is kept; others get copies, since whoever reads one may write it.
    """
    gather = plan.gather
    given = [shaped(product, own) for product, own in zip(plan.products, operands, strict=True)]
    scaled = any(product.scales for product in plan.products)
    made = gather_matmul(
        part,
        [other for other, *_ in given],
        [spelled_product(product) for product in plan.products],
        dim=gather.dim,
        ranks=gather.ranks,
        group=gather.collective.group,
        form=plan.choice.form,
        chunks=plan.choice.chunks,
        keep=plan.keep,
        biases=[bias for _, bias, *_ in given],
        scales=[scale for _, _, *pair in given for scale in pair] if scaled else (),
    )
    results = [
        viewed(_trimmed(value, gather, product.result_letters.find(_letter(gather, product))), product.node)
        for value, product in zip(made, plan.products, strict=False)
    ]
    held = dict[Any, Tensor]()
    for node in kept:
        if memory_of(node) not in held:
            held[memory_of(node)] = _held(made[-1].clone() if held else made[-1], gather, node)
    return [*results, *(held[memory_of(node)] for node in kept)]


def _size_by_part(program: Program, gather: Gather, asked: fx.Node) -> fx.Node:
    """A size of the gathered value, asked of this rank's part."""
    dim: Any = asked.args[1]
    size = insert_call(program, torch.ops.aten.sym_size.int, gather.part, dim, before=asked, like=asked)
    if dim % gather.part.meta["val"].dim() != gather.dim:
        return size
    return insert_call(program, operator.mul, size, gather.ranks, before=asked, like=asked)


def _drop(plan: GatherMatmul, replaced: Replacements) -> None:
    """Let go of what stood between the part and the products, readers first; a kept value's views stay for others."""
    gather = plan.gather
    going = {
        node for node in (*gather.nodes, *gather.also) if not node < gather.collective.node
    }  # others may read those before
    if not plan.keep:
        stack = [gather.result, *gather.also]
        while stack:  # views to the products, and those that nothing reads
            views = [user for user in stack.pop().users if user not in replaced.new and user not in going]
            going |= {*views}
            stack += views
    for node in sorted(going - replaced.new.keys(), reverse=True):
        replaced.drop(node)


def _held(whole: Tensor, gather: Gather, node: fx.Node) -> Tensor:
    """What is gathered as a node holds it: in its layout in memory, without the rows that it has cut off."""
    if gather.trim is None:
        return laid_out(whole, node.meta["val"])
    return laid_out(whole, node.all_input_nodes[0].meta["val"]).narrow(gather.dim, 0, gather.trim)


def _trimmed(value: Tensor, gather: Gather, dim: int) -> Tensor:
    """A product without the rows that the gather's result has cut off."""
    return value if gather.trim is None or dim < 0 else value.narrow(dim, 0, gather.trim).contiguous()
