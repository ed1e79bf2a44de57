"""What one rank keeps of a model and its optimizer when these are split by rows over an axis.

Every rank keeps as many rows of each tensor, the last ones padded, so that all ranks run one program. The user sees
DTensors (`Shard(0)`) over that memory: in the model's parameters, in the optimizer's state, in checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from crossfade.errors import ModelError
from crossfade.graph.private import own_buffers, own_parameters
from crossfade.graph.program import rows_per_rank
from crossfade.graph.strides import dense_strides, plain_strides


@dataclass(frozen=True)
class _Kept:
    """A tensor in parts: this rank's padded rows, and the DTensor over them that the user sees."""

    rows: Tensor
    seen: Any


class Shards:
    """The parts that one rank keeps.

    `mesh` has the axis over which rows are split last; parts along its other axes are alike. The state that the
    optimizer keeps is split of every parameter; with `split_all_but`, parameters themselves are too. If that
    `will_split` only at the first step, parameters must not be replaced until then. With `begins=False` nothing is
    split until `begin`: by then a plan has made parts of the parameters, of which these are the rows, or it is known
    which parameters hold experts, and nothing else is split. `guard` calls what waits for other ranks through the
    mesh's groups, whose timeout is not ours.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: DeviceMesh,
        *,
        will_split: bool = False,
        begins: bool = True,
        guard: Callable[[str, Callable[[], Any]], Any] = lambda what, function: function(),
    ) -> None:
        self._guard = guard
        self.model, self.optimizer, self.mesh, self.will_split = model, optimizer, mesh, will_split
        self.ranks, self.rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.whole: tuple[str, ...] | None = None
        """Parameters with rows that stay whole where the others are split; None as long as none is."""
        self.has_begun = False
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._names: dict[Tensor, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        if begins:
            self.begin()

    def begin(self, only: Collection[str] | None = None) -> None:
        """Take the model's parameters, or some, for what rows are split of, and split their optimizer state."""
        self.has_begun = True
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        rows = {name: parameter.shape for parameter, name in self._names.items() if parameter.dim()}
        self._shapes = {name: shape for name, shape in rows.items() if only is None or name in only}
        self._places = {name: place_of(self.model, name) for name in self._names.values()}
        for stepped in list(self.optimizer.state):
            for key in list(self.optimizer.state[stepped]):
                self.state(self._names[stepped], key)

    def split_all_but(self, whole: Collection[str]) -> None:
        """Split parameters in place: in the model and the optimizer they become DTensors. Once only."""
        assert self.whole is None, "a program may rely on what was split before"
        self.whole, self.will_split = tuple(name for name in self._shapes if name in whole), False
        self._split({p: name for p, name in self._names.items() if name in self._shapes and name not in whole})
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}

    def like_parts(self) -> dict[str, Tensor]:
        """For each parameter that is updated in parts, a tensor like one, without memory of its own."""
        return {
            name: parameter.detach().new_empty((), dtype=parameter.dtype).expand(self._part_shape(parameter.shape))
            if not self.has(name)
            else self._kept[name, ""].rows
            for parameter, name in self._names.items()
            if self.updates_rows_of(name)
        }

    def own_part(self, name: str) -> Tensor:
        """This rank's padded rows of a parameter, also of one that is whole; of what has no rows here, all of it."""
        registry, attribute = self._places[name]
        parameter = registry[attribute].detach()
        if self.has(name) or not self.updates_rows_of(name):
            return self._kept[name, ""].rows if self.has(name) else parameter
        return self._keep(parameter).rows

    def parameter(self, name: str) -> Tensor:
        """This rank's padded rows of a parameter."""
        return self._kept[name, ""].rows

    def gradient(self, name: str, rows: Tensor) -> Any:
        """A gradient of which this rank has padded rows as a DTensor like its parameter."""
        parameter: Any = self._kept[name, ""].seen
        return self._seen(rows, parameter.shape, parameter.stride()).seen

    def check(self) -> None:
        """Refuse to go on if the model has other parameters than those that were split."""
        first = {name: parameter for parameter, name in self._names.items()} if self.will_split else {}
        for name, (registry, attribute) in self._places.items():
            kept = self._kept.get((name, ""))
            expected = kept.seen if kept is not None else first.get(name)
            if expected is not None and registry[attribute] is not expected:
                raise ModelError(
                    f"parameter {name} was replaced {'before' if self.will_split else 'after'} it was split",
                    expected="parameters that stay the model's own",
                    remedy="load by step.load or step.load_state_dict, outside step.gathered(); or compile again",
                )

    def updates_rows_of(self, name: str) -> bool:
        """Whether this rank updates some rows of a parameter, and has the optimizer's state of those alone."""
        return name in self._shapes

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of which this rank updates some rows."""
        return tuple(self._shapes)

    def has(self, name: str) -> bool:
        """Whether a parameter is split itself."""
        return (name, "") in self._kept

    def state(self, name: str, key: str) -> Any:
        """This rank's padded rows of an entry of a parameter's optimizer state, or the entry itself if it is not split.

        An entry that has been replaced, as `Optimizer.load_state_dict` does, is taken over.
        """
        registry, attribute = self._places[name]  # asked at every step: looking for the parameter takes longer
        entries = self.optimizer.state[registry[attribute]]
        entry, kept = entries[key], self._kept.get((name, key))
        if kept is not None and entry is kept.seen:
            return kept.rows
        if not isinstance(entry, Tensor) or entry.shape != self._shapes.get(name):
            return entry
        kept = self._kept[name, key] = self._keep(entry)
        entries[key] = kept.seen
        return kept.rows

    def create_state(self, name: str, entries: Mapping[str, Any]) -> None:
        """Give the optimizer what its first step would have made of a parameter's part, where it has nothing yet."""
        state = self.optimizer.state[self.model.get_parameter(name)]
        for key, rows in entries.items():
            if state.get(key) is not None:
                continue
            shape = self._shapes.get(name)
            if shape is not None and isinstance(rows, Tensor) and rows.shape == self._part_shape(shape):
                self._kept[name, key] = self._seen(rows, shape, plain_strides(shape))
                state[key] = self._kept[name, key].seen
            else:
                state[key] = rows

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with its whole parameters, for evaluation or export; changes made to those that were in parts are
        lost at the end."""
        split = {parameter: self._whole(parameter) for parameter, name in self._names.items() if self.has(name)}
        with replaced(self.model, split):
            yield self.model

    def _whole(self, parameter: Any) -> Tensor:
        def gather() -> Tensor:
            with torch.no_grad():
                whole = parameter.full_tensor()
                return whole.clone() if self.ranks == 1 else whole

        gathered: Tensor = self._guard("gathering a parameter", gather)
        return gathered

    def _part_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return rows_per_rank(shape[0], self.ranks), *shape[1:]

    def _split(self, parameters: Mapping[Tensor, str]) -> None:
        """Replace parameters by DTensors over parts of them, in the model and in the optimizer.

        Whoever else holds an old parameter finds it empty: its memory is free, and using it fails.
        """
        new: dict[Tensor, nn.Parameter] = {}
        for old, name in parameters.items():
            kept = self._keep(old.detach())
            new[old] = nn.Parameter(kept.seen, requires_grad=old.requires_grad)
            self._kept[name, ""] = _Kept(kept.rows, new[old])
        for module in self.model.modules():
            for attribute, parameter in own_parameters(module).items():
                if parameter in new:
                    own_parameters(module)[attribute] = new[parameter]
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(old, old) for old in group["params"]]
        for old in [old for old in self.optimizer.state if old in new]:
            self.optimizer.state[new[old]] = self.optimizer.state.pop(old)
        for old in new:
            old.grad = None
            old.data = old.new_empty(0)

    def _keep(self, whole: Tensor) -> _Kept:
        """Copy this rank's rows out of a whole tensor, or out of another DTensor like ours."""
        rows = torch.zeros(self._part_shape(whole.shape), dtype=whole.dtype, device=whole.device)
        own = self._own_rows(whole, rows.shape[0])
        rows[: own.shape[0]].copy_(own)
        return self._seen(rows, whole.shape, dense_strides(whole))

    def _own_rows(self, whole: Any, count: int) -> Tensor:
        from torch.distributed.tensor import DTensor

        if isinstance(whole, DTensor):
            if whole.device_mesh == self.mesh and list(whole.placements) == self._placements():
                return whole.to_local()
            whole = whole.full_tensor()
        return whole[self.rank * count : (self.rank + 1) * count]

    def _seen(self, rows: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> _Kept:
        """The DTensor over some rows; it has the strides that the whole had, by which what it computes is laid out."""
        from torch.distributed.tensor import DTensor

        own = max(0, min(shape[0] - self.rank * rows.shape[0], rows.shape[0]))
        placements = self._placements()
        seen = DTensor.from_local(rows[:own], self.mesh, placements, run_check=False, shape=shape, stride=strides)
        return _Kept(rows, seen)

    def _placements(self) -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard

        return [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]


@contextlib.contextmanager
def replaced(model: nn.Module, others: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """A model with other tensors in the place of some parameters and buffers for a while.

    >>> model = nn.Linear(2, 1)
    >>> with replaced(model, {model.weight: torch.ones(4, 2)}):
    ...     model.weight.shape
    torch.Size([4, 2])
    >>> model.weight.shape
    torch.Size([1, 2])
    """
    new: dict[Tensor, Tensor] = {
        old: nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
        for old, new in others.items()
    }
    registries: list[dict[str, Any]] = [r for m in model.modules() for r in (own_parameters(m), own_buffers(m))]
    places = [(r, attribute, old) for r in registries for attribute, old in r.items() if old is not None and old in new]
    try:
        for registry, attribute, old in places:
            registry[attribute] = new[old]
        yield
    finally:
        for registry, attribute, old in places:
            registry[attribute] = old


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a part of one that several ranks hold."""
    from torch.distributed.tensor import DTensor  # here, since importing it is slow

    return isinstance(tensor, DTensor)


def place_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a model keeps a parameter: its module's registry, and the name there."""
    owner, _, attribute = name.rpartition(".")
    return own_parameters(model.get_submodule(owner)), attribute
