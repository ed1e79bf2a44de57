"""`compile_gradients`: forward, loss, backward and exchange as one graph, for an optimizer outside of it."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from crossfade.capture.baked_in import BakedIn
from crossfade.capture.divide_batch import BatchIs, as_batch
from crossfade.capture.optimizer import NoOptimizer, parameter_names
from crossfade.capture.training import LossFunction, check_model
from crossfade.compile.built import Built
from crossfade.compile.compiler import StepCompiler
from crossfade.compile.habits import check_model_and_loss, inside_compiled
from crossfade.compile.job import Job
from crossfade.compile.options import Exchange, Options
from crossfade.compile.phases import PhaseRecords, Phases
from crossfade.compile.pipeline import DataParallelMode, LossIs, Semantics
from crossfade.compile.place import Place
from crossfade.compile.reduce_dtype import ReduceDtype, sent_as
from crossfade.compile.step import Step
from crossfade.compile.tensor_parallel import check_not_split
from crossfade.compile.training_phases import GRADIENTS
from crossfade.compile.waiting_gradients import WaitingGradients
from crossfade.cost.machine import Machine
from crossfade.errors import CrossfadeError, NotYetError, OptimizerError
from crossfade.execute.compile_regions import Execute
from crossfade.graph.passes import Pass
from crossfade.graph.program import Program
from crossfade.ranks.mesh import MeshLike
from crossfade.report.expect import Expect
from crossfade.report.report import Report
from crossfade.tracebacks import users_frames

log = logging.getLogger("crossfade")


@users_frames
def compile_gradients(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    mesh: MeshLike = None,
    *,
    data_parallel: DataParallelMode = "replicate",
    optimizers: Sequence[Optimizer] = (),
    batch: BatchIs = "global",
    accumulate: int = 1,
    semantics: Semantics = "global",
    loss_is: LossIs = "auto",
    machine: Machine | str | None = None,
    memory_limit: int | None = None,
    reduce_dtype: ReduceDtype = None,
    passes: Sequence[Pass] | None = None,
    phases: Phases | None = None,
    check_every: int = 1,
    dynamic: bool | None = None,
    execute: Execute = "auto",
    timeout: float = 60.0,
    strict: Expect | Mapping[str, Any] | str | bool | None = None,
) -> Gradients:
    """Forward, loss, backward and gradient exchange as one graph; the optimizer stays as it is, outside.

    For what `compile_step` cannot hold: LBFGS and other closures, gradient hooks, `GradScaler`, an optimizer that does
    not trace, a framework that calls the optimizer itself. What is called returns the loss; its `backward()` puts the
    gradients of the whole batch into `.grad` (adding to what is there), and the rest of the loop stays torch's. It is
    slower than `compile_step`, whose updates hide communication and are fused.

    Args:
        model: any module; see `compile_step`.
        loss_fn: as for `compile_step`.
        mesh: as for `compile_step`.
        data_parallel: `"replicate"`, or `"zero2"` and `"zero3"`: then parameters and their gradients are DTensors, and
            optimizers are built after this call, or named in `optimizers`.
        optimizers: those that were built before, where parameters are split: they are given the DTensors.
        batch: as for `compile_step`, and so are all options that follow. With `accumulate`, one call divides its batch.

    Returns:
        A callable `gradients(*batch, **named) -> loss`.

        >>> model = nn.Linear(2, 1)
        >>> gradients = compile_gradients(model, nn.functional.mse_loss)
        >>> optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = gradients(torch.ones(4, 2), torch.zeros(4, 1))
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure).item() > closure().item()
        True
    """
    check_model_and_loss(model, loss_fn)
    model = inside_compiled(model)
    options = Options(
        data_parallel=data_parallel,
        batch=batch,
        accumulate=accumulate,
        semantics=semantics,
        loss_is=loss_is,
        machine=machine,
        memory_limit=memory_limit,
        reduce_dtype=sent_as(reduce_dtype),
        passes=None if passes is None else tuple(passes),
        phases=GRADIENTS if phases is None else phases,
        check_every=check_every,
        dynamic=dynamic,
        execute=execute,
        timeout=timeout,
        expect=Expect.of(strict),
    )
    if data_parallel == "zero1":
        raise NotYetError(
            'compile_gradients with data_parallel="zero1"',
            expected="whole gradients, or gradients in parts like their parameters",
            remedy='pass "replicate" or "zero2"; ZeroRedundancyOptimizer of torch splits state by itself',
        )
    check_model(model)
    check_not_split(model)
    before, unused = parameter_names(model), NoOptimizer(model)
    place = Place.open(model, loss_fn, unused, mesh, options)
    _hand_over(optimizers, before, model)
    job = Job(model, loss_fn, unused, options, place, BakedIn([model], loss_fn))
    return Gradients(Step(model, unused, StepCompiler(job), place), place, loss_is)


class Gradients:
    """Forward, loss, backward and exchange; made by `crossfade.compile_gradients`, which explains it."""

    def __init__(self, step: Step, place: Place, loss_is: LossIs = "auto") -> None:
        self.model, self._loss_is = step.model, loss_is
        self._step, self._place = step, place
        self._handed_over: _HandedOver | None = None
        self._warned = False
        self._waiting = WaitingGradients(place.axes.whole.size if place.axes is not None else 1)
        self._deferred = 0
        self._wanted: Callable[[], bool] = lambda: True

    def __call__(self, *batch: Any, **named: Any) -> Tensor:
        """The loss of one batch, whose `backward()` adds this batch's gradients to `.grad`.

        They are computed here: without `backward()` they are lost. What is named goes where `Step` passes it.
        """
        exchange, waiting = self._exchange(), self._waiting.seen() if self._waiting else {}
        loss = self._step.with_gradients(as_batch(batch, named), exchange, self._earlier).detach()
        found = self._step.outputs
        trained = {name: p for name, p in self.model.named_parameters() if name in found and p.requires_grad}
        self._warn_of_unused()
        own = _without_aliases([found[name] for name in trained], self._step.kept_memory())
        self._step.outputs = {name: value for name, value in found.items() if name not in trained}
        if not torch.is_grad_enabled() or not trained:
            return loss
        if (shards := self._place.shards) is not None:
            own = [shards.gradient(n, g) if shards.has(n) else g for n, g in zip(trained, own, strict=True)]
        self._handed_over = _HandedOver(own, self._begun(exchange, trained, waiting))
        delivered: Tensor = _Delivery.apply(loss, self._handed_over, *trained.values())
        return delivered

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on each rank, to be exchanged by the next call outside: for accumulation, as DDP's `no_sync`.

        Until then `.grad` is each rank's own; clearing it drops what waits.

            >>> model = nn.Linear(2, 1)
            >>> gradients = compile_gradients(model, nn.functional.mse_loss)
            >>> with gradients.no_sync():
            ...     gradients(torch.ones(4, 2), torch.zeros(4, 1)).backward()
            >>> gradients(torch.ones(4, 2), torch.zeros(4, 1)).backward()
        """
        self._check_replicated()
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def exchange_when(self, wanted: Callable[[], bool]) -> None:
        """Ask a framework at every call whether gradients are to be exchanged by it: `no_sync` where not.

        >>> gradients = compile_gradients(nn.Linear(2, 1), nn.functional.mse_loss)
        >>> gradients.exchange_when(lambda: True)
        """
        self._check_replicated()
        self._wanted = wanted

    def _check_replicated(self) -> None:
        if self._place.shards is not None:
            mode, axis = self._place.mode, self._place.experts
            raise NotYetError(
                f"no_sync() with {f'data_parallel={mode!r}' if axis is None else f'experts over {axis.name}'}",
                expected='"replicate", where ranks have whole gradients to keep',
                remedy="leave it out: every call exchanges, or pass the whole batch with accumulate=",
            )

    def _exchange(self) -> Exchange:
        if self._place.axes is None:
            return "now"
        if self._deferred or not self._wanted():
            return "later"
        return "with-earlier" if self._waiting else "now"

    def _earlier(self, built: Built) -> dict[str, Tensor]:
        """What has waited for a program that exchanges it."""
        return self._waiting.for_exchange(self._put_together(built)) if self._waiting else {}

    def _put_together(self, built: Built) -> Literal["mean", "sum"]:
        return "mean" if built.layout.whole else built.mark.loss_parts.put_together(self._loss_is)

    def _begun(
        self, exchange: Exchange, trained: dict[str, nn.Parameter], waiting: dict[str, tuple[Tensor, int]]
    ) -> Callable[[Tensor], float]:
        """What a backward does first, given what the loss was multiplied by: returns what gradients are to be."""
        loss_is = self._put_together(self._step.last_built)

        def begun(weight: Tensor) -> float:
            if exchange == "later":
                return self._waiting.kept(trained, weight, loss_is, waiting)
            if exchange == "with-earlier":
                self._waiting.exchanged(waiting, weight)
            return 1.0

        return begun

    def _warn_of_unused(self) -> None:
        """Who comes from `compile_step` may leave out `backward()`: nothing would be trained, and nothing said."""
        handed_over, self._handed_over = self._handed_over, None
        if handed_over is not None and handed_over.gradients is not None and not self._warned:
            self._warned = True
            log.warning("the gradients of the last call were never used: call loss.backward(), or use torch.no_grad()")

    @property
    def report(self) -> Report:
        """What became of every collective of the program that ran last."""
        return self._step.report

    @property
    def program(self) -> Program:
        """The program that ran last."""
        return self._step.program

    @property
    def pipeline(self) -> PhaseRecords:
        """The phases that compiled it, and the passes that they ran."""
        return self._step.pipeline

    @property
    def outputs(self) -> dict[str, Tensor]:
        """What was returned beside the loss of the last batch, by name: of this rank's part."""
        return self._step.outputs

    @property
    def captures(self) -> int:
        """How many programs were captured so far."""
        return self._step.captures

    def prepare(self, *batch: Any, **named: Any) -> Gradients:
        """Capture for batches like this one without running it."""
        self._step.prepare(*batch, **named)
        return self

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with its whole parameters, for evaluation or export; all ranks must enter. See `Step.gathered`."""
        with self._step.gathered() as whole:
            yield whole

    def close(self) -> None:
        """Give back process groups and memory. See `Step.close`."""
        self._step.close()


@dataclass
class _HandedOver:
    """The gradients of one call, until `backward()` takes them."""

    gradients: list[Tensor] | None
    begun: Callable[[Tensor], float]


class _Delivery(torch.autograd.Function):
    """A loss that is known already, with gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, handed_over: _HandedOver, *parameters: Tensor) -> Tensor:
        """The loss, as if it had been computed from the parameters just now."""
        ctx.handed_over = handed_over
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, wanted: Tensor) -> tuple[Any, ...]:
        """The gradients, each times what the loss was multiplied by (a GradScaler's scale)."""
        gradients, ctx.handed_over.gradients = ctx.handed_over.gradients, None
        if gradients is None:
            raise CrossfadeError(
                "a second backward() of one loss",
                expected="one: its gradients were handed over at the first",
                remedy="call the compiled gradients again, and add up in .grad what belongs together",
            )
        if (factor := ctx.handed_over.begun(wanted)) != 1:
            wanted = wanted * factor
        if wanted.device.type != "cpu" or wanted.item() != 1:  # asking a GPU would wait for it
            gradients = [gradient * wanted.to(gradient.dtype) for gradient in gradients]
        return None, None, *gradients


