"""Every pass by its class: `from crossfade.passes import BucketAllReduces`.

>>> import crossfade.passes
>>> crossfade.passes.SinkWaits().spelling
'sink-waits'
"""

from __future__ import annotations

from typing import Any

from crossfade.compile.catalogue import known_passes


def __getattr__(name: str) -> Any:
    for kind in known_passes().values():
        if kind.__name__ == name:
            return kind
    raise AttributeError(f"no pass {name!r}: `crossfade passes` lists them all")


def __dir__() -> list[str]:
    return sorted(kind.__name__ for kind in known_passes().values())
