"""Every rule of a program: one that breaks it, with the whole error, and legal ones that come close."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from crossfade.errors import VerifyError
from crossfade.graph.program import Input, InputKind, Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify

GROUPS = {"dp": 2, "tp": 2}


def named(program: Program) -> dict[str, fx.Node]:
    return {node.name: node for node in program.graph.nodes}


BROKEN = {
    "read-before-wait": (
        """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        y: f32[4] = aten.relu(start)
        wait: f32[4] = c10d.wait_tensor(start)
        return output("y", y), output("w", wait)
        """,
        "y = aten.relu(start) reads start before its wait: expected only waits to read what start is "
        "still writing. Remedy: read the wait's result instead.",
    ),
    "view-before-wait": (
        """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        flat: f32[2, 2] = aten.view(start, [2, 2])
        wait: f32[4] = c10d.wait_tensor(start)
        return output("y", flat), output("w", wait)
        """,
        "flat = aten.view(start, [2, 2]) reads start before its wait: expected only waits to read what "
        "start is still writing. Remedy: read the wait's result instead.",
    ),
    "view-of-in-place-buffer": (
        """
        x: f32[4] = input("x")
        buffer: f32[4] = aten.clone(x)
        half: f32[2] = aten.slice.Tensor(buffer, 0, 0, 2)
        start: f32[4] = c10d.all_reduce_(buffer, "sum", "dp")
        early: f32[2] = aten.neg(half)
        wait: f32[4] = c10d.wait_tensor(start)
        return output("y", early), output("w", wait)
        """,
        "early = aten.neg(half) reads half before its wait: expected only waits to read what start is "
        "still writing. Remedy: read the wait's result instead.",
    ),
    "out-buffer": (
        """
        x: f32[4] = input("x")
        buffer: f32[8] = aten.empty.memory_format([8])
        start: f32[8] = c10d.all_gather_into_tensor_out(x, 2, "dp", out=buffer)
        early: f32[8] = aten.neg(buffer)
        wait: f32[8] = c10d.wait_tensor(start)
        return output("y", early), output("w", wait)
        """,
        "early = aten.neg(buffer) reads buffer before its wait: expected only waits to read what start is "
        "still writing. Remedy: read the wait's result instead.",
    ),
    "other-coalesced-result": (
        """
        x: f32[4] = input("x")
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        a: f32[4] = start[0]
        b: f32[4] = start[1]
        wait_a: f32[4] = c10d.wait_tensor(a)
        early: f32[4] = aten.neg(b)
        wait_b: f32[4] = c10d.wait_tensor(b)
        return output("a", wait_a), output("b", wait_b), output("c", early)
        """,
        "early = aten.neg(b) reads b before its wait: expected only waits to read what start is "
        "still writing. Remedy: read the wait's result instead.",
    ),
    "second-in-place-coalesced-buffer": (
        """
        x: f32[4] = input("x")
        p: f32[4] = aten.clone(x)
        q: f32[4] = aten.clone(x)
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced_([p, q], "sum", "dp")
        a: f32[4] = start[0]
        b: f32[4] = start[1]
        wait_a: f32[4] = c10d.wait_tensor(a)
        early: f32[4] = aten.neg(q)
        wait_b: f32[4] = c10d.wait_tensor(b)
        return output("a", wait_a), output("b", wait_b), output("c", early)
        """,
        "early = aten.neg(q) reads q before its wait: expected only waits to read what start is "
        "still writing. Remedy: read the wait's result instead.",
    ),
    "second-collective-on-a-buffer-in-flight": (
        """
        x: f32[4] = input("x")
        buffer: f32[4] = aten.clone(x)
        start: f32[4] = c10d.all_reduce_(buffer, "sum", "dp")
        again: f32[4] = c10d.all_reduce_(buffer, "sum", "tp")
        wait: f32[4] = c10d.wait_tensor(start)
        wait_again: f32[4] = c10d.wait_tensor(again)
        return output("y", wait), output("w", wait_again)
        """,
        'again = c10d.all_reduce_(buffer, "sum", "tp") reads buffer before its wait: expected only waits '
        "to read what start is still writing. Remedy: read the wait's result instead.",
    ),
    "wait-on-an-older-start": (
        """
        x: f32[4] = input("x")
        buffer: f32[4] = aten.clone(x)
        old: f32[4] = c10d.all_reduce_(buffer, "sum", "dp")
        wait_old: f32[4] = c10d.wait_tensor(old)
        new: f32[4] = c10d.all_reduce_(wait_old, "sum", "dp")
        again: f32[4] = c10d.wait_tensor(old)
        early: f32[4] = aten.neg(buffer)
        wait_new: f32[4] = c10d.wait_tensor(new)
        return output("y", early), output("w", wait_new)
        """,
        "early = aten.neg(buffer) reads buffer before its wait: expected only waits to read what new is "
        "still writing. Remedy: read the wait's result instead.",
    ),
    "write-of-what-is-being-sent": (
        """
        x: f32[4] = input("x")
        start: f32[8] = c10d.all_gather_into_tensor(x, 2, "dp")
        write: f32[4] = aten.add_.Tensor(x, 1)
        wait: f32[8] = c10d.wait_tensor(start)
        return output("y", wait)
        """,
        "write = aten.add_.Tensor(x, 1) writes x before the wait of start: expected no writes to what "
        "start is still reading. Remedy: write after the wait.",
    ),
    "never-waited": (
        """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        return output("x", x)
        """,
        'start = c10d.all_reduce(x, "sum", "dp") is never waited for: expected a wait on every result. '
        "Remedy: wait for it, or remove it.",
    ),
    "coalesced-element-never-waited": (
        """
        x: f32[4] = input("x")
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        a: f32[4] = start[0]
        b: f32[4] = start[1]
        wait: f32[4] = c10d.wait_tensor(a)
        return output("a", wait)
        """,
        "b = start[1] is never waited for: expected a wait on every result. Remedy: wait for it, or remove it.",
    ),
    "coalesced-element-never-taken": (
        """
        x: f32[4] = input("x")
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        a: f32[4] = start[0]
        wait: f32[4] = c10d.wait_tensor(a)
        return output("a", wait)
        """,
        'start = c10d.all_reduce_coalesced([x, x], "sum", "dp") has result 1, which is never waited for: expected a '
        "wait on every result. Remedy: wait for it, or remove it.",
    ),
    "unknown-group": (
        """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "pp")
        wait: f32[4] = c10d.wait_tensor(start)
        return output("y", wait)
        """,
        'start = c10d.all_reduce(x, "sum", "pp") is on group \'pp\': expected one of: dp, tp. '
        'Remedy: add it to the groups of the program, with its ranks: groups={"pp": 2}.',
    ),
    "constant-without-value": (
        """
        k: f32[4] = constant("k")
        y: f32[4] = aten.relu(k)
        return output("y", y)
        """,
        'k = constant("k") has no value: expected one of: none. Remedy: add it to Program.constants.',
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_broken(text, message):
    with pytest.raises(VerifyError) as caught:
        verify(parse(text, groups=GROUPS))
    assert str(caught.value) == message


LEGAL = {
    "no-collectives": """
        x: f32[4] = input("x")
        y: f32[4] = aten.relu(x)
        return output("y", y)
    """,
    "in-place-buffer-viewed-before-and-read-after": """
        x: f32[4] = input("x")
        buffer: f32[4] = aten.clone(x)
        half: f32[2] = aten.slice.Tensor(buffer, 0, 0, 2)
        start: f32[4] = c10d.all_reduce_(buffer, "sum", "dp")
        meanwhile: f32[4] = aten.neg(x)
        wait: f32[4] = c10d.wait_tensor(start)
        late: f32[2] = aten.neg(half)
        direct: f32[4] = aten.neg(buffer)
        return output("a", late), output("b", direct), output("c", meanwhile), output("d", wait)
    """,
    "coalesced-used-one-by-one": """
        x: f32[4] = input("x")
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        a: f32[4] = start[0]
        wait_a: f32[4] = c10d.wait_tensor(a)
        use_a: f32[4] = aten.neg(wait_a)
        b: f32[4] = start[1]
        wait_b: f32[4] = c10d.wait_tensor(b)
        return output("a", use_a), output("b", wait_b)
    """,
    "in-place-coalesced-used-one-by-one": """
        x: f32[4] = input("x")
        p: f32[4] = aten.clone(x)
        q: f32[4] = aten.clone(x)
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced_([p, q], "sum", "dp")
        a: f32[4] = start[0]
        b: f32[4] = start[1]
        wait_b: f32[4] = c10d.wait_tensor(b)
        use_q: f32[4] = aten.neg(q)
        wait_a: f32[4] = c10d.wait_tensor(a)
        use_p: f32[4] = aten.neg(p)
        return output("a", use_p), output("b", use_q), output("c", wait_a), output("d", wait_b)
    """,
    "input-read-while-being-sent": """
        x: f32[4] = input("x")
        start: f32[8] = c10d.all_gather_into_tensor(x, 2, "dp")
        other: f32[8] = c10d.all_gather_into_tensor(x, 2, "tp")
        y: f32[4] = aten.relu(x)
        wait: f32[8] = c10d.wait_tensor(start)
        wait_other: f32[8] = c10d.wait_tensor(other)
        write: f32[4] = aten.add_.Tensor(x, 1)
        return output("y", y), output("w", wait), output("o", wait_other)
    """,
    "all-reduce-copies-its-input-first": """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        write: f32[4] = aten.add_.Tensor(x, 1)
        wait: f32[4] = c10d.wait_tensor(start)
        return output("w", wait)
    """,
    "two-waits": """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        one: f32[4] = c10d.wait_tensor(start)
        y: f32[4] = aten.relu(one)
        two: f32[4] = c10d.wait_tensor(start)
        return output("y", y), output("w", two)
    """,
    "op-without-value": """
        x: f32[4] = input("x")
        ok: b8[] = aten.all(x)
        check = aten._assert_async.msg(ok, "all")
        return output("x", x)
    """,
}


@pytest.mark.parametrize("text", LEGAL.values(), ids=LEGAL)
def test_legal(text):
    verify(parse(text, groups=GROUPS), recompute=True)


@pytest.mark.parametrize("name", ["x", "y", "write", "start", "wait"])
def test_every_kind_of_value_needs_metadata(name):
    program = parse(
        """
        x: f32[4] = input("x")
        y: f32[4] = aten.relu(x)
        write: f32[4] = aten.add_.Tensor(y, 1)
        start: f32[4] = c10d.all_reduce(y, "sum", "dp")
        wait: f32[4] = c10d.wait_tensor(start)
        return output("y", wait)
        """,
        groups=GROUPS,
    )
    del named(program)[name].meta["val"]
    with pytest.raises(VerifyError, match=rf'{name} = .* has no metadata: expected meta\["val"\] on every node'):
        verify(program)


def test_ops_without_a_value_need_no_metadata():
    program = parse(LEGAL["op-without-value"])
    del named(program)["check"].meta["val"]
    verify(program)


CHAIN = """
    x: f32[4, 2] = input("x")
    y: f32[4, 2] = aten.relu(x)
    z: f32[2, 4] = aten.t(y)
    return output("z", z)
