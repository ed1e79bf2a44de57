"""The process group of an emulated fabric; what it does is described in `crossfade.emulated`."""

# torch declares each collective as several overloads; one method here serves them all.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.cost.machine import ANY_AXIS, Machine
from crossfade.emulated import values as values_of
from crossfade.emulated.clock import (
    SMALL,
    DeviceTravel,
    HostTravel,
    Together,
    Wire,
    arrive_on_device,
    sleep_until,
    travel_on_device,
)
from crossfade.emulated.messages import Messages, Receipt, Sent
from crossfade.emulated.values import Write
from crossfade.errors import MachineError, NotYetError
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.private import group_named, register_work, serve_in_python, untraced, work_of_future

NAME = "emulated"
"""What `torch.distributed` calls this backend."""

_DEVICES = ("cpu", "cuda")
_NOT_AN_AXIS = ("", "undefined", "default_pg")
_log = logging.getLogger("crossfade")
_in_use: list[Emulation] = []


class Emulation:
    """A fabric to run on: a machine, and the links between its ranks.

    `values` says whether outputs are written, `one_link` whether all axes share one physical link. Pass it, or just a
    `Machine`, as `pg_options` of `init_process_group`; groups made later run on the fabric of the default one.
    """

    def __init__(self, machine: Machine, *, values: bool = True, one_link: bool = False) -> None:
        self.machine, self.values, self.one_link = machine, values, one_link
        self.late = 0.0
        """Seconds by which collectives arrived late, in sum, because their values took longer than they did."""
        self.launched = 0
        """How many collectives were launched."""
        self._wires: dict[tuple[str, bool], Wire] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Emulation({self.machine!r}, values={self.values}, one_link={self.one_link})"

    def wire(self, axis: str, incoming: bool = False) -> Wire:
        """The link that an axis has; messages that come in have a direction of their own."""
        with self._lock:
            return self._wires.setdefault((ANY_AXIS if self.one_link else axis, incoming), Wire())

    def note_late(self, seconds: float) -> None:
        """Add up what could not be delivered in time, and say so once."""
        if not self.late:
            _log.warning("a collective came %.3g s late: its values took longer to write (values=False: none)", seconds)
        self.late += seconds


@contextlib.contextmanager
def use(machine: Machine | Emulation, *, values: bool = True, one_link: bool = False) -> Iterator[Emulation]:
    """Let emulated groups run on another fabric for a while, whatever they were made with.

    A world that is started inside needs no `pg_options`. The same training can thus be timed on one fabric after
    another.
    """
    emulation = machine if isinstance(machine, Emulation) else Emulation(machine, values=values, one_link=one_link)
    _in_use.append(emulation)
    try:
        yield emulation
    finally:
        _in_use.remove(emulation)


@contextlib.contextmanager
def world(
    machine: Machine, ranks: int, rank: int = 0, *, values: bool = True, one_link: bool = False
) -> Iterator[Emulation]:
    """Be one rank of an emulated world for a while.

    >>> from crossfade.cost.machine import Fabric, Link
    >>> fabric = Fabric(dict.fromkeys(Kind, Link(latency=1e-5, bandwidth=1.25e9)))
    >>> machine = Machine("10 Gbit/s", {"*": fabric}, flops={"float32": 5e10}, memory_bandwidth=1e10)
    >>> with world(machine, ranks=64):
    ...     tensor = torch.ones(3)
    ...     dist.all_reduce(tensor)
    >>> tensor
    tensor([64., 64., 64.])
    """
    emulation = Emulation(machine, values=values, one_link=one_link)
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=ranks, pg_options=emulation)
    try:
        yield emulation
    finally:
        dist.destroy_process_group()


