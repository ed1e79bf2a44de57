"""Process groups of our own: shared by the steps of one model, and destroyed with the last of them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from crossfade.errors import MeshError
from crossfade.graph.private import backend_of_group, group_named, new_process_group
from crossfade.ranks.members import Members


@dataclass(frozen=True)
class GroupKind:
    """What a group must have in common with one that is asked for to be taken for it."""

    description: str
    ranks: tuple[int, ...]
    backend: str
    timeout: float


@dataclass
class _Group:
    kind: GroupKind
    name: str
    owner: Any
    """The model that it serves: steps of other models may be called in other threads, so they have their own."""
    users: set[int] = field(default_factory=set)
    broken: bool = False
    """After a collective has failed the ranks no longer agree which comes next."""


class _Groups:
    """All groups that this package has made in this process, by name."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.groups: dict[str, _Group] = {}

    def usable(self, kind: GroupKind, owner: Any) -> list[str]:
        """The names of those that a step of this model may share."""
        alive = [group for group in list(self.groups.values()) if group.owner() is owner and group.kind == kind]
        return [group.name for group in alive if not group.broken and backend_of_group(group.name) is not None]

    def sweep(self, backends: Collection[str] | None = None) -> None:
        """Destroy the groups that nobody uses any more, by default of all backends."""
        with self.lock:
            idle = [group for group in list(self.groups.values()) if not group.users]
            for group in [group for group in idle if backends is None or group.kind.backend in backends]:
                del self.groups[group.name]
                if dist.is_initialized() and backend_of_group(group.name) is not None:
                    dist.destroy_process_group(group_named(group.name))


_GROUPS = _Groups()


class Lease:
    """The groups and members that one step uses, given back once: by `release`, or when the lease is no more."""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self._held = _Leased()
        self._collected = weakref.finalize(self, self._held.drop)
        self._collected.atexit = False  # torch takes its groups down itself
        _GROUPS.sweep()

    def hold(self, members: Members) -> Members:
        """Keep members until the lease ends."""
        self._held.members.append(members)
        return members

    def open(self, members: Members, kind: GroupKind) -> str:
        """The name of a process group of the members, whose collectives fail after the timeout: one that all of them
        have for another step of the same model, or a new one. A group of our own keeps the user's collectives and ours
        from mixing."""
        offered = _GROUPS.usable(kind, self._owner()) if not members.alone else []
        line = f"axis {kind.description} over {kind.backend}"  # or making the group would wait unnamed
        common = members.agree(line, line, offered, to="open process groups")
        name = common[0] if common else _made(members, kind)
        with _GROUPS.lock:
            _GROUPS.groups.setdefault(name, _Group(kind, name, self._owner)).users.add(id(self._held))
        self._held.names.append(name)
        return name

    def mark_broken(self) -> None:
        """Let no later step use these groups."""
        for name in self._held.names:
            if name in _GROUPS.groups:
                _GROUPS.groups[name].broken = True

    def check(self) -> None:
        """Refuse to go on with groups that somebody has destroyed, before a collective does it less clearly."""
        gone = [name for name in self._held.names if backend_of_group(name) is None]
        if gone:
            raise MeshError(
                f"process group {gone[0]} was destroyed",
                expected="process groups that live as long as the step",
                remedy="call torch.distributed.destroy_process_group after the last step, or compile the step again",
            )

    def release(self) -> None:
        """Give everything back. Other ranks need not do so now, or at all."""
        if self._collected.alive:
            self._collected()
            _GROUPS.sweep()


@dataclass
class _Leased:
    """What a lease holds; it outlives the lease until it is dropped."""

    names: list[str] = field(default_factory=list)
    members: list[Members] = field(default_factory=list)

    def drop(self) -> None:
        """Give everything back. The garbage collector may call this anywhere, so no collective, and no other backend
        than gloo, which closes connections and waits for nobody; the rest is left to the next lease."""
        for members in self.members:
            members.close()
        with _GROUPS.lock:
            for group in [_GROUPS.groups[name] for name in self.names if name in _GROUPS.groups]:
                group.users.discard(id(self))
        if not _inside_torch_distributed():
            _GROUPS.sweep(backends=("gloo",))


def _made(members: Members, kind: GroupKind) -> str:
    name, limit = f"{members.scope}/{kind.description}", timedelta(seconds=kind.timeout)

    def make() -> Any:
        return new_process_group(name, list(kind.ranks), kind.backend, limit, kind.description)

    made = str(members.guard(f"opening a process group for axis {kind.description}", make).group_name)
    members.agree(made, made, to="open process groups")  # or one that drops it at once would fail those still opening
    return made


def _inside_torch_distributed() -> bool:
    """Whether torch is at work on its groups, in this thread, right now."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.distributed_c10d":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def ranks_of(group: str) -> list[int]:
    """The global ranks of a process group, by its name."""
    return list(dist.get_process_group_ranks(group_named(group)))


def gather_objects(value: Any, group: Any, onto: int) -> list[Any]:
    """What all members of a group bring, on one of them, by its global rank; empty on the others. All must call it."""
    here = dist.get_rank() == onto
    found: list[Any] = [None] * dist.get_world_size(group) if here else []
    dist.gather_object(value, found if here else None, dst=onto, group=group)
    return found
