"""What a rank communicates: collectives and messages as they are started, comparable between ranks.

A `Launch` is everything that the members of a group must agree on, and where it comes from; it travels as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

Size = int | str
"""A dim of a tensor; a symbol is written as its expression."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype and sizes.

    >>> print(TensorType("f32", (2, "s0")))
    f32[2, s0]
    """

    dtype: str
    shape: tuple[Size, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Sent:
    """A message to (`sends`) or from the rank `peer` of a group, counted in the group.

    >>> print(Sent(True, 1, 0, TensorType("f32", (4,))))
    a send of f32[4] to rank 1
    """

    sends: bool
    peer: int
    tag: int
    tensor: TensorType

    def __str__(self) -> str:
        tag = f" with tag {self.tag}" if self.tag else ""
        way = ("a send", "to") if self.sends else ("a receive", "from")
        return f"{way[0]} of {self.tensor} {way[1]} rank {self.peer}{tag}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective, or one or more messages, as one rank starts it.

    `members` is the group's size as the operator says it, `settings` the settings of an operator of another kind.

    >>> launch = Launch("a", "model.py:12", "all_reduce", "dp", (TensorType("f32", (4,)),), "sum")
    >>> print(launch, launch.where)
    all_reduce(sum) of f32[4] on dp node a [model.py:12]
    """

    node: str
    source: str
    kind: str
    group: str
    tensors: tuple[TensorType, ...] = ()
    reduce_op: str = ""
    root: int | None = None
    members: int | None = None
    sent: tuple[Size, ...] = ()
    received: tuple[Size, ...] = ()
    coalesced: bool = False
    settings: str = ""
    messages: tuple[Sent, ...] = ()

    @property
    def where(self) -> str:
        """The node, and the source line where it is known."""
        return f"node {self.node}" + (f" [{self.source}]" if self.source else "")

    @property
    def key(self) -> tuple[Any, ...]:
        """What all members must have in common; of an exchange only the rows' type, since its sizes may differ."""
        tensors: Any = self.tensors
        if self.kind == "all_to_all":
            tensors = tuple((tensor.dtype, tensor.shape[1:]) for tensor in tensors)
        return self.kind, self.coalesced, self.reduce_op, tensors, self.root, self.members, self.settings

    def __str__(self) -> str:
        if self.messages:
            return f"{' and '.join(map(str, self.messages))} of {self.group}"
        many = f"{len(self.tensors)} tensors in one call, " if self.coalesced else ""
        types = ", ".join(map(str, self.tensors[:3])) + (", ..." if len(self.tensors) > 3 else "")
        settings = [self.reduce_op] if self.reduce_op else []
        settings += [f"root {self.root}"] if self.root is not None else []
        if self.sent or self.received:
            settings.append(f"{list(self.sent)} to, {list(self.received)} from each rank")
        settings += [self.settings] if self.settings else []
        return f"{self.kind}{'(' + ', '.join(settings) + ')' if settings else ''} of {many}{types} on {self.group}"


def difference(first: Launch, second: Launch) -> str | None:
    """In what two ranks' launches differ that ought to be one collective; None if they fit.

    >>> mine = Launch("a", "", "all_reduce", "dp", (TensorType("f32", (4,)),), "sum")
    >>> difference(mine, Launch("b", "", "all_reduce", "dp", (TensorType("f32", (8,)),), "sum"))
    'sizes'
    """
    if first.key == second.key:
        return None
    names = ("collectives", "collectives", "reductions", "tensors", "roots", "group sizes", "settings")
    name = next(name for name, a, b in zip(names, first.key, second.key, strict=True) if a != b)
    if name != "tensors":
        return name
    if len(first.tensors) != len(second.tensors):
        return "numbers of tensors"
    alike = [a.dtype for a in first.tensors] == [b.dtype for b in second.tensors]
    return "sizes" if alike else "dtypes"


@dataclass(frozen=True, slots=True)
class Apart:
    """The first place where two ranks that should do the same do not: which launch of which group, and what differs."""

    number: int
    group: str
    what: str
    ours: Launch | None
    theirs: Launch | None

    def said(self, our_rank: int, their_rank: int) -> str:
        """The difference as a sentence about two ranks."""
        sides = ((our_rank, self.ours), (their_rank, self.theirs))
        each = [
            f"rank {rank} starts {launch} ({launch.where})" if launch else f"rank {rank} ends" for rank, launch in sides
        ]
        return f"the {ordinal(self.number)} collective of {self.group}, which differs in {self.what}: {', '.join(each)}"


def first_apart(ours: Sequence[Launch], theirs: Sequence[Launch]) -> Apart | None:
    """The first launch in which two ranks differ that ought to run one program; None if they communicate alike."""
    counts: dict[str, int] = {}
    for mine, other in zip_longest(ours, theirs):
        group = (mine or other).group
        number = counts[group] = counts.get(group, 0) + 1
        if mine is None or other is None:
            return Apart(number, group, "numbers of collectives", mine, other)
        if mine.group != other.group:
            return Apart(number, group, "groups", mine, other)
        if (what := difference(mine, other)) is not None:
            return Apart(number, group, what, mine, other)
        if (mine.sent, mine.received, mine.messages) != (other.sent, other.received, other.messages):
            return Apart(number, group, "messages" if mine.messages or other.messages else "splits", mine, other)
    return None


def ordinal(number: int) -> str:
    """
    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 22)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd']
    """
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def as_json(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    """Launches as plain data; `from_json` reads them back."""
    return [asdict(launch) for launch in launches]


def from_json(items: Sequence[dict[str, Any]]) -> list[Launch]:
    """The launches that `as_json` wrote.

    >>> launch = Launch("a", "", "broadcast", "dp", (TensorType("f32", (4,)),), root=1)
    >>> from_json(as_json([launch])) == [launch]
    True
    """
    return [_launch(item) for item in items]


def _launch(item: dict[str, Any]) -> Launch:
    tensors = tuple(_described(tensor) for tensor in item["tensors"])
    sent = tuple(Sent(**{**message, "tensor": _described(message["tensor"])}) for message in item["messages"])
    lists = {name: tuple(item[name]) for name in ("sent", "received")}
    return Launch(**{**item, **lists, "tensors": tensors, "messages": sent})


def _described(item: dict[str, Any]) -> TensorType:
    return TensorType(item["dtype"], tuple(item["shape"]))
