"""Where the lines of a program's text come from: comments at their ends, which a reader of the text may skip.

start: f32[4] = c10d.all_reduce(x, "sum", "dp")  # model.py:12
"""

from __future__ import annotations

import re

from crossfade.graph.program import MADE_FOR, Program, source_line
from crossfade.graph.text import parse, render

_DEFINES = re.compile(r"^(\w+)(?::[^=]*)? = ")
_COMMENT = re.compile(r'^(?:[^"#\\]|"(?:[^"\\]|\\.)*")*?\s+#\s*(.*)$')


def render_with_sources(program: Program) -> str:
    """The program's text, with the source of each node as a comment where it is known; `parse` reads it as well.

    >>> program = parse('x: f32[2] = input("x")\\ny: f32[2] = aten.relu(x)\\nreturn output("y", y)')
    >>> program.results[0].meta["made_for"] = "model.py:12"
    >>> print(render_with_sources(program))
    x: f32[2] = input("x")
    y: f32[2] = aten.relu(x)  # model.py:12
    return output("y", y)
    """
    sources = {node.name: source_line(node) for node in program.graph.nodes}
    return "\n".join(_commented(line, sources) for line in render(program).splitlines())


def _commented(line: str, sources: dict[str, str]) -> str:
    found = _DEFINES.match(line)
    source = sources.get(found[1], "") if found is not None else ""
    return f"{line}  # {' '.join(source.split())}" if source else line


def parse_with_sources(text: str, name: str = "") -> Program:
    """A program from its text, whose nodes know where they come from: what a comment says, or the line of file `name`.

    >>> program = parse_with_sources('x: f32[2] = input("x")  # m.py:1\\nreturn output("x", x)', "rank0.txt")
    >>> source_line(program.placeholders[0])
    'm.py:1'
    """
    program = parse(text)
    nodes = {node.name: node for node in program.graph.nodes}
    for number, line in enumerate(text.splitlines(), 1):
        found, comment = _DEFINES.match(line.lstrip()), _COMMENT.match(line)
        node = nodes.get(found[1]) if found is not None else None
        if node is not None and (source := comment[1].strip() if comment else f"{name}:{number}" if name else ""):
            node.meta[MADE_FOR] = source
    return program
