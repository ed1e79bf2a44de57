"""Float8: which products, what they cast once, and what gathers for them carry."""

from __future__ import annotations

from crossfade.cost.estimate import Estimator
from crossfade.cost.keys import Keys
from crossfade.cost.presets import preset
from crossfade.forecast.float8 import Float8
from crossfade.graph.text import parse

PROGRAM = """
x: bf16[512, 1024] = input("x")
part: bf16[256, 1024] = parameter("part")
small: bf16[1024, 16] = parameter("small")
start: bf16[512, 1024] = c10d.all_gather_into_tensor(part, 2, "dp")
w: bf16[512, 1024] = c10d.wait_tensor(start)
other: bf16[512, 1024] = c10d.all_gather_into_tensor(part, 2, "dp")
whole: bf16[512, 1024] = c10d.wait_tensor(other)
wt: bf16[1024, 512] = aten.t(w)
a: bf16[512, 512] = aten.mm(x, wt)
b: bf16[512, 512] = aten.mm(x, wt)
c: bf16[512, 1024] = aten.mm(a, w)
d: bf16[512, 16] = aten.mm(x, small)
e: bf16[512, 1024] = aten.neg(whole)
return output("b", b), output("c", c), output("d", d), output("e", e)
"""


def test_casts_are_shared_and_gathers_for_products_alone_carry_bytes() -> None:
    program, keys = parse(PROGRAM, groups={"dp": 2}), Keys(1)
    found = Float8.of(program, keys, Estimator(program, preset("h100-cluster"), {}, keys).is_view)
    names = {node.name: casts for node, casts in found.casts.items()}
    x, own, a = 512 * 1024, 256 * 1024, 512 * 512
    assert {name: casts.bytes for name, casts in names.items()} == {
        "a": 5 * x + 5 * own,  # the weight is cast before it is gathered
        "b": 0,
        "c": 5 * a + 2 * own,  # the weight the other way round
    }
    assert [casts.kernels for casts in names.values()] == [4, 0, 3]
    assert {node.name: size for node, size in found.sent.items()} == {"start": 512 * 1024}
