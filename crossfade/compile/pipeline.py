"""The lists of passes: what `optimize` runs over a graph that already has collectives, and what the phases of
`training_phases` and `simplify_exported` run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

import crossfade.collective_matmul  # noqa: F401 (makes the operators of matmuls in pieces run)
from crossfade.communicate.add_before_reducing import AddBeforeReducing
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_all_to_alls import BucketAllToAlls
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.buckets import BucketPass
from crossfade.communicate.compute_before_gathering import ComputeBeforeGathering
from crossfade.communicate.fuse_gathers_into_matmuls import FuseGathersIntoMatmuls
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.communicate.lower_all_to_alls import LowerAllToAlls
from crossfade.communicate.lower_averages import LowerAverages
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
from crossfade.communicate.multiply_before_gathering import MultiplyBeforeGathering
from crossfade.communicate.pair_complex_numbers import PairComplexNumbers
from crossfade.communicate.pipeline_all_to_alls import PipelineAllToAlls
from crossfade.communicate.quantize_reductions import QuantizeReductions
from crossfade.communicate.raise_gathers import RaiseGathers
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.scatter_between_blocks import ScatterBetweenBlocks
from crossfade.communicate.scatter_sliced_reductions import ScatterSlicedReductions
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.communicate.split_all_reduces import SplitAllReduces
from crossfade.compile.carriers import Carriers
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.timeline import simulate
from crossfade.graph import collectives, packing
from crossfade.graph.collective_matmul import ANYWHERE
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.private import (
    backend_of_group,
    keep_codegen,
    outside_of_tracing,
    size_of_group,
    tree_flatten,
    tree_unflatten,
)
from crossfade.graph.program import Program
from crossfade.graph.verify import accept
from crossfade.ranks.mesh import DataParallel, backend_on
from crossfade.report.expect import Expect
from crossfade.report.report import Report
from crossfade.report.strict import Judged, hold
from crossfade.schedule.overlap_communication import OverlapCommunication
from crossfade.schedule.planned_bucket_sizes import BucketSize
from crossfade.shard.average_buffers import AverageBuffers
from crossfade.shard.average_expert_gradients import AverageExpertGradients
from crossfade.shard.average_gradients import AverageGradients
from crossfade.shard.broadcast_buffers import BroadcastBuffers
from crossfade.shard.count_globally import CountGlobally
from crossfade.shard.draw_globally import DrawGlobally
from crossfade.shard.gather_again import GatherAgain
from crossfade.shard.gather_parameters import GatherParameters
from crossfade.shard.gather_row_gradients import GatherRowGradients
from crossfade.shard.gather_updates import GatherUpdates
from crossfade.shard.scatter_gradients import ScatterGradients
from crossfade.shard.synchronize_batch_norm import SynchronizeBatchNorm
from crossfade.simplify.add_matmuls import AddMatmuls
from crossfade.simplify.associate_matmuls import AssociateMatmuls
from crossfade.simplify.decompose_thin_matmuls import DecomposeThinMatmuls
from crossfade.simplify.fold_constants import FoldConstants
from crossfade.simplify.merge_common_subexpressions import MergeCommonSubexpressions
from crossfade.simplify.remove_asserts import RemoveAsserts
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from crossfade.simplify.remove_redundant_gathers import RemoveRedundantGathers
from crossfade.simplify.reorder_for_locality import ReorderForLocality
from crossfade.simplify.simplify_nodes import SimplifyNodes
from crossfade.simplify.unbatch_matmuls import UnbatchMatmuls
from crossfade.tracebacks import users_frames

Semantics = Literal["global", "per-rank"]
LossIs = Literal["auto", "mean", "sum"]
DataParallelMode = Literal["replicate", "zero1", "zero2", "zero3"]


def simplification(*, matmuls: bool = False) -> Pipeline:
    """Passes that make a captured graph smaller, bit for bit; with `matmuls`, also those that reassociate matmuls where
    that pays on the runner's machine.

    >>> simplification()
    remove-asserts
    fold-constants
    simplify-nodes
    merge-common-subexpressions
    remove-dead-code
    reorder-for-locality
    """
    nodes: list[Pass] = [UnbatchMatmuls(), SimplifyNodes()] if matmuls else [SimplifyNodes()]
    smaller = [RemoveAsserts(), FoldConstants(), *nodes, MergeCommonSubexpressions(), RemoveDeadCode()]
    faster = [AddMatmuls(), AssociateMatmuls(), DecomposeThinMatmuls()]
    return Pipeline([*smaller, *(faster if matmuls else []), ReorderForLocality()])


def batch_parallelism(
    axis: str,
    ranks: int,
    semantics: Semantics,
    *,
    can_gather: bool = True,
    micro_batches: int = 1,
    whole: bool = False,
    unproved: str = "",
    buffers: tuple[str, ...] = (),
) -> list[Pass]:
    """Passes that split a program's batch over the ranks of an axis: what the forward means then.

    Where every rank has the `whole` batch, the forward means what it does on one device; what ranks keep is made equal
    nevertheless, to the last bit. `unproved` says why the losses of parts may not make up that of the whole batch, and
    `buffers` of which buffers that is not known, for the report.
    """
    if semantics == "per-rank":
        return [BroadcastBuffers(axis)]
    if whole:
        return [AverageBuffers(axis)]
    counting = CountGlobally(axis, ranks, micro_batches, unproved)
    norms = SynchronizeBatchNorm(axis, ranks, can_gather)
    return [counting, DrawGlobally(ranks), norms, AverageBuffers(axis, buffers)]


def parameter_sharding(
    mode: DataParallelMode, axis: str, ranks: int, whole: tuple[str, ...] = ()
) -> tuple[list[Pass], list[Pass]]:
    """Passes that make parameters parts of themselves: before micro-batches are put together, and after.

    With zero3 each micro-batch gathers for itself, twice; with zero2 all use what was gathered once. The parameters
    named in `whole` stay what they are.

    >>> [[step_pass.name for step_pass in passes] for passes in parameter_sharding("zero3", "dp", 2)]
    [['gather-parameters', 'gather-again'], []]
    """
    gather: list[Pass] = [GatherParameters(axis, ranks, whole)]
    each = [*gather, GatherAgain()] if mode == "zero3" else []
    return each, gather if mode == "zero2" else []


def gradient_exchange(
    mode: DataParallelMode,
    axes: DataParallel,
    loss_is: Literal["mean", "sum"] = "mean",
    whole: tuple[str, ...] = (),
    *,
    gathers_rows: bool = False,
    gradients: bool = True,
    experts: tuple[str, ...] = (),
) -> list[Pass]:
    """Passes that put the ranks' gradients together: whole on every rank, or each rank's rows.

    `whole` names the parameters that every rank holds whole where the others are split. With `gathers_rows`, gradients
    of embeddings as rows, if every rank holds all parameters whole: for planned steps, in which these gathers do not
    stand in the way. Without `gradients` only losses are put together, and replicas keep
    their gradients for a later exchange. `experts` names the parameters whose experts are spread over the split axis.
    """
    reduce_op = "avg" if loss_is == "mean" else "sum"
    along = axes.whole if mode == "replicate" else axes.split
    by_rows = gathers_rows and mode in ("replicate", "zero1")
    rows: list[Pass] = [GatherRowGradients(along.name, along.size)] if by_rows else []
    copies = axes.copies.name if axes.copies is not None else ""
    if mode == "replicate":
        own: list[Pass] = [AverageExpertGradients(experts, axes.split.size, copies, reduce_op)] if experts else []
        return [AverageGradients(axes.whole.name, reduce_op, gradients, experts), *own, *rows]
    held = mode == "zero1" or whole
    return [ScatterGradients(axes.split.name, axes.split.size, reduce_op, held, copies, axes.whole.name), *rows]


def updates_gathered(mode: DataParallelMode, axes: DataParallel, whole: tuple[str, ...] = ()) -> list[Pass]:
    """Passes that give every rank the whole of the parameters that it holds whole, if each updated only its rows."""
    if mode == "replicate":
        return []
    gathered = mode == "zero1" or bool(whole)
    updates = [GatherUpdates(axes.split.name, axes.split.size, None if mode == "zero1" else whole)] if gathered else []
    return [*updates, PairComplexNumbers()]


def communication(narrow: Sequence[str] = ()) -> Pipeline:
    """Passes that make collectives few, early to start and late to be waited for: the ones to add to or replace.

    Along the groups named `narrow`, sums of 16 bits are split in two, to be added up in float32 when they are lowered.
    """
    return Pipeline(
        [*_fewer_and_larger(keeps_overlap=True), *spelled_out(narrow), RaiseLaunches(), SinkWaits(), RaiseGathers()]
    )


def spelled_out(narrow: Sequence[str]) -> list[Pass]:
    """Passes that say how reductions of 8 and 16 bits travel, once they are in buckets.

    >>> spelled_out(["dp"])
    [SplitAllReduces(groups=('dp',), narrow=True), QuantizeReductions()]
    """
    split: list[Pass] = [SplitAllReduces(tuple(narrow))] if narrow else []
    return [*split, QuantizeReductions()]


def _fewer() -> list[Pass]:
    return [
        MergeDuplicateCollectives(),
        MultiplyBeforeGathering(),
        AddBeforeReducing(),
        ScatterSlicedReductions(),
    ]


def _fewer_and_larger(*, keeps_overlap: bool, saturates: bool = False) -> list[Pass]:
    """Passes that make collectives fewer and larger; overlap that the program has need not be kept where the order is
    chosen afterwards, and buckets are as large as saturates their link where the machine is known."""
    fewer = _fewer()
    larger = [
        BucketAllGathers(mixed_dtypes=True, keeps_overlap=keeps_overlap, saturates=saturates),
        BucketReduceScatters(keeps_overlap=keeps_overlap, saturates=saturates),
        BucketAllReduces(keeps_overlap=keeps_overlap, saturates=saturates),
        BucketAllToAlls(mixed_dtypes=True, keeps_overlap=keeps_overlap, saturates=saturates),
    ]
    return [*fewer, *larger]


def collective_matmuls(
    backends: Mapping[str, str] | None = None,
    *,
    alike: Sequence[str] = (),
    groups: Sequence[str] = (),
    symmetric: Collection[str] = (),
) -> Pipeline:
    """Passes that run matmuls and the collectives beside them in one another's time, where that pays on the runner's
    machine.

    `backends` says what each group runs on, `symmetric` which groups have symmetric memory of CUDA devices. `alike` are
    the inputs that are the same on all ranks (names, or patterns with `*`): only from these follows what may be
    computed in parts where an all-reduce becomes a reduce-scatter and an all-gather, along `groups` if any are given.

    >>> collective_matmuls()
    compute-before-gathering
    scatter-between-blocks
    fuse-gathers-into-matmuls
    fuse-scatters-into-matmuls
    """
    forms = tuple(
        (group, ("symmetric", *ANYWHERE) if group in symmetric else ANYWHERE)
        for group in dict.fromkeys((*(backends or ()), *symmetric))
    )
    return Pipeline(
        [
            ComputeBeforeGathering(),
            ScatterBetweenBlocks(tuple(alike), tuple(groups)),
            FuseGathersIntoMatmuls(forms=forms),
            FuseScattersIntoMatmuls(forms=forms),
        ]
    )


def overlap(sizes: Mapping[Kind, BucketSize], memory_limit: int | None = None, narrow: Sequence[str] = ()) -> Pipeline:
    """Passes like `communication()`, with buckets of these sizes, in the order that pays on the runner's machine; along
    the groups named `narrow`, sums of 16 bits are split in two."""
    fewer = _fewer()
    kinds: list[tuple[type[BucketPass], Kind]] = [
        (BucketAllGathers, Kind.ALL_GATHER),
        (BucketReduceScatters, Kind.REDUCE_SCATTER),
        (BucketAllReduces, Kind.ALL_REDUCE),
        (BucketAllToAlls, Kind.ALL_TO_ALL),
    ]
    larger = [
        bucketing(
            cap_mb=_cap(kind, sizes[kind].cap_mb),
            alone_mb=sizes[kind].alone_mb,
            along=sizes[kind].along,
            keeps_overlap=False,
        )
        for bucketing, kind in kinds
        if kind in sizes
    ]
    in_pieces = [PipelineAllToAlls()] if memory_limit is None else []  # which are put together beside what they are
    ordered = OverlapCommunication(memory_limit=memory_limit)
    return Pipeline([*fewer, *larger, *spelled_out(narrow), *in_pieces, ordered])


def _cap(kind: Kind, cap: float) -> float | tuple[float, float]:
    """The most megabytes of a bucket, or of the first and of the others: the first gather has nothing to hide under."""
    return (cap / 4, cap) if kind is Kind.ALL_GATHER else cap


def lowering(carriers: Carriers, groups: Mapping[str, int], memory_limit: int | None = None) -> list[Pass]:
    """Passes that say things as each group's backend does them best; after bucketing, so that each bucket is one thing.

    `groups` has the sizes of the program's groups. Within a memory limit gathers stay whole: to put one together needs
    its memory twice.

    >>> [lowered.spelling for lowered in lowering(Carriers({"dp": "gloo", "tp": "nccl"}, None), {"dp": 2, "tp": 2})]
    ['lower-averages', 'lower-reduce-scatters', 'lower-all-to-alls', 'lower-all-gathers']
    """
    gloo, exchanged = carriers.on_gloo, carriers.exchanged
    passes: list[Pass] = [LowerAverages(gloo)] if gloo else []
    pieces = _one_if_alike(carriers.pieces(groups))
    passes += [LowerReduceScatters(exchanged, pieces)] if exchanged else []
    passes += [LowerAllToAlls(exchanged, pieces)] if gloo else []
    gathered = math.inf if memory_limit is not None or not gloo else _one_if_alike(carriers.gather_pieces(groups))
    return passes + ([LowerAllGathers(gloo, gathered)] if gloo else [])


def _one_if_alike(pieces: tuple[float, ...]) -> float | tuple[float, ...]:
    """One number where all are alike."""
    return pieces[0] if len(set(pieces)) == 1 else pieces


def optimization(
    backends: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    groups: Mapping[str, int] | None = None,
) -> Pipeline:
    """What `optimize` runs over a graph that already has collectives, among groups of these sizes; along a group whose
    size is not given, exchanges go in pieces as if there were no machine. For a machine, run it with `planning_for` as
    the context.

    >>> optimization({"dp": "gloo"}).without("reorder-for-locality", "bucket-all-gathers")[-2]
    LowerAllToAlls(groups=('dp',), piece_mb=1.0)
    """
    carriers = Carriers(backends or {}, machine)
    lowered = lowering(carriers, groups or {})
    needed = [RemoveRedundantGathers()]
    if machine is None:
        return simplification() + needed + communication() + lowered
    larger = _fewer_and_larger(keeps_overlap=False, saturates=True)
    ordered = [*larger, PipelineAllToAlls(), OverlapCommunication()]
    return simplification(matmuls=True) + needed + collective_matmuls(backends) + ordered + lowered


def planning_for(machine: Machine | None, backends: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The context in which passes plan for a machine, as these backends use it."""
    return {} if machine is None else {"machine": Carriers(backends or {}, machine).planned_for(machine)}


