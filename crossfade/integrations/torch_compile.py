"""`torch.compile(model, backend="crossfade")`: our passes on the graphs that torch.compile captures, then Inductor.

torch finds the backend by its entry point, so nothing needs to be imported:

compiled = torch.compile(model, backend="crossfade")
loss_fn(compiled(inputs), targets).backward()
for report in crossfade.reports():
    print(report)
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from crossfade.compile.pipeline import backends_here, copy_kernel, optimization
from crossfade.errors import CaptureError, CrossfadeError, VerifyError
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.history import Outcome, PassRecord, Verdict
from crossfade.graph.passes import Numerics, Pass, run_passes
from crossfade.graph.private import (
    compile_id,
    compile_through_autograd,
    compile_with_inductor,
    inductor_mode,
    inductor_options,
    keep_codegen,
    outside_of_tracing,
    statically_equal,
    tree_flatten,
    tree_unflatten,
)
from crossfade.graph.program import Program
from crossfade.graph.verify import accept
from crossfade.report.report import Report

KEPT = 256
"""How many reports are kept: a process that compiles again and again keeps the last ones."""

_reports: deque[Report] = deque(maxlen=KEPT)


def reports(*, clear: bool = False) -> list[Report]:
    """What became of every graph that `torch.compile(..., backend="crossfade")` compiled in this process, the oldest
    first; the last 256 are kept. With `clear` they are forgotten once returned.

    A report's title says which graph it is: forward, backward or inference, and torch's number of the frame, as in its
    logs. A graph that was compiled without our passes has one verdict, which says why.

        >>> import torch
        >>> _ = reports(clear=True)
        >>> compiled = torch.compile(lambda x: (x * 1 + 0).relu(), backend=backend, options={"inductor": False})
        >>> compiled(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
        >>> [report.title for report in reports(clear=True)]
        ['inference ...']
    """
    found = list(_reports)
    if clear:
        _reports.clear()
    return found


def backend(
    module: fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile what Dynamo captured; `torch.compile` calls it, with its own `mode` and `options`.

    Options of ours, beside Inductor's own, which are passed on:

    - `inductor`: False runs the graphs node after node, for looking at them and where there is no compiler.
    - `passes`: exactly these run.
    - `without`: names of passes that do not run.

        >>> compiled = torch.compile(torch.nn.Linear(2, 2), backend=backend, options={"without": ["simplify-nodes"]})
    """
    wanted = _Options.of(mode, options or {})
    if wanted.inductor:
        return compile_with_inductor(module, inputs, wanted.improved, wanted.for_inductor)
    return compile_through_autograd(module, inputs, wanted.executable)


@dataclass(frozen=True)
class _Options:
    """What a user asked of the backend."""

    inductor: bool = True
    passes: Sequence[Pass] | None = None
    without: Sequence[str] = ()
    for_inductor: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, mode: str | None, given: Mapping[str, Any]) -> _Options:
        ours = {name: given[name] for name in ("inductor", "passes", "without") if name in given}
        for name, kinds, expected in _KINDS:
            if name in ours and not isinstance(ours[name], kinds):
                raise CrossfadeError(
                    f"the option {name!r} of torch.compile's backend crossfade as {ours[name]!r}",
                    expected=expected,
                    remedy="pass it so, or leave it out",
                )
        rest = {name.replace("-", "_"): value for name, value in given.items() if name not in ours}
        by_inductor = ours.get("inductor", True)
        if not by_inductor and (rest or mode):
            raise CrossfadeError(
                f"{'the mode ' + repr(mode) if mode else 'options of Inductor, ' + ', '.join(rest)}, "
                "and inductor=False",
                expected="these only where Inductor compiles",
                remedy="leave one of them out",
            )
        _check_known(rest)
        for_inductor = {**(inductor_mode(mode) if mode else {}), **rest}
        return cls(**ours, for_inductor=for_inductor)

    def improved(self, module: fx.GraphModule, phase: str) -> fx.GraphModule:
        """The graph that Inductor gets in place of the one given."""
        found = self._after_passes(module, phase, "Inductor")
        if found is None:
            return module
        _check_for_inductor(found)
        result = found.copy()
        result.output_node.args = (tree_unflatten(result.results, tree_flatten(_structure(module))[1]),)
        result.output_node.meta = dict(module.graph.output_node().meta)  # which strides and results the user sees
        keep_codegen(result.graph, module.graph)
        done = result.module()
        done.meta = dict(module.meta)
        return done

    def executable(self, module: fx.GraphModule, phase: str) -> Callable[..., Any]:
        """The graph as a function that runs it node after node."""
        found = self._after_passes(module, phase, "node after node")
        if found is None:
            return lambda arguments: fx.Interpreter(module).boxed_run(arguments)
        return Executable(found, {group: group for group in found.groups})

    def _after_passes(self, module: fx.GraphModule, phase: str, runs: str) -> Program | None:
        """The program that a graph becomes, accounted for; None where it has to stay as torch gives it."""
        facts = {"graph": phase, "runs": runs} | ({"frame": name} if (name := compile_id()) else {})
        title = f"{phase} {name}".strip()
        with outside_of_tracing(), torch.no_grad():
            try:
                before = accept(module)
            except (CaptureError, VerifyError) as error:
                _reports.append(_left_to_torch(module, title, facts, error))
                return None
            after = run_passes(before, self._passes_for(before), keep_text=False)
            _check_results(before, after)
            _reports.append(Report.of(before, after, title=title, facts={**facts, **copy_kernel(after)}))
        return after

    def _passes_for(self, program: Program) -> Sequence[Pass]:
        """The passes for a program, whose history gets what is left out.

        Nothing is packed by sizes that are symbols: each rank compiles at a size of its own choosing, and would pack
        other buckets by it.
        """
        if self.passes is not None:
            return self.passes
        left_out = list(self.without)
        if symbolic := [found for found in collectives.find(program.graph) if _has_symbols(found)]:
            left_out += [name for name in _BY_SIZE if name not in left_out]
            reason = "sizes in its graph are symbols, and ranks may have compiled it at different ones"
            remedy = "mark the size static, or compile with dynamic=False"
            verdicts = tuple(Verdict.of(found.node, Outcome.LEFT, reason, remedy=remedy) for found in symbolic)
            program.history += (_record("fixed-sizes", verdicts, len(program.graph.nodes)),)
        return optimization(backends_here(program), groups=program.groups).without(*left_out)


