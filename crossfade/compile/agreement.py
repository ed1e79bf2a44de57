"""What ranks agree on before a first step: one program, and whether it is what was expected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from crossfade.compile.built import Built
from crossfade.errors import CrossfadeError
from crossfade.graph.events import events_of
from crossfade.graph.passes import fingerprint
from crossfade.ranks.alike import digest_of
from crossfade.ranks.checkpoint import checksum
from crossfade.ranks.compared import same_batch, tensors_of
from crossfade.ranks.members import Members, account
from crossfade.report.expect import Expect
from crossfade.report.strict import Shortfall, refuse


@contextlib.contextmanager
def telling(*members: Members | None) -> Iterator[None]:
    """Tell the others, who will wait to compare programs, why this rank cannot go on."""
    try:
        yield
    except Exception as error:
        for group in members:
            if group is not None and not (isinstance(error, CrossfadeError) and error.known_to is group):
                group.fail(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def meeting(members: Members) -> Iterator[None]:
    """What fails here fails on all members, who need not be told: to tell them would fail what they do next."""
    try:
        yield
    except CrossfadeError as error:
        error.known_to = members
        raise


def agree(members: Members, built: Built, common: Sequence[str], causes: Sequence[str] = ()) -> None:
    """Compare a program, and what else ranks must have in common, with the others; `causes` would explain the rest."""
    held = {name: value for name, value in built.program.constants.items() if type(value) is Tensor}
    constants = [f"constant {name} with checksum {checksum(value):08x}" for name, value in sorted(held.items())]
    common = [*common, *constants]
    schedules, rest = [built.exchanges, events_of(built.program).launches], "\n".join([*common, str(built.program)])
    members.agree(" ".join([fingerprint(built.program), *causes, *common]), account(causes, schedules, rest))


def agree_on_batch(members: Members, batch: tuple[Any, ...], *, by_plan: bool) -> None:
    """Compare the first batch of its kind before anything is captured."""
    tensors, told = tensors_of(batch), same_batch(by_plan=by_plan)
    sums = {name: f"{int(digest_of([tensor], 0)):08x}" for name, tensor in tensors.items()}
    lines = [f"{name}: {tuple(tensor.shape)}, sums up to {sums[name]}" for name, tensor in tensors.items()]
    members.agree(" ".join(lines), "\n".join(lines), what="batches", expected=told.expected, remedy=told.remedy)


def agree_on_sizes(members: Members, batch: tuple[Any, ...]) -> None:
    """Compare the sizes of the parts that ranks bring, before anything is captured."""
    lines = [f"{name}: {tuple(tensor.shape)}" for name, tensor in tensors_of(batch).items()]
    members.agree(
        " ".join(lines),
        "\n".join(lines),
        what="sizes of batches",
        expected='parts of the same size on every rank (batch="local")',
        remedy='pass batch="uneven" to compile_step if numbers of samples differ; pad samples alike on every rank',
    )


def hold_together(expect: Expect, built: Built, members: Members | None) -> None:
    """Raise what falls short, on all ranks what the first one sees: predicted times differ a little between them."""
    found = built.shortfalls
    if members is not None:
        shared = members.share(lambda: [asdict(shortfall) for shortfall in found])
        members.agree("strict", "strict")  # each share is followed by one
        found = tuple(Shortfall(**shortfall) for shortfall in shared)
    refuse(expect, found)
