"""What operators do beside computing: the memory that results share, what is written, who draws random numbers."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.effects import alias_roots, is_random, written_inputs
from crossfade.graph.text import parse
from tests.graph.ordered_programs import named, names, program_of

ALIASES = {
    "view": "aten.view(x, [16])",
    "transpose": "aten.t(x)",
    "reshape": "aten.reshape(x, [2, 8])",
    "expand": "aten.expand(x, [3, 4, 4])",
    "to-same-dtype": "aten.to.dtype(x, f32)",
    "contiguous": "aten.contiguous(x)",
    "detach": "aten.detach(x)",
    "alias": "aten.alias(x)",
    "unsafe-view": "aten._unsafe_view(x, [16])",
    "type-as": "aten.type_as(x, x)",
    "sum-to-size": "aten.sum_to_size(x, [4, 4])",
    "at-least-1d": "aten.atleast_1d(x)",
    "dropout-in-eval": "aten.dropout(x, 0.5, False)",
    "alpha-dropout-in-eval": "aten.alpha_dropout(x, 0.5, False)",
    "einsum-permute": 'aten.einsum("ij->ji", [x])',
    "conj-physical": "aten.conj_physical(x)",
    "split": "aten.split.Tensor(x, 2)",
    "unsafe-split": "aten.unsafe_split.Tensor(x, 2)",
    "unsafe-chunk": "aten.unsafe_chunk(x, 2)",
    "unbind": "aten.unbind.int(x)",
    "broadcast-tensors": "aten.broadcast_tensors([x, x])",
    "in-place": "aten.add_.Tensor(x, 1)",
    "out": "aten.add.out(y, y, out=x)",
    "two-outs": "aten.aminmax.out(y, dim=0, min=z, max=row)",
    "clone": "aten.clone(x)",
    "relu": "aten.relu(x)",
    "cat-of-one": "aten.cat([x])",
    "constant-pad-by-nothing": "aten.constant_pad_nd(x, [0, 0])",
    "to-copy": "aten._to_copy(x)",
    "layer-norm": "aten.native_layer_norm(x, [4], None, None, 1e-05)",
}


@pytest.mark.parametrize("call", ALIASES.values(), ids=ALIASES)
def test_alias_roots_match_real_memory(call):
    """Run the op on real tensors: what shares storage must share a root, and ops known to copy must not."""
    element = "element = result[0]" if "(" in _type_of(call) else "element = aten.alias(result)"
    program = program_of(f"""
        x: f32[4, 4] = input("x")
        y: f32[4, 4] = input("y")
        z: f32[4] = input("z")
        row: f32[4] = input("row")
        result = {call}
        {element}
        return output("e", element)
    """)
    inputs = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4), torch.randn(4)]
    (value,) = program.module()(*inputs)
    storages = {
        tensor.untyped_storage().data_ptr(): node for tensor, node in zip(inputs, program.placeholders, strict=True)
    }
    owner = storages.get(value.untyped_storage().data_ptr())
    root = alias_roots(program.graph.nodes)[named(program)["element"]]
    assert root.name == (owner.name if owner is not None else root.name)
    assert (root.op == "placeholder") == (owner is not None)


def _type_of(call: str) -> str:
    header = (
        'x: f32[4, 4] = input("x")\ny: f32[4, 4] = input("y")\nz: f32[4] = input("z")\nrow: f32[4] = input("row")\n'
    )
    text = str(program_of(f'{header}result = {call}\nreturn output("x", x)'))
    return text.splitlines()[4].split(" = ")[0]


def test_second_out_is_its_own_memory():
    program = program_of("""
        x: f32[4, 4] = input("x")
        low: f32[4] = input("low")
        high: f32[4] = input("high")
        pair: (f32[4], f32[4]) = aten.aminmax.out(x, dim=0, min=low, max=high)
        second: f32[4] = pair[1]
        same: f32[4] = pair[-1]
        return output("a", second), output("b", same)
    """)
    node, roots = named(program), alias_roots(program.graph.nodes)
    assert roots[node["second"]] is node["high"]
    assert roots[node["same"]] is node["high"]
    assert names(written_inputs(node["pair"])) == ["low", "high"]


def test_elements_of_one_index_are_one_memory():
    program = program_of("""
        x: f32[4] = input("x")
        pair: (f32[], f32[]) = aten.aminmax(x)
        a: f32[] = pair[1]
        b: f32[] = pair[-1]
        c: f32[] = pair[0]
        return output("a", a), output("b", b), output("c", c)
    """)
    node, roots = named(program), alias_roots(program.graph.nodes)
    assert roots[node["a"]] is roots[node["b"]]
    assert roots[node["c"]] is not roots[node["a"]]


@pytest.mark.parametrize(
    ("call", "random"),
    [
        ("aten.rand_like(x)", True),
        ("aten.bernoulli_.float(x)", True),
        ("aten.native_dropout(x, 0.5, True)", True),
        ("aten.dropout(x, 0.5, True)", True),
        ("aten.relu(x)", False),
        ("aten.empty_like(x)", False),
    ],
)
def test_is_random(call, random):
    program = program_of(f'x: f32[4] = input("x")\ny = {call}\nreturn output("x", x)')
    assert is_random(named(program)["y"]) is random


def test_attention_is_random_only_with_dropout():
    program = parse("""
q: f32[1, 2, 4, 8] = input("q")
plain = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
zero = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
some = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.1)
return output("q", q)
""")
    attention = [node for node in program.graph.nodes if node.op == "call_function"]
    assert [is_random(node) for node in attention] == [False, False, True]
