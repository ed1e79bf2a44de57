"""Who is to blame when something that ranks do together fails: what each one's last word says against it, and the error
that names those against whom most is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from crossfade.errors import RankFailedError
from crossfade.ranks.mailbox import Unreachable

_NAMED = 8
"""Ranks that an error names at most."""

Sign = tuple[str, int]
"""What there is to say of a rank, and how much it weighs against it."""


def suspects(signs: Mapping[int, Sign]) -> dict[int, str]:
    """The ranks against which most is to be said; at least one, if there are others.

    >>> suspects({0: ("answers", 0), 1: ("has ended", 4)})
    {1: 'has ended'}
    """
    heaviest = max((weight for _, weight in signs.values()), default=0)
    return {rank: sign for rank, (sign, weight) in signs.items() if weight == heaviest}


def sign_of(answer: Any, told: str | None, step: int | None) -> Sign:
    """What a rank's last word says against it at a step: its answer, or what it `told` when it left.

    >>> sign_of(("1", None, None), None, step=3)
    ('has not reached step 3 (last seen in step 1)', 2)
    """
    if isinstance(answer, Unreachable):
        return (str(answer), 4) if told is None else sign_of_leaving(told)
    reached, doing, left = answer
    if left is not None:
        return sign_of_leaving(left)
    if step is not None and (reached is None or int(reached) < step):
        return f"has not reached step {step} (last seen in step {reached or 'none'}{and_now(doing)})", 2
    if doing:
        return f"is {doing}", 1
    return f"answers, and is in step {reached}" if reached is not None else "answers", 0


def sign_of_leaving(said: str) -> Sign:
    """A rank that left for another's sake weighs less than one that failed.

    >>> sign_of_leaving('{"why": "ValueError: no", "because": []}')
    ('failed: ValueError: no', 4)
    """
    left = json.loads(said)
    return (f"gave up: {left['why']}", 3) if left["because"] else (f"failed: {left['why']}", 4)


def named(guilty: Mapping[int, str]) -> str:
    """Some ranks and what is said of them, in words.

    >>> named({1: "has ended"}), named({})
    ('rank 1 has ended', 'no other rank to ask')
    """
    each = [f"rank {rank} {sign}" for rank, sign in guilty.items()]
    more = [f"and {len(each) - _NAMED} more"] if len(each) > _NAMED else []
    return "; ".join([*each[:_NAMED], *more]) or "no other rank to ask"


def failure(what: str, guilty: Mapping[int, str], error: BaseException | str, timeout: float) -> RankFailedError:
    """The error to raise."""
    reason = " ".join(str(error).split())[:300]
    return RankFailedError(
        f"{what} ({named(guilty)}; the backend said: {reason})",
        expected=f"every rank to take part within {timeout:g} s",
        remedy="see that rank's own error first, then restart all ranks from the last checkpoint",
    )


def is_of_backend(error: BaseException) -> bool:
    """Whether an error comes from what carries messages between ranks.

    >>> is_of_backend(RuntimeError("[gloo/pair.cc:534] Connection closed by peer")), is_of_backend(OSError("full"))
    (True, False)
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("gloo", "nccl", "c10d"))


def and_now(doing: str | None) -> str:
    """What a rank is doing, to be added to a sentence."""
    return f", {doing}" if doing else ""
