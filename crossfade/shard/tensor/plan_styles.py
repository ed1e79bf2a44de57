"""What one entry of a tensor-parallel plan asks for, whatever it was spelled with.

Users write torch's `ParallelStyle`s, DTensor's placements or the transformers library's strings. Inside there is one
vocabulary: `Style`. Layouts are spelled `"replicate"` and `"shard(1)"`, the dim counted from the front or the back.

    >>> read_style("colwise_gather_output")
    Style(kind='colwise', output='replicate')
    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor.parallel import RowwiseParallel
    >>> read_style(RowwiseParallel(output_layouts=Shard(1)))
    Style(kind='rowwise', output='shard(1)')
    >>> read_style(Shard(0))
    Style(kind='shard', dim=0)
    >>> read_style(Fused("colwise", blocks=3))
    Style(kind='colwise', blocks=3)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from crossfade.errors import PlanError

KINDS = ("colwise", "rowwise", "shard", "sequence", "boundary", "replicate")


@dataclass(frozen=True, repr=False)
class Style:
    """What a plan entry asks of the modules or parameters it names.

    `kind` is one of
    - `colwise`: split what the module puts out; the output stays split unless `output` says otherwise;
    - `rowwise`: split what the module contracts over (the rows of an embedding); the partial sums are reduced to
      `output`, which is `replicate` where nothing is said;
    - `shard`: split dim `dim` of a named parameter, and say nothing about activations;
    - `sequence`: keep parameters whole and work on activations split as `input` and `output` say;
    - `boundary`: only say how activations enter (`input`) or leave (`output`) a module;
    - `replicate`: keep parameters whole.

    `blocks` cuts a fused weight (qkv, gate_up) into blocks that are split one by one: their number, or their sizes.
    """

    kind: str
    dim: int | None = None
    blocks: int | tuple[int, ...] = 1
    input: str | None = None
    output: str | None = None
    spelling: str = field(default="", compare=False)

    def __repr__(self) -> str:
        options = [(option, getattr(self, option.name)) for option in fields(self)[1:-1]]
        given = [f"{option.name}={value!r}" for option, value in options if value != option.default]
        return f"Style({', '.join([f'kind={self.kind!r}', *given])})"

    def __str__(self) -> str:
        return self.spelling or self.kind

    @property
    def shards(self) -> bool:
        """Whether it asks for a parameter to be split."""
        return self.kind in ("colwise", "rowwise", "shard")


@dataclass(frozen=True)
class Fused:
    """A style for weights that hold several matrices in one: each block is split by itself.

    `blocks` is their number when they are equal, or their sizes along the split dim.

        >>> Fused("colwise", blocks=(64, 32, 32))
        Fused(style='colwise', blocks=(64, 32, 32))
    """

    style: Any
    blocks: int | Sequence[int]


_COLWISE, _ROWWISE, _REPLICATE = Style("colwise"), Style("rowwise"), Style("replicate")
_WHOLE_COLWISE = Style("colwise", output="replicate")
_REDUCED = Style("boundary", output="replicate")

STRINGS: Mapping[str, Style] = {
    "colwise": _COLWISE,
    "local_colwise": _COLWISE,
    "colwise_gather_output": _WHOLE_COLWISE,
    "colwise_rep": _WHOLE_COLWISE,
    "packed_colwise": Style("colwise", blocks=2),
    "local_packed_colwise": Style("colwise", blocks=2),
    "rowwise": _ROWWISE,
    "local_rowwise": _ROWWISE,
    "rowwise_rep": _ROWWISE,
    "rowwise_split_input": _ROWWISE,
    "packed_rowwise": Style("rowwise", blocks=2),
    "local_packed_rowwise": Style("rowwise", blocks=2),
    "embedding_rowwise": _ROWWISE,
    "embedding_colwise": _WHOLE_COLWISE,
    "sequence_parallel": Style("sequence", input="shard(1)", output="shard(1)"),
    "grouped_gemm": Style("shard", dim=0),
    "moe_tp_experts": _REDUCED,
    "all_reduce": _REDUCED,
    "gather": _REDUCED,
    "local_params": Style("boundary"),
    "replicate": _REPLICATE,
    "replicated_with_grad_allreduce": _REPLICATE,
    "mla_kv_a_proj": _REPLICATE,
    "moe_identity_expert": _REPLICATE,
    "ep_router": _REPLICATE,
}
"""The strings of the transformers library. What a style only does to gradients or to local copies of global values
(`replicated_with_grad_allreduce`, `mla_kv_a_proj`, `moe_identity_expert`, `ep_router`) needs no word here: the program
means what it meant on one device. `local_params` lets a module run on its parts: it says nothing of what is split."""

REFUSED: Mapping[str, str] = {
    "ep_dispatch_experts": "it sends tokens to their experts by all-to-all; a plan only says what is split",
    "megamoe_router": "it belongs to a kernel that exchanges tokens itself",
    "megamoe_experts": "it belongs to a kernel that exchanges tokens itself",
    "local": "it leaves to the module's own code what each rank computes",
    "isolated": "it leaves to the module's own code what each rank computes",
}

_SHARD = re.compile(r"shard\((-?\d{1,9})\)", re.ASCII)


def read_style(entry: Any) -> Style:
    """The style that an entry of a plan stands for; PlanError if it stands for none."""
    if isinstance(entry, Style):
        return _checked(entry)
    if isinstance(entry, str):
        return _from_string(entry)
    if isinstance(entry, Fused):
        return _fused(read_style(entry.style), entry.blocks)
    if isinstance(entry, Mapping):
        return _from_mapping(entry)
    if isinstance(entry, list | tuple):
        return _from_placements(entry)
    return _from_torch(entry)


def _checked(style: Style) -> Style:
    if style.kind not in KINDS:
        raise _unreadable(f"a style of kind {style.kind!r}", f"one of {', '.join(KINDS)}")
    for layout in (style.input, style.output):
        if layout not in (None, "replicate") and not _SHARD.fullmatch(str(layout)):
            raise _unreadable(f"the layout {layout!r}", "'replicate' or 'shard(<dim>)'")
    if style.input is not None and style.kind not in ("sequence", "boundary"):
        raise _unreadable(
            f"the input layout {style.input!r} of a style {style.kind!r}", "none: the weights say what enters"
        )
    if (style.kind == "shard") != (style.dim is not None):
        raise _unreadable(f"{style!r}", "a dim for the kind 'shard', and for no other")
    return style


def _unreadable(found: str, expected: str) -> PlanError:
    remedy = "write a ParallelStyle of torch, a placement, Fused(...) or a string of docs/plans.md"
    return PlanError(found, expected=expected, remedy=remedy)


def _from_string(text: str) -> Style:
    if text in STRINGS:
        return replace(STRINGS[text], spelling=text)
    if shard := _SHARD.fullmatch(text):
        return Style("shard", dim=int(shard[1]), spelling=text)
    if text in REFUSED:
        remedy = (
            "leave the entry out, or name the parameters with 'shard(<dim>)' and their module with 'moe_tp_experts'"
        )
        raise PlanError(f"the style {text!r}: {REFUSED[text]}", remedy=remedy)
    raise _unreadable(f"the style {text!r}", f"'shard(<dim>)' or one of {', '.join(sorted(STRINGS))}")


def _fused(style: Style, blocks: int | Sequence[int]) -> Style:
    if not isinstance(blocks, int) and (isinstance(blocks, str) or not isinstance(blocks, Sequence)):
        raise _unreadable(f"blocks={blocks!r}", "how many blocks, or their sizes")
    counted = blocks if isinstance(blocks, int) else tuple(blocks)
    sizes = (counted,) if isinstance(counted, int) else counted
    if not style.shards or style.blocks != 1:
        raise _unreadable(f"Fused({style}, ...)", "a style that splits a parameter and has no blocks itself")
    if not sizes or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise _unreadable(f"blocks={blocks!r}", "how many blocks, or their sizes")
    counted = counted[0] if isinstance(counted, tuple) and len(counted) == 1 else counted
    return replace(style, blocks=counted, spelling=f"{style} in {_blocks_text(counted)}")


def _blocks_text(blocks: int | tuple[int, ...]) -> str:
    return f"{blocks} blocks" if isinstance(blocks, int) else f"blocks of {', '.join(map(str, blocks))}"


def _from_mapping(entry: Mapping[str, Any]) -> Style:
    """The form of plan files: `{style: colwise, blocks: 3, output: replicate}`."""
    unknown = sorted(set(map(str, entry)) - {"style", "blocks", "input", "output"})
    if "style" not in entry or unknown:
        raise _unreadable(
            f"an entry with {', '.join(map(str, entry)) or 'nothing in it'}", "style, blocks, input, output"
        )
    name = str(entry["style"])
    style = _BARE.get(name) or _from_string(name)
    said = {name: entry[name] for name in ("input", "output") if entry.get(name) is not None}
    style = _checked(replace(style, **said, spelling=name))
    return _fused(replace(style, blocks=1), entry["blocks"]) if "blocks" in entry else style


_BARE = {"boundary": Style("boundary"), "sequence": Style("sequence")}


def to_data(style: Style) -> str | dict[str, Any]:
    """The style as plan files hold it: a string where one says it all.

    >>> to_data(read_style("rowwise_rep")), to_data(read_style(Fused("colwise", (4, 2))))
    ('rowwise', {'style': 'colwise', 'blocks': [4, 2]})
    """
    if style.kind == "shard" and style.blocks == 1:
        return f"shard({style.dim})"
    for text, known in STRINGS.items():
        if known == style:
            return text
    data: dict[str, Any] = {"style": f"shard({style.dim})" if style.kind == "shard" else style.kind}
    if style.blocks != 1:
        data["blocks"] = style.blocks if isinstance(style.blocks, int) else list(style.blocks)
    return data | {name: getattr(style, name) for name in ("input", "output") if getattr(style, name)}


def _from_placements(entry: Sequence[Any]) -> Style:
    if len(entry) != 1:
        raise _unreadable(f"{len(entry)} placements", "one: a plan speaks of one axis of the mesh")
    return _from_torch(entry[0])


def _from_torch(entry: Any) -> Style:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as torch_styles

    if type(entry) is Shard:
        return Style("shard", dim=entry.dim, spelling=f"Shard({entry.dim})")
    if type(entry) is Replicate:
        return replace(_REPLICATE, spelling="Replicate()")
    read = {
        torch_styles.ColwiseParallel: _from_colwise,
        torch_styles.RowwiseParallel: _from_rowwise,
        torch_styles.SequenceParallel: _from_sequence,
        torch_styles.PrepareModuleInput: _from_prepare_input,
        torch_styles.PrepareModuleOutput: _from_prepare_output,
        torch_styles.PrepareModuleInputOutput: _from_prepare_both,
    }
    style_type = entry if isinstance(entry, type) else type(entry)
    if style_type not in read:
        raise _unreadable(f"an entry of type {style_type.__name__}", "a style or a placement that torch offers itself")
    if isinstance(entry, type) and style_type in (
        torch_styles.PrepareModuleOutput,
        torch_styles.PrepareModuleInputOutput,
    ):
        raise _unreadable(f"the class {style_type.__name__}", "an instance, since it needs layouts")
    style = read[style_type](entry() if isinstance(entry, type) else entry)
    return replace(style, spelling=style_type.__name__)


def _from_colwise(entry: Any) -> Style:
    """`input_layouts` says what arrives, which the program knows; only what is wanted is read."""
    output = _layout(entry.output_layouts[0])
    return Style("colwise", output=None if output == "shard(-1)" else output)


def _from_rowwise(entry: Any) -> Style:
    output = _layout(entry.output_layouts[0])
    return Style("rowwise", output=None if output == "replicate" else output)


def _from_sequence(entry: Any) -> Style:
    layout = _layout(entry.sequence_sharding[0])
    return Style("sequence", input=layout, output=layout)


def _from_prepare_input(entry: Any) -> Style:
    if entry.input_kwarg_layouts:
        raise _unreadable("PrepareModuleInput with layouts for keyword arguments", "the first positional input alone")
    return Style("boundary", input=_first_layout(entry.desired_input_layouts or ()))


def _from_prepare_output(entry: Any) -> Style:
    return Style("boundary", output=_first_layout(entry.desired_output_layouts))


def _from_prepare_both(entry: Any) -> Style:
    returned = _from_prepare_output(entry.prepare_module_output)
    return replace(_from_prepare_input(entry.prepare_module_input), output=returned.output)


def _first_layout(layouts: Sequence[Any]) -> str:
    if not layouts or layouts[0] is None or any(layout is not None for layout in layouts[1:]):
        raise _unreadable(f"the layouts {tuple(layouts)}", "one for the first tensor, and for no other")
    return _layout(layouts[0])


def _layout(placement: Any) -> str:
    from torch.distributed.tensor import Replicate, Shard

    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Shard:
        return f"shard({placement.dim})"
    raise _unreadable(f"the layout {placement}", "Replicate() or Shard(dim): partial sums are reduced where they arise")
