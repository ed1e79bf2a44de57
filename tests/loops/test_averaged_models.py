"""An exponential moving average of the weights, kept between steps as torch's own does."""

from __future__ import annotations

from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import crossfade as cf
from tests.loops.plain import adamw, batches, network, same, trained


def test_an_average_follows_the_steps() -> None:
    reference, model = network(), network()
    optimizer = adamw(reference)
    kept = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (reference, model)]
    step = cf.compile_step(model, F.mse_loss, adamw(model))
    for batch in batches():
        expected = trained(reference, optimizer, [batch])
        kept[0].update_parameters(reference)
        assert [step(*batch).item()] == expected
        kept[1].update_parameters(model)
    same(kept[1], kept[0])
    update_bn(batches(), kept[1])
    assert step.captures == 1
