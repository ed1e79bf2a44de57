"""What the tests of splicing and of rules share: small programs, and how to look at them."""

from __future__ import annotations

import textwrap

from crossfade.graph.text import parse, render


def program_of(text: str):
    return parse(textwrap.dedent(text), groups={"dp": 2})


def named(program):
    return {node.name: node for node in program.graph.nodes}


def body(program) -> list[str]:
    return render(program).splitlines()[len(program.inputs) : -1]


TWO = """
    x: f32[4, 2] = input("x")
    y: f32[4, 2] = aten.relu(x)
    z: f32[4, 2] = aten.neg(y)
    return output("z", z)
"""
