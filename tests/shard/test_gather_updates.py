"""Parameters gathered after the update, where ranks hold them whole."""

from __future__ import annotations

from crossfade.shard.gather_updates import GatherUpdates
from tests.shard.parts import after, lines


def test_only_parameters_updated_in_parts_are_gathered():
    text, done = after(
        """
        w: f32[4] = parameter("w")
        s: f32[] = parameter("s")
        m: f32[2] = optimizer_state("w:m")
        new: f32[2] = aten.neg(m)
        twice: f32[] = aten.add.Tensor(s, s)
        return update("w", new), update("w:m", new), update("s", twice)
        """,
        GatherUpdates(),
    )
    assert text[4:] == lines("""
        all_gather_into_tensor: f32[4] = c10d.all_gather_into_tensor(new, 2, "dp")
        wait_tensor: f32[4] = c10d.wait_tensor(all_gather_into_tensor)
        twice: f32[] = aten.add.Tensor(s, s)
        return update("w", wait_tensor), update("w:m", new), update("s", twice)
    """)
    assert done.history[0].counts == {"gathered": 1}


def test_only_those_named_are_gathered():
    """A part of one row looks like a part of itself."""
    text = """
        w: f32[2] = parameter("w")
        v: f32[1] = parameter("v")
        g: f32[1] = input("g")
        neg: f32[1] = aten.neg(g)
        return update("w", neg), update("v", neg)
    """
    found, _ = after(text, GatherUpdates(only=("w",)))
    assert sum("all_gather_into_tensor" in line for line in found) == 2  # its start and its wait
    assert found[-1] == 'return update("w", wait_tensor), update("v", neg)'