def _without_aliases(gradients: Iterable[Tensor], kept: Iterable[Tensor]) -> list[Tensor]:
    """Gradients that the next call does not overwrite, and of which none is another one's memory.

    >>> bucket = torch.zeros(4)
    >>> [gradient.data_ptr() == bucket.data_ptr() for gradient in _without_aliases([bucket[:2]], [bucket])]
    [False]
    """
    lasting = {memory.untyped_storage().data_ptr() for memory in kept}
    seen: set[tuple[Any, Any]] = set()
    own = []
    for gradient in gradients:
        start = gradient.untyped_storage().data_ptr(), gradient.storage_offset()
        own.append(gradient.clone() if start[0] in lasting or start in seen else gradient)
        seen.add(start)
    return own


def _hand_over(optimizers: Sequence[Optimizer], before: Mapping[Tensor, str], model: nn.Module) -> None:
    """Give optimizers the parameters that have taken the place of those before, and refuse any that was left out."""
    now = dict(model.named_parameters())
    replaced = {old: now[name] for old, name in before.items() if now[name] is not old}
    if not replaced:
        return
    for optimizer in optimizers:
        if any(parameter in replaced for parameter in optimizer.state):
            raise OptimizerError(
                f"{type(optimizer).__name__} has state of whole parameters",
                expected="an optimizer that has not stepped yet, where parameters are split",
                remedy="compile before its first step, then load its state (torch.distributed.checkpoint)",
            )
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    if _built_before(replaced) is not None:
        gc.collect()  # it may be one that nobody uses any more
    if (stale := _built_before(replaced)) is not None:
        raise OptimizerError(
            f"{type(stale).__name__} was built before its parameters were split, and would train nothing",
            expected="optimizers of the parameters as they are now",
            remedy="build it after compile_gradients, or pass optimizers=[it]",
        )


def _built_before(replaced: Mapping[Tensor, nn.Parameter]) -> Optimizer | None:
    """An optimizer that holds parameters that are no longer the model's: torch would let it do nothing, silently."""
    optimizers = (held for held in gc.get_objects() if issubclass(type(held), Optimizer))
    return next((held for held in optimizers if not isinstance(held, NoOptimizer) and _holds(held, replaced)), None)


def _holds(optimizer: Optimizer, parameters: Mapping[Tensor, nn.Parameter]) -> bool:
    groups = vars(optimizer).get("param_groups", ())
    return any(parameter in parameters for group in groups for parameter in group["params"])
