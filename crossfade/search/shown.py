"""A bar on the terminal while candidates are tried."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from crossfade.compile.progress import is_wanted


@contextlib.contextmanager
def shown(told: Callable[[int, int, str], None] | None, title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Whom to tell of each candidate: the caller's own, else a bar on stderr, where that is a terminal.

    >>> with shown(None, "a model") as tell:
    ...     tell(0, 2, "dp=2 replicate")
    """
    if told is not None:
        yield told
        return
    wanted = is_wanted(0, sys.stderr)
    console = Console(stderr=True, force_terminal=wanted or None)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not wanted) as progress:
        task = progress.add_task(title)

        def tell(done: int, most: int, what: str) -> None:
            progress.update(task, completed=done, total=max(most, done), description=f"{title}: {what}")

        yield tell
