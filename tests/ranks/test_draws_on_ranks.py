"""Random numbers on ranks are those of one device, whatever the layout of what they are drawn for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.choice import some
from tests.ranks.draw_cases import MODELS, REFUSED, train_compiled, train_eager, train_many

OFTEN = [
    "dropout after a transpose",
    "two views",
    "checkpoints",
    "multinomial of columns",
    "model in channels last, batch norm",
    "samples last",
    "flattened by position",
    "alpha dropout",
    "bernoulli_ of a tensor",
    "noise after batch norm of a transpose",
    "noise after a norm",
    "gumbel_softmax",
    "torch.rand of the batch",
    "checkpoints, reentrant",
    "MultiheadAttention, batch second, weights",
    "conv and transpose",
    "batch norm behind batch norm",
    "frames",
]
LEAVES_LAST_BITS = ("LSTM", "GRU")  # where eager torch uses oneDNN's fused kernel


def differ(found: list[Tensor] | str, expected: list[Tensor], tolerance: float = 2e-5) -> str:
    """What differs, in words; masks that differ do by far more than sums in another order."""
    if isinstance(found, str):
        return found
    pairs = zip(found, expected, strict=True)
    return "; ".join(f"{a} for {b}" for a, b in pairs if not torch.allclose(a, b, rtol=tolerance, atol=tolerance / 10))


@pytest.mark.parametrize("name", some(MODELS, often=OFTEN))
def test_one_device_draws_as_eager_torch_does(name: str) -> None:
    assert (
        differ(train_compiled(name, 1, {}), train_eager(name), 2e-5 if name.startswith(LEAVES_LAST_BITS) else 0) == ""
    )


@pytest.mark.ranks
@pytest.mark.parametrize("part", some(["often", "first", "second"], often=["often"]))
def test_two_ranks_draw_as_one_device(ranks: Any, part: str) -> None:
    others = [name for name in MODELS if name not in OFTEN]
    names = {"often": OFTEN, "first": others[::2], "second": others[1::2]}[part]
    for found in ranks(2).run(train_many, names, 2, {}):
        assert {name: differ(found[name], train_eager(name)) for name in names} == dict.fromkeys(names, "")


SOME = OFTEN[:5]
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "four ranks": (4, {}),
    "accumulated": (2, {"accumulate": 2}),
    "each its own part": (2, {"batch": "local"}),
    "in parts": (2, {"data_parallel": "zero3"}),
    "planned, in parts": (2, {"data_parallel": "zero2", "machine": "ethernet-1gbit", "accumulate": 2}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("option", some(OPTIONS, often=OPTIONS.keys() - {"planned, in parts"}))
def test_ranks_draw_as_one_device_with(ranks: Any, option: str) -> None:
    count, options = OPTIONS[option]
    reference = {key: value for key, value in options.items() if key in ("size", "accumulate")}
    for found in ranks(count).run(train_many, SOME, count, options):
        assert {name: differ(found[name], train_eager(name, **reference)) for name in SOME} == dict.fromkeys(SOME, "")


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{"size": 2}, {"accumulate": 2}], ids=["a sample a rank", "accumulated"])
def test_batches_in_channels_last_keep_their_layout(ranks: Any, options: dict[str, Any]) -> None:
    names = ["model in channels last, batch norm", "permuted", "channel shuffle"]
    for found in ranks(2).run(train_many, names, 2, {"channels_last": True, **options}):
        expected = {name: train_eager(name, channels_last=True, **options) for name in names}
        assert {name: differ(found[name], expected[name]) for name in names} == dict.fromkeys(names, "")


@pytest.mark.ranks
def test_what_cannot_be_drawn_alike_is_refused_with_a_remedy(ranks: Any) -> None:
    for found in ranks(2).run(train_many, list(REFUSED), 2, {}):
        for name in REFUSED:
            assert "a draw by aten." in found[name] and 'pass semantics="per-rank"' in found[name]
