"""What is compiled: a model with its loss and optimizer, as asked for, in its place; and how a batch is captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from crossfade.capture.baked_in import BakedIn
from crossfade.capture.constants import check_constants
from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.elementwise import Shapes, check_elementwise
from crossfade.capture.numbers import Learned
from crossfade.capture.optimizer import parameter_names
from crossfade.capture.optimizer_state import has_state
from crossfade.capture.python_draws import capture_without_draws, or_switched_off
from crossfade.capture.side_effects import as_it_was
from crossfade.capture.symbolic_sizes import SymbolicCapture
from crossfade.capture.tracing import is_about_data
from crossfade.capture.training import LossFunction, capture_forward_backward, resized
from crossfade.compile.captured import Captured
from crossfade.compile.options import Options
from crossfade.compile.place import Place
from crossfade.compile.tensor_parallel import Forward
from crossfade.errors import CaptureError
from crossfade.graph.private import known_sizes
from crossfade.graph.program import Program, rows_per_rank
from crossfade.shard.batch_dims import mark_batch_dims, needs_batch_dims
from crossfade.shard.buffer_parts import with_buffer_parts
from crossfade.shard.loss_parts import LossParts, find_loss_parts
from crossfade.shard.symbolic_parts import find_symbolic_parts

log = logging.getLogger("crossfade")


@dataclass(frozen=True)
class Job:
    """What one `compile_step` compiles."""

    model: nn.Module
    loss_fn: LossFunction | None
    optimizer: Optimizer
    options: Options
    place: Place
    baked_in: BakedIn
    learned: Learned = field(default_factory=Learned)
    """What captures have shown about the optimizer."""

    def trained(self) -> list[str]:
        """The names of the parameters that the optimizer trains."""
        names = parameter_names(self.model)
        return [names[p] for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def begins(self) -> frozenset[str]:
        """The parameters whose next step is their first, where that does something else than later ones."""
        if not self.learned.starts_from_gradients:
            return frozenset()
        trained = {self.model.get_parameter(name): name for name in self.trained()}
        unmade = {name for parameter, name in trained.items() if not has_state(self.optimizer, parameter)}
        return frozenset(unmade | self.learned.not_begun)

    def split_over(self) -> dict[str, tuple[str, ...]]:
        """The parameters of which this rank has a part, with the axes that the parts are spread over: the plan's, then
        that of rows of these."""
        place = self.place
        by_plan = place.tensor.split_over() if place.tensor is not None else {}
        rows = place.axes.split.name if place.axes is not None else ""
        found: dict[str, tuple[str, ...]] = {}
        for name in parameter_names(self.model).values():
            in_rows = place.shards is not None and place.shards.updates_rows_of(name)
            axes = [*([by_plan[name]] if name in by_plan else []), *([rows] if rows and in_rows else [])]
            if axes:
                found[name] = tuple(axes)
        return found

    def check_split(self) -> None:
        """Refuse an optimizer that needs whole parameters where this rank has parts."""
        place, names, split = self.place, parameter_names(self.model), self.split_over()
        shapes: dict[str, Shapes] = {}
        for parameter, name in names.items():
            whole = part = tuple(parameter.shape)
            if name not in split:
                continue
            if place.tensor is not None and place.tensor.parts is not None:
                whole = tuple(place.tensor.parts.whole_shape(name, parameter.shape))
            if place.shards is not None and place.shards.updates_rows_of(name):
                part = rows_per_rank(part[0], place.shards.ranks), *part[1:]
            if whole != part:
                shapes[name] = whole, part
        reasons = [] if place.tensor is None else ["tensor_parallel"]
        by_mode = f"data_parallel={place.mode!r}" if place.experts is None else f"the axis {place.experts.name}"
        reasons += [] if place.shards is None else [by_mode]
        where = " and ".join(reasons)
        check_elementwise(self.optimizer, names, shapes, learned=self.learned, begins=self.begins(), where=where)

    def layout(self, batch: tuple[Any, ...]) -> BatchLayout:
        """How a batch is divided."""
        ranks = self.place.axes.whole.size if self.place.axes else 1
        return BatchLayout.of(batch, ranks=ranks, accumulate=self.options.accumulate, given=self.options.batch)

    def capture(
        self, batch: tuple[Any, ...], layout: BatchLayout, symbolic: SymbolicCapture | None = None
    ) -> tuple[Program, LossParts]:
        """Forward, loss and backward on one micro-batch of a rank, and how the losses of such parts make up the whole.

        Where it is to mean what one device would compute on the whole batch, it is captured once more on a larger
        batch: by comparison it is known which dims hold samples, and how the loss is reduced. With `symbolic`, sizes
        are symbols where the model lets them be.
        """
        trained, size = self.trained(), layout.micro_batch_size
        program = self._captured(batch, layout, size, trained, symbolic)
        check_constants(program.constants, self.model, self.baked_in.path_of)
        if layout.whole:
            return program, LossParts(None)
        times = layout.ranks if layout.ranks > 1 else layout.accumulate
        if times == 1 or self.options.semantics == "per-rank":
            return program, LossParts(None)
        if symbolic is not None:
            larger = self._larger(batch, layout, trained, times, symbolic)
            return program, find_symbolic_parts(
                program,
                larger,
                times,
                trained,
                hints=symbolic.sizes.hints,
                samples=symbolic.sizes.samples,
                several_ranks=layout.ranks > 1,
                micro_batches=layout.accumulate > 1,
            )
        needed = layout.ranks > 1 and needs_batch_dims(program)
        larger = self._captured(batch, layout, size * times, trained if needed else (), with_sources=False)
        if needed:
            mark_batch_dims(program, larger)
        several = layout.accumulate > 1
        parts = find_loss_parts(program, larger, times, trained, micro_batches=several)
        if layout.ranks > 1:
            parts = with_buffer_parts(parts, program, larger, times, micro_batches=several)
        return program, parts

    def _warn_of(self, changed: Mapping[str, str], program: Program, capture: Callable[[], Program]) -> None:
        """Warn of what code changes beside computing, if it computes something else from how that is now."""
        mark = Captured.of((program, LossParts(None)), self.model, None).mark()
        try:
            with as_it_was([self.model, self.loss_fn], told=False):
                again = Captured.of((capture(), LossParts(None)), self.model, None)
        except Exception:  # whatever it met of what only the first capture can read
            again = None
        if again is not None and mark.is_of(again):
            return
        for path, how in changed.items():
            log.warning(
                "%s %s by the forward or the loss, which run only when a step is captured: every step computes with "
                "what it was then. Keep it in a buffer of the model, or pass it with the batch, as a tensor", path, how
            )  # fmt: skip

    def _larger(
        self, batch: tuple[Any, ...], layout: BatchLayout, trained: Sequence[str], times: int, symbolic: SymbolicCapture
    ) -> Program | None:
        """The program on a larger batch, where it does not follow from the program itself."""
        if symbolic.sizes.samples is not None:
            return None
        larger = SymbolicCapture(symbolic.sizes.times_as_many(times))
        return self._captured(batch, layout, layout.micro_batch_size, trained, larger)

    def _captured(
        self,
        batch: tuple[Any, ...],
        layout: BatchLayout,
        size: int,
        trained: Sequence[str],
        symbolic: SymbolicCapture | None = None,
        *,
        with_sources: bool = True,
    ) -> Program:
        """One capture; another one where the model fixes sizes that were to be symbols."""
        tensor, place, generators = self.place.tensor, self.place, self.baked_in.generators()

        def run_code(forward: Forward | None) -> Program:
            return capture_forward_backward(
                self.model,
                self.loss_fn,
                batch,
                batch_size=size,
                trained=trained,
                layout=layout,
                plain_norms=layout.ranks > 1 and self.options.semantics == "global",
                forward=forward,
                sizes=symbolic.sizes if symbolic is not None else None,
                lines=symbolic.lines if symbolic is not None else None,
                with_sources=with_sources,
                name_of=self.baked_in.path_of,
            )

        while True:
            try:
                forward = None
                if tensor is not None:
                    export = partial(tensor.forward, resized(batch, size, layout))
                    forward = capture_without_draws(export, self.model, generators)
                place.begin_rows(self.options.keep_whole)
                capture = partial(run_code, forward)
                with as_it_was([self.model, self.loss_fn]):
                    changed = self.baked_in.watching_code() if tensor is None else dict
                    program = capture_without_draws(capture, self.model, generators)
                    if found := self.baked_in.untold(changed()):
                        self._warn_of(found, program, capture)
            except CaptureError as error:
                if not is_about_data(error) or not (remedy := or_switched_off(self.model, "layerdrop")):
                    raise
                raise CaptureError(error.found, expected=error.expected, remedy=error.remedy + remedy) from error
            known = known_sizes(program.fake_mode) if symbolic is not None else {}
            fixed = {name: number for name, number in known.items() if symbolic and name in symbolic.sizes.hints}
            if symbolic is None or not fixed:
                return program
            symbolic.fix(fixed)
            if not symbolic.sizes.hints:
                raise CaptureError(
                    f"the model fixes every size that differs: {', '.join(symbolic.fixed)}",
                    remedy="pad batches to few sizes",
                )
