"""Every pass by its class: `from crossfade.passes import BucketAllReduces`.

>>> import crossfade.passes
>>> crossfade.passes.SinkWaits().spelling
'sink-waits'
"""

from __future__ import annotations

from crossfade.compile.catalogue import known_passes
from crossfade.graph.passes import Pass


def __getattr__(name: str) -> type[Pass]:
    for kind in known_passes().values():
        if kind.__name__ == name:
            return kind
    raise AttributeError(f"no pass {name!r}: `crossfade passes` lists them all")


def __dir__() -> list[str]:
    return sorted(kind.__name__ for kind in known_passes().values())
