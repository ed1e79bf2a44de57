"""Matmuls whose results are reduce-scattered, computed piece by piece while the pieces before travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from crossfade.communicate.collective_matmul import (
    IN_PIECES,
    LEAST_GAIN,
    WRITTEN,
    Choice,
    CollectiveMatmulPass,
    Gate,
    current,
    left,
    raise_above,
    shaped,
    spelled_product,
    viewed,
)
from crossfade.communicate.meanwhile import Spare, SpareMatmuls
from crossfade.cost.collective_matmul import Forecasts, forecast_scatter, rows_of_each
from crossfade.graph.collective_matmul import ANYWHERE, matmul_scatter, matmul_scatter_meanwhile
from crossfade.graph.gathers import Scatter, find_scatters
from crossfade.graph.matmuls import Product, product_before
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, PassResult, Verdict
from crossfade.graph.program import Program, size_hint, tensor_bytes
from crossfade.graph.splice import Replacements, splice

NO_MATMUL = "no matmul makes what it scatters"
USED = "something else reads the matmul's result before it is scattered"
SUMMED = "the parts are not equal parts of one dim of the matmul"
MEANWHILE = "is computed while another's result travels"


@dataclass(frozen=True)
class MatmulScatter:
    """One reduce-scatter, the matmul that it becomes one with, along which dim of it, and how that runs; and matmuls
    that have nothing to do with it, for the time in which it travels."""

    scatter: Scatter
    product: Product
    dim: int
    choice: Choice
    meanwhile: tuple[Spare, ...] = ()

    def __str__(self) -> str:
        product = f"{self.product.matmul.name} {self.product.equation}"
        others = f", meanwhile {self.others}" if self.meanwhile else ""
        return f"{self.scatter.collective.node.name} along dim {self.dim} of {product}: {self.choice}{others}"

    @property
    def others(self) -> str:
        """The names of the matmuls that have nothing to do with it."""
        return ", ".join(spare.matmul.name for spare in self.meanwhile)


@dataclass(frozen=True)
class FuseScattersIntoMatmuls(CollectiveMatmulPass):
    """Compute in pieces what is reduce-scattered, and let each piece travel while the next is computed.

    The reduce-scatter (sum or mean), in whatever spelling, and the matmul that makes its input become one operator, in
    which each rank computes the others' parts first and its own last. What travels even then is put over matmuls near
    it that have nothing to do with it, such as the gradient of a weight: they become part of the operator. `machine`,
    `form`, `chunks`, `forms` and `measured` are those of `fuse-gathers-into-matmuls`.

    Also known as: async tensor parallelism, Inductor's micro_pipeline_tp, XLA's collective matmul (windowed einsum).

    Before:
        x: f32[1024, 512] = input("x")
        w: f32[512, 512] = parameter("w")
        mm: f32[1024, 512] = aten.mm(x, w)
        s: f32[512, 512] = c10d.reduce_scatter_tensor(mm, "sum", 2, "tp")
        r: f32[512, 512] = c10d.wait_tensor(s)
        return output("y", r)

    After:
        x: f32[1024, 512] = input("x")
        w: f32[512, 512] = parameter("w")
        matmul_scatter: f32[512, 512] = crossfade.matmul_scatter(x, w, None, [], "ab,bc->ac", 0, "sum", 2, "chunked", 2, "tp")
        return output("y", matmul_scatter)
    """  # noqa: E501

    name = "fuse-scatters-into-matmuls"
    numerics = Numerics.REASSOCIATES

    def plan(self, program: Program) -> tuple[list[MatmulScatter], list[Verdict]]:
        """Choose what becomes a collective matmul, and say why the rest does not; pure."""
        fusions, verdicts, declined = self._plan(program)
        return fusions, [*verdicts, *declined]

    def _plan(self, program: Program) -> tuple[list[MatmulScatter], list[Verdict], list[Verdict]]:
        """Fusions, verdicts on the scatters that stay, and on the matmuls that could not join one."""
        scatters, verdicts = find_scatters(program.graph)
        if not scatters:
            return [], verdicts, []
        planner = _ScatterPlanner(program, scatters, self.gate(program))
        planned = [planner.plan(scatter) for scatter in scatters]
        verdicts += [verdict for found in planned if isinstance(found, list) for verdict in found]
        return [found for found in planned if isinstance(found, MatmulScatter)], verdicts, planner.declined

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        fusions, verdicts, declined = self._plan(program)
        counts = {"collective matmuls": len(fusions), "left": len({verdict.subject for verdict in verdicts})}
        verdicts += declined
        replaced = Replacements(program)
        for plan in fusions:
            verdicts += _apply(program, plan, replaced)
        replaced.finish()
        return PassResult(bool(fusions), counts, tuple(verdicts))


class _ScatterPlanner:
    """Decides scatter by scatter, in program order; `declined` are verdicts on matmuls that could not join one."""

    def __init__(self, program: Program, scatters: Sequence[Scatter], gate: Gate) -> None:
        self.gate, self.declined = gate, list[Verdict]()
        order = Order(program.graph)
        self.written = order.rewritten()
        self.products = {scatter.collective.node: product_before(scatter.whole) for scatter in scatters}
        matmuls = {product.matmul for product in self.products.values() if isinstance(product, Product)}
        self.spare = SpareMatmuls(order, gate.costs, self.written, matmuls)

    def plan(self, scatter: Scatter) -> MatmulScatter | list[Verdict]:
        """The collective matmul that a scatter becomes, or verdicts on it and on its matmul."""
        start = scatter.collective
        product = self.products[start.node]
        if not isinstance(product, Product):
            return [left(start, NO_MATMUL, str(product))]

        def refused(reason: str, detail: str) -> list[Verdict]:
            return [
                left(start, reason, detail),
                Verdict.of(product.matmul, Outcome.LEFT, reason, detail=f"{start.node.name}: {detail}"),
            ]

        if (reader := _another_reader(scatter, product)) is not None:
            return refused(USED, f"{reader.name} reads {product.matmul.name}")
        if rewritten := [node.name for node in (product.operand, *product.beside) if node in self.written]:
            return refused(WRITTEN, ", ".join(rewritten))
        dim = product.result_dim(scatter.dim, scatter.ranks)
        if dim is None:
            return refused(SUMMED, f"dim {scatter.dim} of {scatter.whole.name} over {scatter.ranks} ranks")
        choice, meanwhile = self._choice(scatter, product, dim)
        if not isinstance(choice, Choice):
            return refused(*choice)
        self.spare.take(meanwhile)
        self.gate.take(start, [product.matmul, *(spare.matmul for spare in meanwhile)])
        return MatmulScatter(scatter, product, dim, choice, tuple(meanwhile))

    def _choice(self, scatter: Scatter, product: Product, dim: int) -> tuple[Choice | tuple[str, str], list[Spare]]:
        """How to run, if it pays, and what to compute while something still travels."""
        start = scatter.collective
        alone = self._forecasts(scatter, product, dim, 0.0)
        travel = self.gate.costs.travel[start.node]
        exposed = next((found.exposed for found in alone.considered if found.form in ANYWHERE), travel)
        meanwhile, declined = list[Spare](), list[tuple[fx.Node, str]]()
        if exposed > LEAST_GAIN * alone.plain:
            meanwhile, declined = self.spare.near(start.node, exposed)
        found = self._forecasts(scatter, product, dim, self.spare.seconds(meanwhile)) if meanwhile else alone
        choice = self.gate.judge(start, found)
        if not isinstance(choice, Choice) or choice.form not in ANYWHERE:
            return choice, []
        self.declined += [Verdict.of(node, Outcome.LEFT, why, detail=start.node.name) for node, why in declined]
        return choice, meanwhile

    def _forecasts(self, scatter: Scatter, product: Product, dim: int, meanwhile: float) -> Forecasts:
        start, gate = scatter.collective, self.gate
        return forecast_scatter(
            gate.machine,
            start.group,
            scatter.ranks,
            tensor_bytes(scatter.whole.meta["val"]),
            gate.costs.compute.get(product.matmul, 0.0),
            size_hint(product.shape[dim]) // scatter.ranks,
            gate.forms_of(start.group),
            gate.pieces,
            each=rows_of_each(product.shape, dim),
            meanwhile_seconds=meanwhile,
        )


def _another_reader(scatter: Scatter, product: Product) -> fx.Node | None:
    """Whoever reads the matmul's result or a view of it on the way, beside what leads to the scatter."""
    way = _way(scatter, product)
    between = way - {scatter.result, *scatter.also}
    return next((user for node in between for user in node.users if user not in way), None)


