"""Real architectures split over real ranks: what is compared, and the table that it makes."""

from __future__ import annotations

import importlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from crossfade.errors import CrossfadeError
from crossfade.graph.private import name_group, tree_flatten
from crossfade.ranks.local import Ranks
from crossfade.shard.tensor.fill import filled
from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan
from crossfade.shard.tensor.sources import source_of
from tests.models import zoo

PLANNED = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi",
        "starcoder2",
        "granite",
        "granite_swa",
        "gpt_neox",
        "mixtral",
    )
)
"""Architectures whose plan in the transformers library splits every projection and gathers none but the logits."""

KINDS = {
    "tp_reduce": "all-reduce",
    "tp_gather": "all-gather",
    "tp_gather_enter": "all-gather",
    "tp_scatter": "reduce-scatter",
}

VARIANTS = ("static", "dynamic", "static, decomposed", "dynamic, decomposed")


@dataclass
class Row:
    """What became of one architecture on so many ranks."""

    name: str
    ranks: int
    variant: str
    plan: str = ""
    error: float = float("nan")
    planned: int = 0
    split: int = 0
    flops: float = float("nan")
    collectives: dict[str, int] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    """Why activations are gathered elsewhere than at the plan's own boundaries."""
    refused: str = ""

    @property
    def counts(self) -> tuple[int, int]:
        """All-reduces and all-gathers of a forward."""
        return self.collectives.get("all-reduce", 0), self.collectives.get("all-gather", 0)


_COUNTED = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "starcoder2", "granite", "granite_swa"), 5
    ),
    **dict.fromkeys(("phi3", "gpt2", "opt", "bloom", "stablelm", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"), 5),
    **dict.fromkeys(("phi", "gptj", "falcon"), 3),
    **dict.fromkeys(("olmo2", "olmoe"), 9),
    "mamba2": 3,
    "gpt_neox": 2,
}


def minimum(name: str, ranks: int) -> tuple[int, int] | None:
    """All-reduces and all-gathers of a decoder's forward, counted by hand for its two layers.

    One reduction after attention and one after the feed-forward part (one for both where they are added), one for a
    split embedding, one for the mean of each norm over all heads; and a gather of the logits, and of each layer's
    queries, keys and values where these are one tensor in fewer groups than ranks (falcon). Keys and values on their
    own stay whole then.
    """
    if name not in _COUNTED:
        return None
    options = zoo.architecture(name).options
    fused = options.get("num_kv_heads", ranks) % ranks != 0
    return _COUNTED[name], 1 + 2 * fused


def plan_for(architecture: zoo.Architecture, exported: ExportedProgram) -> tuple[str, Plan]:
    """The library's own plan where it splits projections where they stand, else the one that the graph suggests."""
    if architecture.name in PLANNED:
        return "transformers", Plan.from_model(architecture.build())
    return "megatron", Plan.megatron(exported, vocab=True)


def shard_on_ranks(pool: Ranks, architecture: zoo.Architecture, variant: str) -> Row:
    """Split an architecture, run it on the pool's ranks and on one device, and compare."""
    row = Row(architecture.name, pool.count, variant)
    dynamic = variant.startswith("dynamic")
    raw = architecture.export(dynamic)
    try:
        exported = architecture.export(dynamic, variant.endswith("decomposed"))
    except ValueError as error:  # gpt2: a view of what a reshape gives, which is another one then
        row.refused = f"torch cannot decompose it: {str(error).partition(chr(10))[0]}"
        return row
    inputs = architecture.inputs()
    with torch.no_grad(), counted_flops() as counter:
        whole = exported.module()(**inputs)
    try:
        row.plan, plan = plan_for(architecture, raw)
        resolved = plan.resolve(exported, pool.count)
        local = localize(exported, resolved, pool.count, "tp", Request())
    except CrossfadeError as error:
        row.refused = str(error)
        return row
    programs = []
    for rank in range(pool.count):
        program = filled(local, resolved.aliases, source_of(exported.state_dict), rank)
        saved = io.BytesIO()
        torch.export.save(program, saved)
        programs.append(saved.getvalue())
    answers = pool.run(run_saved, architecture.name, programs, inputs)
    expected = _tensors(whole)
    row.error = max(_difference(expected, found) for found, _ in answers)
    row.flops = max(flops for _, flops in answers) / max(counter.get_total_flops(), 1)
    row.planned = sum(sharding.dim is not None for sharding in resolved.parameters.values())
    shapes = {name: value.shape for name, value in exported.state_dict.items()}
    parts = program.state_dict
    row.split = sum(parts[name].shape != shapes[name] for name in resolved.parameters if name in parts)
    called = [getattr(node.target, "__name__", "").partition(".")[0] for node in local.exported.graph.nodes]
    row.collectives = dict(Counter(KINDS[name] for name in called if name in KINDS))
    row.gathered = tuple(
        said.detail for said in local.verdicts if said.reason == "gathered" and "boundary" not in said.detail
    )
    return row


def run_saved(name: str, programs: Sequence[bytes], inputs: dict[str, Tensor]) -> tuple[list[Tensor], int]:
    """On a rank: load this rank's program as any process would, run it, and count its multiplications."""
    zoo.architecture(name).build()  # what the library returns must be known to be loaded
    program = torch.export.load(io.BytesIO(programs[dist.get_rank()]))
    name_group("tp", dist.group.WORLD)
    with torch.no_grad(), counted_flops() as counter:
        results = program.module()(**inputs)
    return _tensors(results), counter.get_total_flops()


def counted_flops() -> FlopCounterMode:
    """Torch's counter, which counts neither attention on a CPU nor experts by the library's kernel on its own."""
    zoo.library()
    importlib.import_module("transformers.integrations.moe")  # which makes the operator
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    grouped = torch.ops.transformers.grouped_mm_fallback
    known = {
        attended: lambda query, key, value, *_, out_shape=None, **__: sdpa_flop_count(query, key, value),
        **dict.fromkeys((grouped, torch.ops.aten._grouped_mm), _grouped_flops),
    }
    return FlopCounterMode(display=False, custom_mapping=known)


def _grouped_flops(rows: Any, matrices: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * matrices[-1])


def _tensors(results: Any) -> list[Tensor]:
    return [value for value in tree_flatten(results)[0] if isinstance(value, Tensor)]


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a.is_floating_point()]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)
