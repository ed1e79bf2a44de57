"""A compiled training step: called with a batch, it trains the user's model and optimizer and returns the loss."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from crossfade.capture.divide_batch import as_batch
from crossfade.compile.built import Built
from crossfade.compile.compiler import StepCompiler
from crossfade.compile.dynamic import Dynamic
from crossfade.compile.fit_memory import StepMemory
from crossfade.compile.habits import already_stepped
from crossfade.compile.options import Exchange
from crossfade.compile.phases import PhaseRecords
from crossfade.compile.place import Place
from crossfade.compile.planned import plan_of
from crossfade.compile.profiled import Profiled
from crossfade.compile.programs import Programs, Ready
from crossfade.compile.step_inputs import StepInputs, earlier_inputs
from crossfade.cost.timeline import Timeline
from crossfade.errors import CrossfadeError, RankFailedError
from crossfade.execute.executable import Executable
from crossfade.execute.stopwatch import Stopwatch
from crossfade.graph.private import group_named, mark_optimizer_stepped
from crossfade.graph.program import OutputKind, Program
from crossfade.ranks import checkpoint
from crossfade.report.report import Report
from crossfade.shard.tensor.parts import Parts
from crossfade.tracebacks import users_frames

log = logging.getLogger("crossfade")


class Step:
    """One training step as one graph; made by `crossfade.compile_step`.

    Calling it runs forward, loss, backward, gradient exchange and optimizer, changes the model's parameters and
    buffers and the optimizer's state in place, and returns the loss (of the whole batch, equal on every rank).
    A batch of another shape, a changed optimizer option, a switch between `train()` and `eval()`, and a change of
    anything else that the forward or the loss reads, captures again.
    Parameters' `.grad` stay as they are, None as a rule: gradients live inside the step. So `optimizer.step()` after it
    does nothing, and `optimizer.zero_grad()` neither.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compiler: StepCompiler | None = None,
        place: Place | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._compiler, self._place = compiler, place or Place()
        self._closed, self._turn = False, threading.RLock()
        self._calls = 0
        self._inputs = StepInputs(model, optimizer, self._place)
        dynamic = Dynamic.of(compiler.job.options, self._place) if compiler is not None else Dynamic(False)
        self._programs = Programs(self._place, self._inputs, dynamic)
        self._last: Ready | None = None
        self._profiled: Profiled | None = None
        self.steps = 0
        self.outputs: dict[str, Tensor] = {}

    def become(self, other: Step) -> None:
        """Go on as another step of the same model, compiled meanwhile; what this one has counted stays.

        >>> step = Step(nn.Linear(2, 1), None)
        >>> step.steps = 3
        >>> step.become(Step(step.model, None))
        >>> step.steps
        3
        """
        for name, value in vars(other).items():
            if name not in ("steps", "outputs", "_turn", "_calls"):
                setattr(self, name, value)

    @property
    def report(self) -> Report:
        """What became of every collective of the program that ran last; after `profile`, with what it measured."""
        built = self._latest("report")
        return built.report if self._profiled is None else self._profiled.added_to(built)

    @property
    def program(self) -> Program:
        """The program that ran last."""
        return self._latest("program").program

    @property
    def pipeline(self) -> PhaseRecords:
        """The phases that compiled it and the passes that they ran, as they ran; `print` shows the compiler."""
        return self._latest("pipeline").phases

    @property
    def memory(self) -> StepMemory:
        """What the program that ran last holds, computes again and moves to the host, where `memory=`, `recompute=` or
        `offload=` was given."""
        found = self._latest("memory").memory
        if found is None:
            raise CrossfadeError(
                "the memory of a step without a budget",
                expected="compile_step(memory=...), which tells what a step holds and what it computes again",
                remedy="pass a budget, or read step.report: with a machine it shows what is alive when",
            )
        return found

    @property
    def captures(self) -> int:
        """How many programs were captured so far: one for each shape of batch and setting."""
        return self._programs.captures

    def _latest(self, what: str) -> Built:
        if self._last is None:
            raise RuntimeError(
                f"nothing captured yet: call the step once, or step.prepare(*batch), then ask for the {what}"
            )
        return self._last.built

    def prepare(self, /, *batch: Any, **named: Any) -> Step:
        """Capture the step for batches like this one without running it; nothing of the user's is changed, except that
        with `keep_whole="auto"` the first capture splits parameters."""
        with users_frames, self._turn:
            self._last, _ = self._prepared(as_batch(batch, named))
        return self

    def close(self) -> None:
        """Give back process groups and the memory of buckets; the step cannot be called again, the model can be used.

        A step that is no longer referred to does so by itself. Each rank may close it when it likes.

            >>> import torch
            >>> step = Step(nn.Linear(2, 1), None)
            >>> step.close()
            >>> step(torch.ones(1, 2))
            Traceback (most recent call last):
            crossfade.errors.CrossfadeError: a call of a step that was closed. Remedy: compile a new one.
        """
        with self._turn:
            self._closed = True
            self._programs.clear()
            self._last = self._profiled = None
            if self._place.lease is not None:
                self._place.lease.release()

    def __call__(self, /, *batch: Any, **named: Any) -> Tensor:
        """Train on one batch and return its loss, which has no gradient: the step has done all of it.

        `step(inputs, *rest, **named)` computes `loss_fn(model(inputs), *rest, **named)`; without a loss function, or
        without `inputs`, what is named goes to the model: `step(**batch)` of a dict calls `model(**batch)`. Tensors
        that are named are split over ranks as the others are; each value of a number is captured by itself.

            >>> import torch
            >>> model = nn.Linear(2, 1)
            >>> from crossfade.compile.training import compile_step
            >>> huber = nn.functional.huber_loss
            >>> step = compile_step(model, huber, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> step(torch.ones(4, 2), torch.zeros(4, 1), delta=0.5).shape
            torch.Size([])
        """
        with users_frames, self._turn:
            batch = as_batch(batch, named)
            del named
            ready, batch = self._prepared(batch)
            self._last, values = ready, self._taken(ready, batch)
            del batch
            return already_stepped(self._train(ready, ready.executable, values))

    def with_gradients(
        self, batch: tuple[Any, ...], exchange: Exchange, earlier_for: Callable[[Built], Mapping[str, Tensor]]
    ) -> Tensor:
        """The loss of one batch where the optimizer is outside: gradients are in `outputs`, exchanged now or later.

        `earlier_for` gives those that were kept on this rank, by the names that a program has for them.
        """
        with users_frames, self._turn:
            ready, batch = self._prepared(batch, exchange)
            earlier = earlier_for(ready.built) if exchange == "with-earlier" else {}
            given = earlier_inputs(ready.built.program, earlier)
            self._last, values = ready, self._taken(ready, batch)
            return self._train(ready, ready.executable, values | given)

    def profile(self, /, *batch: Any, **named: Any) -> Timeline:
        """Train on one batch as a call does, and return what this rank did when; see `crossfade.execute.stopwatch`.

        The first step makes optimizer state and the memory of buckets: profile a later one, on every rank. `report` has
        it from then on; the first rank's report has the timelines of all ranks, on one clock.

            >>> import torch
            >>> from crossfade.compile.training import compile_step
            >>> model = nn.Linear(2, 1)
            >>> step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> timeline = step.profile(torch.ones(4, 2), torch.zeros(4, 1))
            >>> step.report.measured == timeline
            True
        """
        with users_frames, self._turn:
            batch = as_batch(batch, named)
            del named
            ready, batch = self._prepared(batch)
            self._last, values = ready, self._taken(ready, batch)
            del batch
            stopwatch = Stopwatch(ready.executable)
            self._train(ready, stopwatch, values)
            self._profiled = Profiled.of(ready.built, stopwatch, self._place, self._together("gather the timelines"))
        return stopwatch.timeline

    @users_frames
    def __getstate__(self) -> None:
        """Refuse to be pickled or copied: what lasts is in `state_dict`."""
        raise CrossfadeError(
            "a step that is pickled or copied",
            expected="its state, or the model's: a step holds process groups and programs",
            remedy="save step.state_dict() or use step.save(folder); to copy the model, copy step.model",
        )

    def _taken(self, ready: Ready, batch: tuple[Any, ...]) -> dict[str, Tensor]:
        """This rank's part of a batch, by the names of the program's inputs."""
        values = dict(zip(ready.batch_names, ready.built.layout.take(batch, self._place.part_of_batch), strict=True))
        return values | {comparison.name: comparison.given(batch, self.steps) for comparison in ready.built.comparisons}

    def _train(self, ready: Ready, executable: Executable, values: dict[str, Tensor]) -> Tensor:
        if not ready.bound.is_current():
            for other in self._programs.ready.values():  # they may hold what was replaced, and be called late or never
                other.bound.forget()
            self._create_state(ready.state_keys)
            ready.bound.look_up()
        results = self._run(executable, ready.bound.values(values))
        ready.built.numbers.advance()
        if self._compiler is not None:
            self._compiler.job.learned.not_begun.difference_update(ready.built.state_keys)
        mark_optimizer_stepped(self.optimizer)
        self.steps += 1
        named = list(zip(ready.built.program.outputs, results, strict=True))
        self.outputs = {out.name: value for out, value in named if out.kind not in (OutputKind.LOSS, OutputKind.ALIKE)}
        came = {out.name: value for out, value in named if out.kind is OutputKind.ALIKE}
        for comparison in ready.built.comparisons:
            comparison.reduced(came[comparison.name], self.steps - 1)
        return results[0]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with its whole parameters, on every rank, for evaluation or export. All ranks must enter.

        Where parameters are split, changes made to them inside are lost.

            >>> import torch
            >>> model = nn.Linear(2, 1)
            >>> step = Step(model, torch.optim.SGD(model.parameters()))
            >>> with step.gathered() as whole:
            ...     whole(torch.ones(3, 2)).shape
            torch.Size([3, 1])
        """
        if self._place.shards is None and self._place.tensor is None:
            yield self.model
            return
        with contextlib.ExitStack() as whole:
            with users_frames, self._together("gather the model"):
                whole.enter_context(self._place.gathered())
            yield self.model

    def own_parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole parameters, where the model is split over an axis by a plan.

        >>> import torch
        >>> step = Step(nn.Linear(2, 1), None)
        >>> step.own_parts({"bias": torch.ones(1)})
        {'bias': tensor([1.])}
        """
        parts = self._parts
        return {name: parts.part(name, value) if parts else value for name, value in whole.items()}

    @property
    def _parts(self) -> Parts | None:
        return self._place.tensor.parts if self._place.tensor is not None else None

    @users_frames
    def state_dict(self) -> dict[str, Any]:
        """The model, the optimizer, the number of steps and, where ranks share it, the random generator.

        What is split is there as DTensors: `torch.distributed.checkpoint` saves it from all ranks, and loads it on any
        number of them. The optimizer's state of every trained parameter is there, also before the first step. All ranks
        must call it: weights that a plan splits in blocks are put in one piece first.
        """
        self._create_all_state()
        for ready in self._programs.ready.values():
            for comparison in ready.built.comparisons:
                comparison.finish()
        members = self._place.everyone if self._place.tensor is not None else None
        with members.together("put weights in one piece") if members is not None else contextlib.nullcontext():
            return checkpoint.state_of(
                self.model,
                self.optimizer,
                steps=self.steps,
                with_random=self._compiler is None or self._compiler.shares_random_numbers,
                parts=self._parts,
            )

    @users_frames
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned here or, loaded by `torch.distributed.checkpoint`, elsewhere."""
        self._create_all_state()
        self.steps = checkpoint.restore(self.model, self.optimizer, state, parts=self._parts)
        self._inputs.forget_residuals()
        if self.steps and self._compiler is not None:
            self._compiler.job.learned.not_begun.clear()  # what was loaded has taken its first step

    @users_frames
    def save(self, folder: str | Path) -> None:
        """Write a checkpoint from all ranks; until it is complete, an earlier one in the folder stays."""
        with self._together(f"save a checkpoint to {folder}"):
            first = self._place.everyone is None or not self._place.everyone.rank
            checkpoint.save(self.state_dict(), folder, self._group(), first=first)

    @users_frames
    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint that `save` wrote, on any number of ranks, with any `data_parallel` and any plan."""
        with self._together(f"load the checkpoint in {folder}"):
            state = self.state_dict()
            checkpoint.load(state, folder, self._group())
            self.load_state_dict(state)

    @users_frames
    def save_plan(self, path: str | Path) -> None:
        """Write everything that was chosen for the programs compiled so far, for `compile_step(..., plan=path)`.

        The first rank writes it. It is text to review and to compare (`crossfade plan diff before.json after.json`),
        and the same choice gives the same bytes.

            >>> import tempfile, torch
            >>> from crossfade.compile.training import compile_step
            >>> def begin(**options):
            ...     model = nn.Linear(2, 1)
            ...     return compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), **options)
            >>> path = Path(tempfile.mkdtemp()) / "plan.json"
            >>> begin().prepare(torch.ones(4, 2), torch.ones(4, 1)).save_plan(path)
            >>> begin(plan=path)(torch.ones(4, 2), torch.ones(4, 1)).shape
            torch.Size([])
        """
        self._latest("plan")
        plan = plan_of(self._made_by().job, [(ready.batch, ready.built) for ready in self._programs.ready.values()])
        if self._place.everyone is None or not self._place.everyone.rank:
            plan.save(path)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Do something that all ranks must do now: see that they do, and say who did not where it fails."""
        self._check_open()
        if self._place.everyone is None:
            yield
            return
        self._place.everyone.agree(what, what, to=what, at=self._calls)
        try:
            with self._place.everyone.together(what):
                yield
        except RankFailedError as error:
            raise self._given_up(error) from error.__cause__

    def _given_up(self, error: RankFailedError) -> RankFailedError:
        if self._place.lease is not None:
            self._place.lease.mark_broken()
        return error

    def _check_open(self) -> None:
        """Refuse to run without the groups that the programs name."""
        if self._closed:
            raise CrossfadeError("a call of a step that was closed", remedy="compile a new one")
        if self._place.lease is not None:
            self._place.lease.check()

    def _group(self) -> Any:
        return group_named(self._place.everyones_group) if self._place.everyones_group is not None else None

    def _made_by(self) -> StepCompiler:
        assert self._compiler is not None, "a step that compile_step did not make"
        return self._compiler

    def _prepared(self, batch: tuple[Any, ...], exchange: Exchange = "now") -> tuple[Ready, tuple[Any, ...]]:
        """A program for a batch, and the batch: all samples of all ranks where these bring different numbers."""
        self._check_open()
        if self._place.shards is not None:
            self._place.shards.check()
        try:
            compiler, batch = self._made_by().given(batch, exchange)
        except RankFailedError as error:
            raise self._given_up(error) from error.__cause__
        return self._programs.program_for(compiler, batch), batch

    def _run(self, executable: Executable, inputs: list[Any]) -> tuple[Any, ...]:
        if self._place.everyone is None:
            return executable(inputs)
        self._calls += 1
        self._place.everyone.note("calls", str(self._calls))
        self._place.everyone.note("step", str(self.steps))
        try:
            return executable(inputs)
        except Exception as error:
            collective = executable.collective_at(error)
            if not collective:
                self._place.everyone.leave(f"{type(error).__name__}: {error}")
                raise
            raise self._given_up(self._place.everyone.blame(self.steps, collective, error)) from error

    def _create_state(self, wanted: Iterable[tuple[str, nn.Parameter, Collection[str]]]) -> None:
        """Give the optimizer the state that its own first step would have made, where it has none."""
        states = self.optimizer.state
        lacking = []
        for name, parameter, keys in wanted:
            state = states.get(parameter)
            if keys and (state is None or any(state.get(key) is None for key in keys)):
                lacking.append(name)
        for name, entries in (self._made_by().initial_state(lacking) if lacking else {}).items():
            if self._place.shards is not None:
                self._place.shards.create_state(name, entries)
            else:
                state = states[self.model.get_parameter(name)]
                state.update({key: value for key, value in entries.items() if state.get(key) is None})

    def _create_all_state(self) -> None:
        """State of every trained parameter, also of those that no program has stepped yet."""
        for split in (self._place.shards, self._place.tensor):
            if split is not None:
                split.check()
        keys = self._compiler.state_keys() if self._compiler is not None else {}
        self._create_state([(name, self.model.get_parameter(name), entries) for name, entries in keys.items()])

    @property
    def last_built(self) -> Built:
        """What was compiled for the batch that ran last."""
        return self._latest("program")

    def kept_memory(self) -> list[Tensor]:
        """The memory that programs keep from call to call, and write again in the next."""
        return self._inputs.kept_memory()