def register() -> None:
    """Make `emulated` known to torch.distributed; importing this module has done so."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(_DEVICES))


@untraced
class EmulatedGroup(dist.ProcessGroup):
    """A process group whose other ranks do not exist; torch makes it for the backend `emulated`."""

    def __init__(self, rank: int, size: int, emulation: Emulation) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.emulation = emulation
        self._coalesced: list[Sent | Receipt] | None = None
        self._messages = Messages(self._arrive_with)
        serve_in_python(self, _DEVICES)

    @property
    def axis(self) -> str:
        """The mesh axis that this group runs along, as far as its description says."""
        name = self.group_desc.removeprefix("mesh_")
        return ANY_AXIS if name in _NOT_AN_AXIS else name

    def getBackendName(self) -> str:
        """What torch calls the backend."""
        return NAME

    # What torch.distributed calls, by its names; some changed theirs between 2.11 and 2.13.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> dist.Work:
        """Reduce tensors in place."""
        tensors = _listed(tensors)
        return self._launch(Kind.ALL_REDUCE, tensors, tensors, values_of.reduced(tensors, _op(opts or op), self.size()))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce tensors in place on one rank."""
        tensors = _listed(tensors)
        reduction = _op(opts) if hasattr(opts, "reduceOp") else _op(op)
        mine = self._is_root(opts)
        write = values_of.reduced(tensors, reduction, self.size()) if mine else None
        return self._launch(Kind.BROADCAST, tensors, tensors, write)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Send tensors from one rank to all: they hold them already."""
        tensors = _listed(tensors)
        return self._launch(Kind.BROADCAST, tensors, tensors, None)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather each input into a list of tensors."""
        inputs = _listed(inputs)
        lists = output_lists if isinstance(output_lists[0], (list, tuple)) else [output_lists]
        writes = [values_of.repeated(outputs, tensor) for outputs, tensor in zip(lists, inputs, strict=True)]
        outputs = [output for outputs in lists for output in outputs]
        return self._launch(Kind.ALL_GATHER, inputs, outputs, _all(writes))

    allgather_coalesced = allgather

    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather each input into one tensor."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        return self._launch(Kind.ALL_GATHER, inputs, outputs, values_of.gathered(outputs, inputs, self.size()))

    _allgather_base = all_gather_single
    all_gather_single_coalesced = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce lists of tensors; each rank keeps its own."""
        outputs = _listed(outputs)
        lists = input_lists if isinstance(input_lists[0], (list, tuple)) else [input_lists]
        own = [parts[self.rank()] for parts in lists]
        write = values_of.scattered(outputs, own, _op(opts), self.size())
        return self._launch(Kind.REDUCE_SCATTER, [part for parts in lists for part in parts], outputs, write)

    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce each input; each rank keeps its part."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        own = [values_of.own_part(source, self.size(), self.rank()) for source in inputs]
        write = values_of.scattered(outputs, own, _op(opts), self.size())
        return self._launch(Kind.REDUCE_SCATTER, inputs, outputs, write)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """Exchange parts of a tensor: part `r` goes to rank `r`."""
        if _in_equal_parts(output, output_sizes, source, input_sizes, self.size()):
            own = [values_of.own_part(source, self.size(), self.rank())]  # what every rank sends here
            return self._launch(Kind.ALL_TO_ALL, [source], [output], values_of.gathered([output], own, self.size()))
        outputs = values_of.split(output, output_sizes or [], self.size())
        inputs = values_of.split(source, input_sizes or [], self.size())
        return self._exchange(outputs, inputs, [output], [source])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Exchange tensors: number `r` goes to rank `r`."""
        return self._exchange(outputs, inputs, outputs, inputs)

    def _exchange(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> dist.Work:
        """Only what goes to others travels, which need not be alike."""
        ranks, own = self.size(), inputs[self.rank()]
        travels = max(_bytes(inputs) - own.nbytes, _bytes(outputs) - outputs[self.rank()].nbytes)
        size = travels * ranks // max(1, ranks - 1)  # as if there were as much for oneself
        return self._launch(Kind.ALL_TO_ALL, sources, results, values_of.exchanged(outputs, own), size=size)

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather each input into a list of tensors on one rank."""
        if self._is_root(opts):
            return self.allgather(output_lists, inputs)
        inputs = _listed(inputs)
        return self._launch(Kind.ALL_GATHER, inputs, [], None, size=_bytes(inputs) * self.size())

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Send each rank its tensor of a list that one rank has."""
        outputs = _listed(outputs)
        if not self._is_root(opts):
            size = _bytes(outputs) * self.size()
            return self._launch(Kind.ALL_GATHER, outputs, outputs, values_of.zeroed(outputs), size=size)
        parts = input_lists[0] if isinstance(input_lists[0], (list, tuple)) else input_lists
        write = values_of.repeated(outputs, parts[self.rank()])
        return self._launch(Kind.ALL_GATHER, parts, outputs, write)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> dist.Work:
        """Send tensors to one rank."""
        tensors = _listed(tensors)
        work = self._launch(Kind.ALL_GATHER, tensors, [], None, size=2 * _bytes(tensors), ranks=2)
        self._messages.sent(tag, tensors, work)
        return work

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Receive tensors from one rank: what this rank sends under that tag."""
        began, tensors = time.perf_counter(), _listed(tensors)
        emulation = self._emulation
        emulation.launched += 1
        ready = began + emulation.machine.fabric(self.axis).launch

        def alone() -> Sent:
            size = 2 * _bytes(tensors)
            return self._travel(ready, Kind.ALL_GATHER, [], tensors, None, size=size, ranks=2, incoming=True)

        receipt = self._messages.expected(tag, tensors, alone)
        if self._coalesced is not None:
            self._coalesced.append(receipt)
        sleep_until(ready)
        return receipt

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive tensors from any rank, which holds the same."""
        return self.recv(tensors, 0, tag)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Wait for the others."""
        device = getattr(opts, "device", None) or torch.device("cpu")
        return self._launch(Kind.ALL_REDUCE, [], [], None, device=device)

    def _start_coalescing(self, device: torch.device) -> None:
        """From now on, collectives will be waited for as one."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """What was launched since coalescing began."""
        works, self._coalesced = self._coalesced or [], None
        return Together(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _is_root(self, opts: Any) -> bool:
        return self.rank() == getattr(opts, "rootRank", opts or 0)

    @property
    def _emulation(self) -> Emulation:
        """The fabric that is in use now."""
        return _in_use[-1] if _in_use else self.emulation

    def _launch(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        write: Write | None,
        *,
        size: int | None = None,
        ranks: int | None = None,
        device: torch.device | None = None,
    ) -> Sent:
        """Start a collective, which keeps the thread for its launch; `size` is that of its larger side."""
        began = time.perf_counter()
        emulation = self._emulation
        emulation.launched += 1
        ready = began + emulation.machine.fabric(self.axis).launch
        work = self._travel(ready, kind, inputs, outputs, write, size=size, ranks=ranks, device=device)
        if self._coalesced is not None:
            self._coalesced.append(work)
        sleep_until(ready)
        return work

    def _travel(
        self,
        ready: float,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        write: Write | None,
        *,
        size: int | None = None,
        ranks: int | None = None,
        incoming: bool = False,
        device: torch.device | None = None,
    ) -> Sent:
        """Find what a collective costs, occupy the link, have its outputs written meanwhile."""
        emulation = self._emulation
        size = max(_bytes(inputs), _bytes(outputs)) if size is None else size
        link = emulation.machine.fabric(self.axis).links[kind]
        seconds = link.seconds(kind, size, self.size() if ranks is None else ranks)
        if not emulation.values and _bytes(outputs) > SMALL:
            write = None
        wire = emulation.wire(self.axis, incoming)
        device = device or _device(inputs, outputs)
        if device.type == "cuda":
            return travel_on_device(wire, device, seconds, inputs, outputs, write, blocks=not (inputs or outputs))
        return HostTravel(wire.book(ready, seconds), outputs, write, emulation.note_late)

    def _arrive_with(self, work: Sent, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Sent:
        """The arrival of a message like the one that `work` carries, at the same time."""
        emulation = self._emulation
        written = emulation.values or _bytes(outputs) <= SMALL
        write = values_of.delivered(outputs, sources) if written else None
        if isinstance(work, DeviceTravel):
            return arrive_on_device(work, sources, outputs, write)
        return HostTravel(work.due, outputs, write, emulation.note_late)


def _create(common: Any, given: Any) -> EmulatedGroup:
    """What torch.distributed calls to make a group."""
    _let_gathers_reach_python()
    return EmulatedGroup(common.group_rank, common.group_size, _emulation_of(given))


def _emulation_of(given: Any) -> Emulation:
    """The fabric of a new group: its own, the one in use, or the default group's."""
    if isinstance(given, Machine):
        return Emulation(given)
    if isinstance(given, Emulation):
        return given
    if given is not None:
        raise MachineError(
            f"pg_options of type {type(given).__name__}",
            expected="a Machine or an Emulation",
            remedy="pass one of them",
        )
    default = dist.group.WORLD
    if _in_use or isinstance(default, EmulatedGroup):
        return _in_use[-1] if _in_use else default.emulation  # type: ignore[union-attr]
    raise MachineError(
        "an emulated world has no machine",
        expected="one that says what its collectives cost",
        remedy="pass pg_options=machine to init_process_group, or call it inside `with emulated.use(machine)`",
    )


@functools.cache
def _let_gathers_reach_python() -> torch.library.Library:
    """Let gathers into a given buffer reach groups written in Python; for others it does what was done before.

    Of the functional collectives torch 2.13 sends all but this one to a Python group's methods.
    """
    library = torch.library.Library(collectives.NAMESPACE, "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", _gather_into, key)
    return library


def _gather_into(source: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    work = group_named(group_name)._allgather_base(out, source)
    # A Work written in Python would die with its Python half while C++ still holds the other.
    if isinstance(work, (HostTravel, DeviceTravel)):
        work = work_of_future(work.holding_future() if isinstance(work, DeviceTravel) else work.get_future())
    register_work(out, work)
    return out


def _listed(tensors: Any) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for tensor in found:
        if tensor.layout != torch.strided:
            raise NotYetError(
                f"a {tensor.layout} tensor in a collective", expected="a dense one", remedy="call .to_dense() first"
            )
    return found


def _in_equal_parts(output: Tensor, output_sizes: Any, source: Tensor, input_sizes: Any, ranks: int) -> bool:
    """Whether as much goes to each rank as comes from it: one copy writes all that comes."""
    if output.shape != source.shape or not source.dim() or source.shape[0] % ranks:
        return False
    equal = [source.shape[0] // ranks] * ranks
    alike = all(list(sizes or equal) == equal for sizes in (output_sizes, input_sizes))
    return alike and output.is_contiguous() and source.is_contiguous()


def _op(opts: Any) -> Any:
    """The reduction that is asked for: inside options, itself, or a sum if nothing is said."""
    return getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM)


def _all(writes: Sequence[Write]) -> Write:
    def write_all() -> None:
        for write in writes:
            write()

    return write_all


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _device(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> torch.device:
    return next((tensor.device for tensor in (*outputs, *inputs)), torch.device("cpu"))


register()
