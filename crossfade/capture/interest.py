"""Which names the code within reach of a capture reads: what nobody names is not looked at."""

from __future__ import annotations

from collections.abc import Callable

from crossfade.capture.code_names import CodeNames

Then = Callable[[], None]


class Interest:
    """Names that are read, and what waits for a name to be read.

    >>> interest, found = Interest(), []
    >>> interest.when("scale", lambda: found.append("scale"))
    >>> interest.when("epoch", lambda: found.append("epoch"))
    >>> interest.mention(CodeNames(frozenset(), frozenset({"scale", "bias"}), computed=False))
    >>> found
    ['scale']
    """

    def __init__(self) -> None:
        self._mentioned = {"forward"}
        self._everything = False
        self._waiting: dict[str, list[Then]] = {}
        self._by_any_name: dict[str, list[Then]] = {}

    def when(self, name: str, then: Then, *, code: bool = False) -> None:
        """Call once the name is read, or now. Names that code makes up may be those of anything but `code`."""
        if name in self._mentioned or (self._everything and not code):
            then()
        else:
            (self._waiting if code else self._by_any_name).setdefault(name, []).append(then)

    def mention(self, names: CodeNames) -> None:
        """Some code reads these."""
        new = names.attributes - self._mentioned
        self._mentioned |= new
        for name in sorted(new):
            self._call(self._waiting.pop(name, []))
            self._call(self._by_any_name.pop(name, []))
        if names.computed:
            self._everything = True
            while self._by_any_name:
                self._call(self._by_any_name.pop(next(iter(self._by_any_name))))

    def _call(self, waiting: list[Then]) -> None:
        for then in waiting:
            then()
