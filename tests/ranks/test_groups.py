"""Process groups that steps share: who may use which, and when they are destroyed; the world is emulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import nn

from crossfade import emulated
from crossfade.cost.presets import preset
from crossfade.errors import MeshError
from crossfade.graph.private import backend_of_group
from crossfade.ranks import groups, meeting
from crossfade.ranks.groups import GroupKind, Lease
from crossfade.ranks.members import Members

KIND = GroupKind("dp", (0, 1), "emulated", 5.0)


@pytest.fixture
def members() -> Iterator[Members]:
    """Of whom nobody else exists, but who make offers as if others did."""
    with emulated.world(preset("ethernet-1gbit"), ranks=2):
        made = Agreeing((0, 1), 0, 5.0)
        yield made
        groups._GROUPS.groups.clear()


class Agreeing(Members):
    """Members of which the others agree to everything."""

    def agree(self, fingerprint: str, text: str, offers: list[str] = [], **words: object) -> list[str]:  # type: ignore[override]  # noqa: B006
        return list(offers)

    def guard(self, what, function):  # type: ignore[no-untyped-def]
        self.scope = f"test/{what}/{meeting._MEETINGS.next((0, 1))}"
        return function()


def test_steps_of_one_model_share_a_group_until_the_last_gives_it_back(members: Members) -> None:
    model = nn.Linear(1, 1)
    first, second = Lease(model), Lease(model)
    name = first.open(members, KIND)
    assert second.open(members, KIND) == name
    first.release()
    first.release()
    assert backend_of_group(name) is not None
    second.release()
    assert backend_of_group(name) is None


@pytest.mark.parametrize("other", ["model", "timeout", "description", "broken"])
def test_what_is_not_alike_gets_a_group_of_its_own(members: Members, other: str) -> None:
    model = nn.Linear(1, 1)
    lease = Lease(model)
    name = lease.open(members, KIND)
    if other == "broken":
        lease.mark_broken()
    changed = {"timeout": replace(KIND, timeout=6.0), "description": replace(KIND, description="tp")}
    another = Lease(nn.Linear(1, 1) if other == "model" else model)
    assert another.open(members, changed.get(other, KIND)) != name


def test_a_lease_that_is_collected_leaves_its_group_to_the_next_one(members: Members) -> None:
    """Only gloo's are destroyed where garbage is collected: others may wait for ranks."""
    model = nn.Linear(1, 1)
    lease = Lease(model)
    name = lease.open(members, KIND)
    del lease
    gc.collect()
    assert not groups._GROUPS.groups[name].users and backend_of_group(name) is not None
    Lease(model)
    assert name not in groups._GROUPS.groups and backend_of_group(name) is None


def test_a_group_that_somebody_destroyed_is_named(members: Members) -> None:
    lease = Lease(model := nn.Linear(1, 1))
    name = lease.open(members, KIND)
    lease.check()
    dist.destroy_process_group(groups.group_named(name))
    with pytest.raises(MeshError, match=rf"process group {name} was destroyed: expected process groups that live"):
        lease.check()
    assert Lease(model).open(members, KIND) != name
