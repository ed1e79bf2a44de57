"""Buckets by modules that the user names: which collective serves which."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import fx

from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.modules import by_module
from crossfade.graph.program import MADE_FOR, InputKind, Program

Modules = tuple[str | tuple[str, ...], ...]
"""Names of modules such as `layers.3` or `layers.*`, each with a bucket of its own; those in a tuple share one."""

_PHASE = re.compile(r"^(forward|backward|update) ?")


@dataclass(frozen=True)
class NamedModules:
    """The first of the named modules that a path lies in: `*` stands for one part of a name.

    >>> named = NamedModules(("layers.*", ("norm", "head")))
    >>> named.holding("layers.3.up.weight"), named.holding("layers.3"), named.holding("layers")
    ((0, 'layers.3'), (0, 'layers.3'), None)
    >>> named.holding("norm.weight") == named.holding("head")
    True
    """

    modules: Modules

    def holding(self, path: str) -> Hashable | None:
        """What stands for the named module that a path lies in; None if it lies in none of them."""
        for index, entry in enumerate(self.modules):
            for name in (entry,) if isinstance(entry, str) else entry:
                found = _pattern(name).match(path)
                if found:
                    return (index, found[0]) if isinstance(entry, str) else (index,)
        return None

    def of_collectives(self, program: Program) -> dict[fx.Node, Hashable]:
        """The named module that each collective of a program serves, by what it was made for or else by what it sends.

        A name that no module of the program has is refused: it is a mistake.
        """
        modules = {name: _PHASE.sub("", place) for name, place in by_module(program).items()}
        starts = [found.node for found in collectives.find(program.graph)]
        paths = {node: str(node.meta.get(MADE_FOR) or modules.get(node.name, "")) for node in starts}
        kept = (InputKind.PARAMETER, InputKind.BUFFER)
        known = {*modules.values(), *paths.values(), *(item.name for item in program.inputs if item.kind in kept)}
        self._check(sorted(known - {""}))
        found = {node: self.holding(path) for node, path in paths.items()}
        return {node: module for node, module in found.items() if module is not None}

    def _check(self, known: Sequence[str]) -> None:
        names = [name for entry in self.modules for name in ((entry,) if isinstance(entry, str) else entry)]
        for name in names:
            if not any(_pattern(name).match(path) for path in known):
                near = difflib.get_close_matches(name, known, n=3) or known[:3]
                raise PassError(
                    f"grouping names the module {name!r}",
                    expected="modules of the program, such as "
                    + (", ".join(near) or "none, for its nodes have no names"),
                    remedy="correct the name, or leave it out",
                )


def _pattern(name: str) -> re.Pattern[str]:
    parts = ("[^.]+" if part == "*" else re.escape(part) for part in name.split("."))
    return re.compile(r"\.".join(parts) + r"(?=\.|$)")


def are_modules(grouping: object) -> bool:
    """Whether an option names modules: a tuple of names and of tuples of names.

    >>> are_modules(("layers.*", ("norm", "head"))), are_modules("module"), are_modules(()), are_modules((1,))
    (True, False, False, False)
    """
    if not isinstance(grouping, tuple) or not grouping:
        return False
    return all(isinstance(entry, str) or (entry != () and _are_names(entry)) for entry in grouping)


def _are_names(entry: object) -> bool:
    return isinstance(entry, tuple) and all(isinstance(name, str) for name in entry)
