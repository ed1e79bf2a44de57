"""What a user sees of an error: their own lines and the message, without the frames of Crossfade and torch between.

`CROSSFADE_TRACEBACK=1` in the environment shows every frame.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

from crossfade.errors import CrossfadeError

VARIABLE = "CROSSFADE_TRACEBACK"
_PACKAGES = ("crossfade", "torch")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_GENERATED = ("<crossfade", "<eval_with_key>", "<frozen ")
_HIDDEN = f"The frames of crossfade and torch are not shown; {VARIABLE}=1 shows them."


class UsersFrames(contextlib.ContextDecorator):
    """Errors that leave the block, or the function that it decorates, show the user's frames only.

    The frame of the block goes too: Python adds none when an error is raised again.

        >>> with UsersFrames():
        ...     raise ValueError("wrong")
        Traceback (most recent call last):
        ValueError: wrong
    """

    def __enter__(self) -> None:
        """Nothing to prepare: it costs nothing where nothing fails."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            show_users_frames(error)


users_frames = UsersFrames()
"""For every function that users call."""


def show_users_frames(error: BaseException) -> None:
    """Leave only the user's frames in an error's traceback, and in those of the errors behind it.

    An error of ours says what was behind it, so that one is not shown beside it, only the user's lines that it went
    through. `error.__context__` still has it.

        >>> try:
        ...     os.stat("/no/such/file")  # one frame of ours, if this example were a file of the package
        ... except OSError as error:
        ...     show_users_frames(error)
    """
    if os.environ.get(VARIABLE) == "1":
        return
    shown, hidden = _split(error.__traceback__)
    behind = _behind(error)
    if behind is not None:
        show_users_frames(behind)
        if isinstance(error, CrossfadeError):
            shown += _split(behind.__traceback__)[0]
            error.__cause__ = None  # which also keeps its context from being shown
    error.__traceback__ = _linked(shown)
    if hidden and not isinstance(error, CrossfadeError) and _HIDDEN not in getattr(error, "__notes__", ()):
        error.add_note(_HIDDEN)


def formatted(error: BaseException) -> str:
    """An error as Python prints it, with the user's frames only: for one that is sent elsewhere as text."""
    show_users_frames(error)
    return "".join(traceback.format_exception(error))


@contextlib.contextmanager
def without_torchs_account() -> Iterator[None]:
    """Keep torch from logging an error of the user's model, with all frames of its own, before it is raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    if os.environ.get(VARIABLE) == "1":
        yield
        return
    logger.addFilter(_tells_no_error)
    try:
        yield
    finally:
        logger.removeFilter(_tells_no_error)


def _tells_no_error(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def _behind(error: BaseException) -> BaseException | None:
    """The error that led to this one, if it passed through frames of ours: the user's own are left as they are."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if behind is None or behind.__traceback__ is None or is_users(behind.__traceback__.tb_frame):
        return None
    return behind


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code of the user or of a package they use, not of ours, torch or Python's own library."""
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__")
    if module is None or module.partition(".")[0] in _PACKAGES or file.startswith(_GENERATED):
        return False  # code without a module was written by torch or us
    return not file.startswith(_STANDARD_LIBRARY) or any(folder in file for folder in _INSTALLED)


def users_level() -> int:
    """The `stacklevel` by which a warning of our caller names the user's line."""
    frame, level = sys._getframe(1), 1
    while not is_users(frame) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def _split(first: TracebackType | None) -> tuple[list[TracebackType], bool]:
    """The user's entries of a traceback, from the outermost, and whether it ends in one that is not the user's."""
    entries = []
    while first is not None:
        entries.append(first)
        first = first.tb_next
    shown = [entry for entry in entries if is_users(entry.tb_frame)]
    return shown, bool(entries) and (not shown or shown[-1] is not entries[-1])


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    following: TracebackType | None = None
    for entry in reversed(entries):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following
