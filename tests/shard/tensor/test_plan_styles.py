"""The styles of entries: torch's own, placements, strings of transformers, mappings of files; and what is refused."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan import Fused, Plan, Style
from crossfade.shard.tensor.plan_styles import REFUSED, STRINGS, read_style, to_data


@pytest.mark.parametrize(
    ("entry", "style"),
    [
        (ColwiseParallel, Style("colwise")),
        (ColwiseParallel(), Style("colwise")),
        (ColwiseParallel(input_layouts=Shard(1), use_local_output=False), Style("colwise")),
        (ColwiseParallel(output_layouts=Replicate()), Style("colwise", output="replicate")),
        (ColwiseParallel(output_layouts=Shard(1)), Style("colwise", output="shard(1)")),
        (RowwiseParallel, Style("rowwise")),
        (RowwiseParallel(input_layouts=Replicate()), Style("rowwise")),
        (RowwiseParallel(output_layouts=Shard(1)), Style("rowwise", output="shard(1)")),
        (SequenceParallel, Style("sequence", input="shard(1)", output="shard(1)")),
        (SequenceParallel(sequence_dim=0), Style("sequence", input="shard(0)", output="shard(0)")),
        (
            PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            Style("boundary", input="replicate"),
        ),
        (
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            Style("boundary", output="shard(1)"),
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=Shard(1),
                desired_input_layouts=Replicate(),
                output_layouts=Replicate(),
                desired_output_layouts=Shard(1),
            ),
            Style("boundary", input="replicate", output="shard(1)"),
        ),
        (Shard(0), Style("shard", dim=0)),
        ([Shard(-1)], Style("shard", dim=-1)),
        ((Replicate(),), Style("replicate")),
        ("shard(1)", Style("shard", dim=1)),
        (Fused(ColwiseParallel(), blocks=[4, 2]), Style("colwise", blocks=(4, 2))),
        (Fused("shard(1)", blocks=2), Style("shard", dim=1, blocks=2)),
        ({"style": "colwise", "blocks": 3, "output": "replicate"}, Style("colwise", blocks=3, output="replicate")),
        ({"style": "boundary", "input": "replicate"}, Style("boundary", input="replicate")),
    ],
)
def test_entries_are_read(entry: object, style: Style) -> None:
    assert read_style(entry) == style
    assert read_style(to_data(style)) == style


@pytest.mark.parametrize("text", STRINGS)
def test_strings_are_read_and_written(text: str) -> None:
    assert read_style(text) == STRINGS[text]
    assert read_style(to_data(STRINGS[text])) == STRINGS[text]


class OwnStyle(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: object) -> nn.Module:
        return module


class OwnColwise(ColwiseParallel):
    pass


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("colwize", "the style 'colwize'"),
        (OwnStyle(), "an entry of type OwnStyle"),
        (OwnColwise(), "an entry of type OwnColwise"),
        (PrepareModuleOutput, "the class PrepareModuleOutput"),
        (7, "an entry of type int"),
        (Partial(), "an entry of type Partial"),
        ([Shard(0), Shard(1)], "2 placements"),
        (RowwiseParallel(output_layouts=Partial()), "the layout P"),
        (
            PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(1)},
                desired_input_kwarg_layouts={"x": Replicate()},
            ),
            "layouts for keyword arguments",
        ),
        (
            PrepareModuleInput(input_layouts=(None, Shard(1)), desired_input_layouts=(None, Replicate())),
            "expected one for the first tensor",
        ),
        (Fused("replicate", blocks=2), "Fused(replicate"),
        (Fused("packed_colwise", blocks=2), "Fused(packed_colwise"),
        (Fused("colwise", blocks=0), "blocks=0"),
        (Fused("colwise", blocks=()), "blocks=()"),
        ({"blocks": 2}, "an entry with blocks"),
        ({"style": "colwise", "colour": 1}, "an entry with style, colour"),
        ({"style": "colwise", "output": "split"}, "the layout 'split'"),
        (Style("columns"), "a style of kind 'columns'"),
        (Style("shard"), "expected a dim for the kind 'shard'"),
        (Style("colwise", dim=1), "expected a dim for the kind 'shard'"),
    ],
)
def test_entries_that_say_nothing_known_are_refused(entry: object, message: str) -> None:
    with pytest.raises(PlanError, match="the plan's 'layers") as refusal:
        Plan({"layers.0.up": entry})
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", REFUSED)
def test_styles_of_kernels_and_dispatchers_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(PlanError) as refusal:
        Plan({"experts": text})
    assert REFUSED[text] in str(refusal.value)
