"""Matmuls whose results are reduce-scattered, computed piece by piece while the pieces before travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from crossfade.communicate.pipelines import (
    PIPELINED,
    WRITTEN,
    Choice,
    Gate,
    PipelinePass,
    current,
    left,
    shaped,
    spelled_product,
    viewed,
)
from crossfade.cost.pipelined import forecast_scatter, rows_of_each
from crossfade.graph.gathers import Scatter, find_scatters
from crossfade.graph.matmuls import Product, product_before
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, PassResult, Verdict
from crossfade.graph.pipelined import matmul_scatter
from crossfade.graph.program import Program, size_hint, tensor_bytes
from crossfade.graph.splice import Replacements, splice

NO_MATMUL = "no matmul makes what it scatters"
USED = "something else reads the matmul's result before it is scattered"
SUMMED = "the parts are no equal parts of one dim of the matmul"


@dataclass(frozen=True)
class ScatterPipeline:
    """One reduce-scatter, the matmul that it becomes one with, along which dim of it, and how that runs."""

    scatter: Scatter
    product: Product
    dim: int
    choice: Choice

    def __str__(self) -> str:
        product = f"{self.product.matmul.name} {self.product.equation}"
        return f"{self.scatter.collective.node.name} along dim {self.dim} of {product}: {self.choice}"


@dataclass(frozen=True)
class PipelineScatters(PipelinePass):
    """Compute in pieces what is reduce-scattered, and let each piece travel while the next is computed.

    The reduce-scatter (sum or mean), in whatever spelling, and the matmul that makes its input become one operator, in
    which each rank computes the others' parts first and its own last. `machine`, `form`, `chunks`, `forms` and
    `measured` are those of `pipeline-gathers`.

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

    name = "pipeline-scatters"
    numerics = Numerics.REASSOCIATES

    def plan(self, program: Program) -> tuple[list[ScatterPipeline], list[Verdict]]:
        """Choose what becomes a pipeline, and say why the rest does not; pure."""
        scatters, verdicts = find_scatters(program.graph)
        if not scatters:
            return [], verdicts
        gate = self.gate(program)
        written = Order(program.graph).rewritten()
        pipelines = []
        for one in scatters:
            found = _plan_one(one, gate, written)
            if isinstance(found, ScatterPipeline):
                pipelines.append(found)
            else:
                verdicts += found
        return pipelines, verdicts

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        pipelines, verdicts = self.plan(program)
        counts = {"pipelines": len(pipelines), "left": len({verdict.subject for verdict in verdicts})}
        replaced = Replacements(program)
        for one in pipelines:
            verdicts += _apply(program, one, replaced)
        replaced.finish()
        return PassResult(bool(pipelines), counts, tuple(verdicts))


def _plan_one(one: Scatter, gate: Gate, written: set[fx.Node]) -> ScatterPipeline | list[Verdict]:
    """The pipeline that a scatter becomes, or verdicts on it and on its matmul."""
    start = one.collective
    product = product_before(one.whole)
    if not isinstance(product, Product):
        return [left(start, NO_MATMUL, str(product))]

    def refused(reason: str, detail: str) -> list[Verdict]:
        return [
            left(start, reason, detail),
            Verdict.of(product.matmul, Outcome.LEFT, reason, detail=f"{start.node.name}: {detail}"),
        ]

    if (reader := _another_reader(one, product)) is not None:
        return refused(USED, f"{reader.name} reads {product.matmul.name}")
    if rewritten := [node.name for node in (product.operand, *product.beside) if node in written]:
        return refused(WRITTEN, ", ".join(rewritten))
    dim = product.result_dim(one.dim, one.ranks)
    if dim is None:
        return refused(SUMMED, f"dim {one.dim} of {one.whole.name} over {one.ranks} ranks")
    found = forecast_scatter(
        gate.machine,
        start.group,
        one.ranks,
        tensor_bytes(one.whole.meta["val"]),
        gate.costs.compute.get(product.matmul, 0.0),
        size_hint(product.shape[dim]) // one.ranks,
        gate.forms_of(start.group),
        gate.pieces,
        each=rows_of_each(product.shape, dim),
    )
    choice = gate.judge(start, found)
    if not isinstance(choice, Choice):
        return refused(*choice)
    return ScatterPipeline(one, product, dim, choice)


def _another_reader(one: Scatter, product: Product) -> fx.Node | None:
    """Whoever reads the matmul's result or a view of it on the way, beside what leads to the scatter."""
    way = _way(one, product)
    return next((user for node in way - {one.result, *one.also} for user in node.users if user not in way), None)


def _way(one: Scatter, product: Product) -> set[fx.Node]:
    return {*product.nodes, *one.nodes, *one.also} - {product.operand, product.other}


def _apply(program: Program, plan: ScatterPipeline, replaced: Replacements) -> list[Verdict]:
    """Put the pipeline where the scatter started."""
    one, product, start = plan.scatter, plan.product, plan.scatter.collective
    holders = (one.result, *one.also)

    def pipeline(left: Tensor, operands: Sequence[Tensor | None]) -> list[Tensor]:
        right, bias, *scales = shaped(product, operands)
        made = matmul_scatter(
            left if product.operand_shape is None else left.reshape(product.operand_shape),
            right,
            spelled_product(product),
            dim=plan.dim,
            ranks=one.ranks,
            group=start.group,
            reduce_op=one.reduce_op,
            form=plan.choice.form,
            chunks=plan.choice.chunks,
            bias=bias,
            scales=scales if product.scales is not None else (),
        )
        return [viewed(made, node) for node in holders]

    inputs = (product.operand, (product.other, product.bias, *(product.scales or (None, None))))
    left, operands = fx.map_arg(inputs, lambda node: current(replaced, node))
    results = splice(program, pipeline, left, operands, before=start.node, like=start.node)
    for node, result in zip(holders, results, strict=True):
        replaced.replace(node, result)
    for node in sorted(_way(one, product) - replaced.new.keys(), reverse=True):
        replaced.drop(node)
    detail = f"{plan.choice}, with {product.matmul.name}"
    said = f"{product.equation} with {start.node.name}, {plan.choice.form}"
    return [
        Verdict.of(start.node, Outcome.FUSED, PIPELINED, detail=detail, bytes=start.bytes),
        Verdict.of(product.matmul, Outcome.FUSED, PIPELINED, detail=said),
    ]