_BY_SIZE = ("bucket-all-gathers", "bucket-reduce-scatters", "bucket-all-reduces")


def _has_symbols(collective: collectives.Collective) -> bool:
    values = [node.meta["val"] for node in collective.inputs]
    return any(isinstance(value.numel(), torch.SymInt) for value in values)


def _record(name: str, verdicts: tuple[Verdict, ...], nodes: int) -> PassRecord:
    """What was decided before any pass ran, as a line of a program's history."""
    return PassRecord(name, name, str(Numerics.BITWISE), 0.0, False, {}, verdicts, nodes, nodes)


_KINDS: list[tuple[str, tuple[type, ...], str]] = [
    ("inductor", (bool,), "True or False"),
    ("passes", (Sequence, type(None)), "a list of passes, or a pipeline"),
    ("without", (list, tuple), "a list of names of passes"),
]


def _check_known(given: Mapping[str, Any]) -> None:
    """Refuse options that are neither ours nor Inductor's: a misspelt one would do nothing."""
    if not given:
        return
    ours, theirs = [name for name, _, _ in _KINDS], inductor_options()
    for name in given:
        if name not in theirs:
            near = difflib.get_close_matches(name, [*ours, *theirs], n=1)
            raise CrossfadeError(
                f"the option {name!r} of torch.compile's backend crossfade",
                expected=f"one of {', '.join(ours)}, or of Inductor's own",
                remedy=f"did you mean {near[0]}" if near else "leave it out",
            )


def _structure(module: fx.GraphModule) -> Any:
    """What a graph returns."""
    return module.graph.output_node().args[0]


def _check_for_inductor(program: Program) -> None:
    """Refuse what Inductor would run wrongly: it lets other values take the memory that copy engines still read."""
    carried = [found.node.name for found in collectives.find(program.graph) if found.by_copy_engines]
    if carried:
        raise CrossfadeError(
            f"{carried[0]}, an all-gather by copy engines, in a graph for Inductor",
            expected="plain all-gathers",
            remedy="leave gather-by-copy-engines out of passes, or run the graph node after node: inductor=False",
        )


def _check_results(before: Program, after: Program) -> None:
    """Refuse what the other of two graphs, or autograd, would read wrongly: it was told how results are laid out."""
    for index, (old, new) in enumerate(zip(before.results, after.results, strict=True)):
        if _described(old) != _described(new) and not _same(old.meta["val"], new.meta["val"]):
            raise CrossfadeError(
                f"the result {index} of a graph as {_described(new)} after our passes",
                expected=f"{_described(old)}, as torch.compile was told",
                remedy='leave the pass out that changes it, by options={"without": [...]}, and report the program',
            )


def _described(value: Any) -> str:
    found = value.meta["val"] if isinstance(value, fx.Node) else value
    if not isinstance(found, torch.Tensor):
        return str(found)
    return f"{found.dtype} on {found.device} of shape {tuple(found.shape)} and strides {found.stride()}"


def _same(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether tensors are laid out alike for all sizes that symbols stand for."""
    laid_out = statically_equal(tuple(old.shape), tuple(new.shape)) and statically_equal(old.stride(), new.stride())
    return laid_out and old.dtype == new.dtype and old.device == new.device


def _left_to_torch(module: fx.GraphModule, title: str, facts: dict[str, str], error: CrossfadeError) -> Report:
    """The report of a graph that our passes cannot read: torch compiles it as it is."""
    counts, nodes = collectives.count_by_kind(module.graph), len(module.graph.nodes)
    verdict = Verdict("graph", Outcome.LEFT, "compiled without our passes", detail=error.found, remedy=error.remedy)
    return Report(title, (_record("accept", (verdict,), nodes),), counts, counts, nodes, nodes, facts)
