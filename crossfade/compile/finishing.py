"""The last passes of a step: in kept memory, in place, in fewer calls."""

from __future__ import annotations

import math

from crossfade.finish.collect_small_operators import CollectSmallOperators
from crossfade.finish.fuse_adam_updates import FuseAdamUpdates
from crossfade.finish.group_small_operators import GroupSmallOperators
from crossfade.finish.pack_in_place import PackInPlace
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.passes import Pass


def finishing(device: str, *, lean: bool, compiled: bool, fused: bool) -> list[Pass]:
    """The passes; if `lean`, without those that let more live at once to do it in fewer calls.

    In `compiled` steps the compiler sees to that. `fused` updates of Adam have other last bits than those of torch's
    default, and hold less.

    >>> [each.spelling for each in finishing("cpu", lean=False, compiled=False, fused=True)]
    ['pack-in-place', 'update-in-place', 'fuse-adam-updates', 'group-small-operators']
    >>> [each.spelling for each in finishing("cpu", lean=True, compiled=False, fused=False)]
    ['pack-in-place(alone_kb=1e999)', 'update-in-place']
    """
    packing = PackInPlace(math.inf) if lean else PackInPlace()  # within a limit only buckets are kept
    if compiled:
        return [packing, UpdateInPlace()]
    fusing: list[Pass] = [FuseAdamUpdates()] if fused else []
    collecting: list[Pass] = [CollectSmallOperators()] if device == "cuda" else []
    return [packing, UpdateInPlace(), *fusing, *([] if lean else [*collecting, GroupSmallOperators()])]
