"""One exception tree. Every message says what was found, what was expected, and ends with the remedy.

>>> str(MeshError("a mesh of 8 ranks", expected="at most 2, the world size", remedy="start 8 ranks"))
'a mesh of 8 ranks: expected at most 2, the world size. Remedy: start 8 ranks.'
"""

from __future__ import annotations


class CrossfadeError(Exception):
    """Base of all errors raised on purpose by this package.

    `found` is what was met, `expected` what would have been right, `remedy` what the reader can do now.
    """

    known_to: object = None
    """Those who met when it was raised, and so need not be told."""

    def __init__(self, found: str, *, expected: str = "", remedy: str) -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        wanted = f": expected {expected}" if expected else ""
        super().__init__(f"{found}{wanted}. Remedy: {remedy}.")

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.found, self.expected, self.remedy)


def _rebuild(cls: type[CrossfadeError], found: str, expected: str, remedy: str) -> CrossfadeError:
    """Unpickle: errors travel from rank processes to the launcher."""
    return cls(found, expected=expected, remedy=remedy)


class ModelError(CrossfadeError):
    """The model cannot be used as it is (meta device, no parameters, mixed devices)."""


class BatchError(CrossfadeError):
    """The batch does not fit the mesh or the captured step."""


class OptimizerError(CrossfadeError):
    """The optimizer, or one of its options, cannot be captured."""


class MeshError(CrossfadeError):
    """The device mesh does not fit the world or the request."""


class PlanError(CrossfadeError):
    """A tensor-parallel plan cannot be read, does not fit the program, or contradicts itself."""


class PlanDriftError(CrossfadeError):
    """A plan file was made for something else than what is compiled now; the message shows what differs."""


class StateError(CrossfadeError):
    """A state does not fit the program that it is for."""


class CaptureError(CrossfadeError):
    """The program cannot be turned into one graph."""


class TextError(CrossfadeError):
    """The text of a program does not parse; the line is named."""


class RewriteError(CrossfadeError):
    """A rule or a spliced function does not fit the graph."""


class VerifyError(CrossfadeError):
    """A program breaks one of the rules that hold after every pass."""


class PassError(CrossfadeError):
    """A pass failed, broke the program, or misreported what it did; the message names the pass."""


class RankMismatchError(CrossfadeError):
    """The ranks disagree about the program they are about to run."""


class RankFailedError(CrossfadeError):
    """Another rank died, raised or did not answer in time; the message names it and the collective."""


class NotYetError(CrossfadeError):
    """A documented capability that this version does not have yet."""


class MachineError(CrossfadeError):
    """A description of a machine is missing something, or says what cannot be."""


class MemoryLimitError(CrossfadeError):
    """A program needs more memory than allowed, in whatever order it runs; `least` bytes would do."""

    least = 0


class StrictError(CrossfadeError):
    """A compilation falls short of what `strict=` expects; `shortfalls` has each verdict, and the message all."""

    shortfalls: tuple = ()