def _way(scatter: Scatter, product: Product) -> set[fx.Node]:
    return {*product.nodes, *scatter.nodes, *scatter.also} - {product.operand, product.other}


def _apply(program: Program, plan: MatmulScatter, replaced: Replacements) -> list[Verdict]:
    """Put the collective matmul where the scatter started."""
    scatter, product, start = plan.scatter, plan.product, plan.scatter.collective
    holders = (scatter.result, *scatter.also)

    pairs = [spare.matmul.args for spare in plan.meanwhile]
    raise_above(start.node, [node for spare in plan.meanwhile for node in spare.raises])

    def fused(left: Tensor, operands: Sequence[Tensor | None], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        right, bias, *scales = shaped(product, operands)
        left = left if product.operand_shape is None else left.reshape(product.operand_shape)
        spelling: dict[str, Any] = {
            "dim": plan.dim,
            "ranks": scatter.ranks,
            "group": start.group,
            "reduce_op": scatter.reduce_op,
            "form": plan.choice.form,
            "chunks": plan.choice.chunks,
            "bias": bias,
            "scales": scales if product.scales is not None else (),
        }
        if pairs:
            made, *others = matmul_scatter_meanwhile(left, right, spelled_product(product), pairs, **spelling)
        else:
            made, others = matmul_scatter(left, right, spelled_product(product), **spelling), []
        return [*(viewed(made, node) for node in holders), *others]

    inputs = (product.operand, (product.other, product.bias, *(product.scales or (None, None))), pairs)
    left, operands, pairs = fx.map_arg(inputs, lambda node: current(replaced, node))
    results = splice(program, fused, left, operands, pairs, before=start.node, like=start.node)
    for node, result in zip((*holders, *(spare.matmul for spare in plan.meanwhile)), results, strict=True):
        replaced.replace(node, result)
    for node in sorted(node for spare in plan.meanwhile for node in spare.sinks):
        start.node.prepend(node)
    for node in sorted(_way(scatter, product) - replaced.new.keys(), reverse=True):
        replaced.drop(node)
    detail = f"{plan.choice}, with {product.matmul.name}" + (f", meanwhile {plan.others}" if plan.meanwhile else "")
    said = f"{product.equation} with {start.node.name}, {plan.choice.form}"
    return [
        Verdict.of(start.node, Outcome.FUSED, IN_PIECES, detail=detail, bytes=start.bytes),
        Verdict.of(product.matmul, Outcome.FUSED, IN_PIECES, detail=said),
        *(Verdict.of(spare.matmul, Outcome.FUSED, MEANWHILE, detail=start.node.name) for spare in plan.meanwhile),
    ]