"""


def test_use_before_definition_is_one_short_error():
    program = parse(CHAIN)
    node = named(program)
    node["y"].prepend(node["z"])
    with pytest.raises(VerifyError) as caught:
        verify(program)
    assert caught.value.found == (
        "a malformed graph (Argument 'y' of Node 'z' was used before it has been defined! "
        "Please check that Nodes in the graph are topologically ordered)"
    )


def test_signature_must_match_the_graph():
    program = parse(CHAIN)
    program.inputs += (Input(InputKind.BUFFER, "b"),)
    with pytest.raises(VerifyError) as caught:
        verify(program)
    assert str(caught.value) == (
        "the graph has 1 placeholders and 1 results: expected 2 and 1, as the signature says. "
        "Remedy: describe every placeholder and every flat output once."
    )


WRONG_METADATA = {
    "shape": (lambda: torch.empty(4, 3), ["f32[4, 3]"]),
    "dtype": (lambda: torch.empty(4, 2, dtype=torch.bfloat16), ["bf16[4, 2]"]),
    "strides": (lambda: torch.empty(2, 4).t(), ["f32[4, 2] stride (1, 4)"]),
    "number-of-results": (lambda: (torch.empty(4, 2), torch.empty(4, 2)), ["f32[4, 2]", "f32[4, 2]"]),
}


@pytest.mark.parametrize(("make", "recorded"), WRONG_METADATA.values(), ids=WRONG_METADATA)
def test_recompute_catches_wrong_metadata(make, recorded):
    program = parse(CHAIN)
    with program.fake_mode:
        named(program)["y"].meta["val"] = make()
    verify(program)
    with pytest.raises(VerifyError) as caught:
        verify(program, recompute=True)
    assert str(caught.value) == (
        f"y = aten.relu(x) is recorded as {recorded}: expected ['f32[4, 2]']. Remedy: refresh its metadata."
    )


def test_errors_carry_the_node_and_its_source_line():
    program = parse(BROKEN["read-before-wait"][0], groups=GROUPS)
    node = named(program)["y"]
    node.meta["stack_trace"] = '  File "/home/me/model.py", line 12, in forward\n    return x.relu()\n'
    with pytest.raises(VerifyError, match=r"y = aten\.relu\(start\) \[model\.py:12\] reads") as caught:
        verify(program)
    assert caught.value.node is node
