"""Equal layers are captured twice and repeated: the program is the one that capturing all of them gives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from crossfade.cost.flops import flops_of
from crossfade.cost.presets import preset
from crossfade.forecast.capture import capture_model
from crossfade.forecast.layers import Layers, find_layers, shortened
from crossfade.forecast.prepared import Prepared
from crossfade.graph.memory import memory_curve
from crossfade.graph.program import Program
from crossfade.graph.verify import verify
from tests.forecast.models import Tower, tokens, tower


def content(program: Program) -> tuple[object, ...]:
    """What must be alike, whatever nodes are called and in which order inputs stand."""
    results = {(out.kind, out.name, tuple(node.meta["val"].shape)) for out, node in program.named_results()}
    inputs = {(item.kind, item.name, tuple(node.meta["val"].shape)) for item, node in program.named_inputs()}
    calls = [
        (str(node.target), str(node.meta["val"].shape) if isinstance(node.meta["val"], Tensor) else "")
        for node in program.graph.nodes
        if node.op == "call_function"
    ]
    return results, inputs, calls


@pytest.mark.parametrize(("layers", "ranks"), [(3, 1), (7, 1), (5, 2)])
def test_repeated_layers_are_as_if_captured(layers: int, ranks: int) -> None:
    few, all_of_them = (
        capture_model(tower(layers), tokens(), ranks=ranks, whole=whole) for whole in (False, True)
    )  # fmt: skip
    assert few.layers == Layers("blocks", 0, 1, layers) and all_of_them.layers is None
    verify(few.program)
    assert content(few.program) == content(all_of_them.program)
    assert memory_curve(few.program).peak == memory_curve(all_of_them.program).peak
    machine = preset("a100-cluster")
    seconds = [Prepared.of(each.program, {"tp": ranks}).timeline(machine).seconds for each in (few, all_of_them)]
    assert seconds[0] == seconds[1]


def test_the_order_of_data_is_the_same() -> None:
    """Each layer's first product reads what the one before handed on."""
    program = capture_model(tower(6), tokens()).program
    names = [node.name for node in program.placeholders]
    assert sorted(name for name in names if "up_weight" in name) == [f"blocks_{i}_up_weight" for i in range(6)]
    gradients = {out.name: node for out, node in program.named_results() if out.kind == "gradient"}
    for index in range(6):
        reached, waiting = set(), [gradients[f"blocks.{index}.up.weight"]]
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting += node.all_input_nodes
        later = {f"blocks_{other}_down_weight" for other in range(index, 6)}
        assert later <= {node.name for node in reached}


def test_llama_of_the_transformers_library() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=96, vocab_size=128, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    found = [capture_model(model, ({"input_ids": ids, "labels": ids},), whole=whole).program for whole in (False, True)]
    assert content(found[0]) == content(found[1])
    targets = Counter(str(node.target) for node in found[0].graph.nodes)
    assert targets["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 4
    counted = sum(flops_of(node) for node in found[0].graph.nodes if node.op == "call_function")
    weights = 6 * 32 * (4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 64 * 128)
    scores = 2 * 4 * 16 * 16  # samples, heads, queries, keys; forward 2 products, backward 5, half of them masked
    attention = 4 * 7 * (2 * scores * 16) / 2
    assert counted == pytest.approx(weights + attention, rel=0.01)


def test_layers_that_take_turns_and_others_around_them() -> None:
    odd, even = (lambda: nn.Linear(4, 4)), (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), *(make() for _ in range(4) for make in (odd, even)))
    assert find_layers(model) == Layers("", 1, 2, 4)
    found = [capture_model(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.functional.mse_loss, whole=whole)
             for whole in (False, True)]  # fmt: skip
    assert content(found[0].program) == content(found[1].program)


class Sharing(nn.Module):
    """Each layer also reads what all before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            total = total + layer(x)
        return total.sum()


def test_layers_that_share_more_are_all_captured() -> None:
    found = capture_model(Sharing(), (torch.ones(2, 4),))
    assert sum(out.kind == "gradient" for out in found.program.outputs) == 8


def test_a_model_is_left_as_it_was() -> None:
    model = Tower(5)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(RuntimeError, match="stop"), shortened(model, find_layers(model)):
        assert len(model.blocks) == 2
        raise RuntimeError("stop")
    capture_model(model, tokens(), ranks=2)
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
