"""`reduce_dtype=`: in which form gradients travel along each mesh axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from crossfade.communicate.narrow_gradients import NarrowGradients
from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Pass

ReduceDtype = torch.dtype | str | Mapping[str, torch.dtype | str] | None
"""What users write: one dtype for every axis, or one for each axis that is named."""

EVERY_AXIS = "*"
_WORDS = {
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "fp16", "half"),
    "int8": ("int8",),
}
_MEANT = {word: dtype for dtype, words in _WORDS.items() for word in words}


def sent_as(asked: ReduceDtype) -> tuple[tuple[str, str], ...]:
    """What was asked for, as pairs of an axis and a dtype's name.

    >>> sent_as(torch.bfloat16), sent_as({"dp_replicate": "int8"}), sent_as(None)
    ((('*', 'bfloat16'),), (('dp_replicate', 'int8'),), ())
    """
    if asked is None:
        return ()
    given = asked if isinstance(asked, Mapping) else {EVERY_AXIS: asked}
    return tuple((axis, _name_of(dtype)) for axis, dtype in given.items())


def along_axes(asked: Collection[tuple[str, str]], axes: Collection[str]) -> dict[str, str]:
    """The dtype along each axis that gradients travel along, once every axis that was named is one of them."""
    named = dict(asked)
    for axis in named:
        if axis not in (EVERY_AXIS, *axes):
            raise CrossfadeError(
                f"reduce_dtype for the axis {axis!r}",
                expected=f"an axis that gradients travel along: {', '.join(axes)}",
                remedy="name one of those, or pass one dtype for all",
            )
    found = {axis: named.get(axis, named.get(EVERY_AXIS, "")) for axis in axes}
    return {axis: dtype for axis, dtype in found.items() if dtype}


def compression(dtypes: Mapping[str, str]) -> list[Pass]:
    """Passes that send gradients as they should be along each axis.

    >>> [each.spelling for each in compression({"dp": "bfloat16"})]
    ['narrow-gradients']
    """
    return [NarrowGradients(axis, dtype) for axis, dtype in dtypes.items()]  # type: ignore[arg-type]


def of_16_bits(dtypes: Mapping[str, str]) -> tuple[str, ...]:
    """The axes along which sums are of 16 bits, and so are added up on arrival.

    >>> of_16_bits({"dp_shard": "bfloat16", "dp_replicate": "int8"})
    ('dp_shard',)
    """
    return tuple(axis for axis, dtype in dtypes.items() if dtype != "int8")


def _name_of(dtype: torch.dtype | str) -> str:
    word = str(dtype).removeprefix("torch.")
    if word not in _MEANT:
        raise CrossfadeError(
            f"reduce_dtype={dtype}",
            expected="torch.bfloat16, torch.float16 or torch.int8, or a mapping from mesh axes to these",
            remedy="pass one of those, or leave it out: gradients travel in their own dtype",
        )
    return _MEANT[word]
