"""`python -m tests.models.breadth`: how much of each architecture's weights `Plan.megatron` splits, in order of name.

Architectures are those of the transformers library's `AutoModel`, so nobody chose them for success. Each has the widths
of its configuration's defaults, two layers, and small tables of words and positions, which layers outweigh in the
models that people use. They are built on the meta device: no weight takes memory.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import inspect
import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from crossfade.graph.private import tree_flatten
from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.models import zoo
from tests.shard.tensor.lockstep import run_ranks

VOCABULARY, POSITIONS = 512, 128
BATCH, SEQUENCE = 2, 16
ENOUGH = 0.8
"""The share of its weight bytes that has to be split for an architecture to count as split."""


@dataclass(frozen=True)
class Breadth:
    """What the finder does for one architecture."""

    name: str
    share: float = 0.0
    """Of the bytes of all parameters that the program reads, those that are split."""
    weights: int = 0
    whole: tuple[str, ...] = ()
    """The largest parameters that stay whole, with their share of the bytes, and why."""
    refused: str = ""
    """Why there is no exported program, or no plan for it."""
    exported: bool = True
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.refused:
            return f"{self.name}: {'refused' if self.exported else 'not exported'}: {self.refused}"
        return "\n    ".join([f"{self.name}: {self.share:.1%} of {self.weights / 1e6:.1f} MB", *self.whole])


def names(pattern: str = "*") -> list[str]:
    """The architectures of the library whose names match one of the patterns (by comma), in order of name."""
    wanted = pattern.split(",")
    return [name for name in sorted(_classes()) if any(fnmatch.fnmatch(name, part) for part in wanted)]


def breadth_of(name: str, ranks: int = 2, singles: bool = True, limit: int = 120) -> Breadth:
    """Export an architecture, find its plan, and count."""
    start = time.monotonic()
    try:
        with _at_most(limit):
            exported = export(name)
    except Exception as error:  # what cannot be built or exported is a row of the table
        return Breadth(name, refused=_short(error), exported=False, seconds=time.monotonic() - start)
    try:
        with _at_most(limit):
            found = measured(exported, ranks, singles)
    except Exception as error:  # likewise
        return Breadth(name, refused=_short(error), seconds=time.monotonic() - start)
    return Breadth(name, *found, seconds=time.monotonic() - start)


def measured(exported: ExportedProgram, ranks: int = 2, singles: bool = True) -> tuple[float, int, tuple[str, ...]]:
    """The share of the bytes that are split, all of them, and what stays whole."""
    plan = Plan.megatron(exported, vocab=True, singles=singles)
    resolved = plan.resolve(exported, ranks)
    inputs = exported.graph_signature.inputs_to_parameters
    read = {
        inputs[node.name] for node in exported.graph.find_nodes(op="placeholder") if node.users and node.name in inputs
    }
    parameters = {name: sharding for name, sharding in resolved.parameters.items() if name in read}
    total = sum(sharding.bytes for sharding in parameters.values())
    split = sum(sharding.bytes for sharding in parameters.values() if sharding.dim is not None)
    rest: Counter[str] = Counter()
    for parameter, sharding in parameters.items():
        if sharding.dim is None and len(sharding.shape) > 1:
            rest[re.sub(r"(?<![^.])\d+(?![^.])", "*", parameter)] += sharding.bytes
    why = {
        note.partition(" stays whole: ")[0]: note.partition(" stays whole: ")[2]
        for note in (*plan.notes, *resolved.notes)
    }
    whole = [
        f"{size / total:.1%} {pattern}: {why.get(pattern, 'no note')}"
        for pattern, size in rest.most_common(8)
        if size > total / 50
    ]
    return split / max(total, 1), total, tuple(whole)


def difference(name: str, ranks: int = 2, singles: bool = True) -> tuple[float, dict[str, int]]:
    """The largest between the results of ranks and one device, relative to the largest value; and the collectives.

    All ranks run in this process, collectives by hand.
    """
    exported = export(name, "cpu")
    inputs = [value for value in tree_flatten(exported.example_inputs)[0] if isinstance(value, Tensor)]
    given = [torch.randn_like(value) if value.is_floating_point() else value for value in inputs]
    plan = Plan.megatron(exported, vocab=True, singles=singles)
    local = localize(exported, plan.resolve(exported, ranks), ranks, "tp", Request())
    state = {**exported.state_dict, **exported.constants}
    with torch.no_grad():
        whole = tree_flatten(exported.module()(**dict(zip(exported.example_inputs[1], given, strict=True))))[0]
        found = run_ranks(local, state, given)
    kinds = [spec.kind for spec in local.exported.graph_signature.output_specs]  # what it writes into weights comes too
    called = [getattr(node.target, "__name__", "").partition(".")[0] for node in local.exported.graph.nodes]
    return max(
        float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))
        for results in found
        for one, other in zip(whole, _returned(results, kinds), strict=True)
        if isinstance(one, Tensor) and one.is_floating_point()
    ), dict(Counter(name for name in called if name in ("tp_reduce", "tp_gather", "tp_gather_enter", "tp_scatter")))


def _returned(results: Iterable[Any], kinds: Iterable[OutputKind]) -> list[Any]:
    return [result for result, kind in zip(results, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]


def export(name: str, device: str = "meta") -> ExportedProgram:
    """An architecture of the library as a program: without weights, or with random ones on another device."""
    model, inputs = build(name, device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (), inputs, strict=False)


def build(name: str, device: str = "meta") -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """The model in eval mode and keyword arguments for it."""
    transformers = zoo.library()
    config = transformers.AutoConfig.for_model(name)
    shrink(config)
    kind = _classes()[name]
    kind = getattr(transformers, kind if isinstance(kind, str) else kind[0])
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = kind(config).eval()
        if device != "meta":  # libraries start biases at zero, which hides what is added twice
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.01)
        return model, inputs_for(model)


def _classes() -> dict[str, Any]:
    zoo.library()
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return dict(MODEL_MAPPING_NAMES)


_DEPTHS = re.compile(
    r"(num|n)_(\w+_)?(layers?|blocks?)|depth|layers|(encoder|decoder|num_\w+)_layers|n_layers?|num_hidden_(layers|groups)"
)
_KEPT = re.compile(r"num_(conv|feature|downsampl|upsampl|feat_extract|codebook|hidden_layers_per|kv_shared|nextn)\w*")
_PER_LAYER = {"layer_types", "layers_block_type", "mlp_layer_types", "attn_layer_indices", "layer_block_types"}


def shrink(config: Any) -> None:
    """Two layers and few words, in a configuration and those inside it; widths stay.

    What is listed layer by layer has as many entries as there were layers, and keeps one of each kind.
    """
    layers = next(
        (
            getattr(config, key)
            for key in ("num_hidden_layers", "n_layer", "num_layers")
            if isinstance(getattr(config, key, None), int)
        ),
        0,
    )
    keep = 2
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if isinstance(types, list | tuple) and len(types) == layers > 2:
        keep = max(2, max(list(types).index(kind) for kind in set(types)) + 1)
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            if _DEPTHS.fullmatch(key) and not _KEPT.match(key) and value > keep:
                _set(config, key, keep)
            elif key == "vocab_size":
                _set(config, key, VOCABULARY)
            elif key in ("max_position_embeddings", "n_positions"):
                _set(config, key, min(value, POSITIONS))
            elif key.endswith(("_token_id", "_token_index")):
                _set(config, key, min(value, VOCABULARY - 1))
        elif isinstance(value, list | tuple) and layers > keep and len(value) == layers:
            _set(config, key, value[:keep])
    if hasattr(config, "use_cache"):
        _set(config, "use_cache", False)


def _set(config: Any, key: str, value: Any) -> None:
    try:
        setattr(config, key, value)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return  # a property that follows from others, which are set


def inputs_for(model: torch.nn.Module) -> dict[str, Tensor]:
    """What a model's forward needs, by the names of its arguments."""
    taken = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = {
        name
        for name, parameter in taken.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    wanted = {main, *needed} | ({"decoder_input_ids"} if "decoder_input_ids" in taken else set())
    if main == "pixel_values" and "input_ids" in taken:
        wanted.add("input_ids")
    if main == "input_ids" and "pixel_values" in taken and _no_tokens_for_images(model):
        wanted.add("pixel_values")
    return {name: _INPUTS[name](model.config) for name in taken if name in wanted and name in _INPUTS}


def _no_tokens_for_images(model: torch.nn.Module) -> bool:
    """Models of two towers; others need as many tokens in the text as there are pieces of an image."""
    return hasattr(model, "get_text_features") or hasattr(model, "logit_scale")


def _size(config: Any, keys: Iterable[str], default: Any) -> Any:
    """The first of these attributes that a configuration, or one inside it, has."""
    inside = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    found = [getattr(part, key, None) for part in (config, *inside) for key in keys]
    return next((value for value in found if value), default)


def _tokens(config: Any) -> Tensor:
    return torch.ones(BATCH, SEQUENCE, dtype=torch.int64) * 5


def _pixels(config: Any) -> Tensor:
    channels = _size(config, ("num_channels", "in_chans", "in_channels"), 3)
    size = _size(config, ("image_size", "img_size"), 224)
    height, width = (
        (size, size) if isinstance(size, int) else (tuple(size.values()) if isinstance(size, dict) else tuple(size))[:2]
    )
    return torch.zeros(BATCH, channels, height, width)


def _frames(config: Any) -> Tensor:
    image = _pixels(config)
    return image.unsqueeze(1).expand(-1, _size(config, ("num_frames",), 8), -1, -1, -1)


def _wave(config: Any) -> Tensor:
    bins, length = (_size(config, (key,), 0) for key in ("num_mel_bins", "max_length"))
    if bins and length and hasattr(config, "frequency_stride"):
        return torch.zeros(BATCH, length, bins)
    return (
        torch.zeros(BATCH, 1, 8000)
        if _size(config, ("audio_channels", "upsampling_ratios"), 0)
        else torch.zeros(BATCH, 8000)
    )


def _spectrum(config: Any) -> Tensor:
    bins = _size(config, ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim"), 80)
    places = _size(config, ("max_source_positions",), 0)
    return (
        torch.zeros(BATCH, bins, 2 * places)
        if places and not hasattr(config, "conv_kernel_sizes")
        else torch.zeros(BATCH, 64, bins)
    )


def _mask(config: Any) -> Tensor:
    return torch.ones(BATCH, SEQUENCE, dtype=torch.int64)


def _boxes(config: Any) -> Tensor:
    return torch.zeros(BATCH, SEQUENCE, 4, dtype=torch.int64)


_INPUTS: dict[str, Callable[[Any], Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "attention_mask": _mask,
    "bbox": _boxes,
    "pixel_values": _pixels,
    "pixel_values_videos": _frames,
    "input_values": _wave,
    "input_features": _spectrum,
}


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """An error where something takes longer."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def summary(rows: Iterable[Breadth]) -> str:
    """How many of those that export are split enough."""
    rows = list(rows)
    exported = [row for row in rows if row.exported]
    enough = [row for row in exported if not row.refused and row.share >= ENOUGH]
    share = f"at least {ENOUGH:.0%} of the weight bytes are split"
    return f"{len(exported)} of {len(rows)} export; of {len(enough)} of them {share}"


def saved(rows: Iterable[Breadth], every: int, first: int, ranks: int) -> str:
    """The rows as JSON, with what a reader has to know about where they come from."""
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "every": every,
        "first": first,
        "ranks": ranks,
    }
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1)


def main() -> None:
    """Go over the architectures and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default="*", help="patterns of names, by comma")
    parser.add_argument("--every", type=int, default=1, help="one of so many, in order of name")
    parser.add_argument("--first", type=int, default=0, help="how many names to pass over before the first one")
    parser.add_argument("--save", type=Path, help="a file for the rows, which `tests.models.table` makes a table of")
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks split the weights")
    parser.add_argument("--limit", type=int, default=120, help="seconds for an export, and for a plan")
    parser.add_argument("--pairs", action="store_true", help="only what is in pairs, as `Plan.megatron` unless asked")
    parser.add_argument("--compare", action="store_true", help="run the programs of all ranks too, with random weights")
    options = parser.parse_args()
    rows = []
    for name in names(options.names)[options.first :: options.every]:
        if options.compare:
            print(name, _compared(name, options), flush=True)
            continue
        rows.append(breadth_of(name, options.ranks, not options.pairs, options.limit))
        print(f"{rows[-1]}  [{rows[-1].seconds:.0f} s]", flush=True)
        if options.save:
            options.save.write_text(saved(rows, options.every, options.first, options.ranks))
    print(summary(rows))


def _compared(name: str, options: argparse.Namespace) -> str:
    try:
        with _at_most(300):
            error, collectives = difference(name, options.ranks, not options.pairs)
    except Exception as problem:  # the others are still of interest
        return _short(problem)
    return f"difference {error:.0e}, {collectives}"


if __name__ == "__main__":
    main()