def copy_kernel(program: Program) -> dict[str, str]:
    """Which code packs a program's buckets, for its report."""
    packs = program.graph.find_nodes(op="call_function", target=packing.OPERATOR)
    used = {packing.implementation(pack.meta["val"].device) for pack in packs}
    return {"copy kernel": ", ".join(sorted(used))} if used else {}


def backends_here(program: Program) -> dict[str, str]:
    """What each group of a program runs on in this process, where it exists here."""
    found = {}
    for collective in collectives.find(program.graph):
        if collective.group not in found and (configured := backend_of_group(collective.group)) is not None:
            found[collective.group] = backend_on(collective.inputs[0].meta["val"].device.type, configured)
    return found


def _with_sizes_here(program: Program) -> Program:
    """A program that knows the sizes of the groups that exist in this process, where nothing else says them."""
    unknown = [
        collective.group for collective in collectives.find(program.graph) if not program.groups.get(collective.group)
    ]
    here = {group: size for group in dict.fromkeys(unknown) if (size := size_of_group(group)) is not None}
    return replace(program, groups={**program.groups, **here}) if here else program


@dataclass(frozen=True)
class Optimized:
    """An improved graph and the account of what was done."""

    module: fx.GraphModule
    report: Report


@users_frames
def optimize(
    module: fx.GraphModule,
    *,
    passes: Sequence[Pass] | None = None,
    groups: Mapping[str, int] | None = None,
    backends: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    strict: Expect | Mapping[str, Any] | str | bool | None = None,
) -> Optimized:
    """Improve any FX graph of ATen ops and functional collectives; `module` is left as it is.

    The result takes the same inputs and returns the same structure. `groups` gives the sizes of process groups that
    the graph names; by default those that the graph's own ops say, or that torch knows in this process. `backends`
    gives what each group runs on, by default as torch knows it here: gloo's reduce-scatters become all-to-alls and
    local sums, which is twice as fast; `backends={}` keeps them. A `machine` adds what pays only on some, and puts
    nodes in the order that is predicted to be fastest on it. With `passes`, exactly those run: a list, or one like
    `crossfade.compile.pipeline.optimization().without("bucket-all-reduces")`. With `strict`, what falls short of an
    `Expect` (in any of its forms, see docs/strict.md) is an error.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[2] = input("x")
        ... y: f32[2] = input("y")
        ... a: f32[2] = c10d.all_reduce(x, "sum", "0")
        ... wait_a: f32[2] = c10d.wait_tensor(a)
        ... b: f32[2] = c10d.all_reduce(y, "sum", "0")
        ... wait_b: f32[2] = c10d.wait_tensor(b)
        ... return output("a", wait_a), output("b", wait_b)
        ... ''', groups={"0": 2})
        >>> print(optimize(program.module()).report)
        Program: 2 collectives (16 B) became 1 (16 B)...
    """
    expect = Expect.of(strict)
    structure: Any = module.graph.output_node().args[0]
    _, spec = tree_flatten(structure)
    before = _with_sizes_here(accept(module, groups=groups))
    if backends is None:
        backends = backends_here(before)
    if passes is None:
        passes = optimization(backends, machine, before.groups)
    with outside_of_tracing():  # AOTAutograd calls its compilers in a mode in which constants have no numbers
        after = run_passes(before, passes, context=planning_for(machine, backends))
    report = Report.of(before, after, title=type(module).__name__, facts=copy_kernel(after))
    if expect is not None and machine is not None:
        report = report.with_timelines(predicted=simulate(after, estimate(after, machine)))
    hold(expect, Judged(report, before, after))
    result = after.copy()
    result.output_node.args = (tree_unflatten(result.results, spec),)
    keep_codegen(result.graph, module.graph)
    return Optimized(result.module(), report)
