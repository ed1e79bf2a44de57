"""Where a model to forecast comes from: a factory in a file, a configuration of the transformers library, a name."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossfade.errors import BatchError, ModelError
from crossfade.graph.private import tree_flatten

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}
NAMED: Mapping[str, Mapping[str, Any]] = {
    "llama3.1-8b": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                    "intermediate_size": 14336},
    "llama3.1-70b": {**_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                     "intermediate_size": 28672},
    "llama3.1-405b": {**_LLAMA, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
                      "intermediate_size": 53248},
}  # fmt: skip
"""Configurations by name, from the model cards."""


@dataclass(frozen=True)
class Source:
    """A model without numbers, one micro-batch of one rank, and the loss function that goes with them."""

    name: str
    model: nn.Module
    batch: tuple[Any, ...]
    loss_fn: Callable[..., Tensor] | None = None

    @property
    def tokens(self) -> int:
        """Elements of the first tensor of whole numbers, or samples where there is none."""
        leaves = [leaf for leaf in tree_flatten(self.batch)[0] if isinstance(leaf, Tensor)]
        whole = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dim() > 1]
        return whole[0].numel() if whole else leaves[0].shape[0]


def source_of(what: str, batch: str) -> Source:
    """A model by what the command line is given, and a micro-batch like `8x2048` (samples by tokens).

    >>> source_of("llama3.1-9b", "1x8")
    Traceback (most recent call last):
    crossfade.errors.ModelError: no model named 'llama3.1-9b'; expected model.py:function, a configuration's .json, or \
one of llama3.1-8b, llama3.1-70b, llama3.1-405b. Remedy: give one of these.
    """
    file, _, function = what.rpartition(":")
    if function and file.endswith(".py"):
        return _from_factory(Path(file), function, batch)
    if what.endswith(".json"):
        return _from_configuration(what, json.loads(Path(what).read_text()), batch)
    if what in NAMED:
        return _from_configuration(what, NAMED[what], batch)
    raise ModelError(
        f"no model named {what!r}",
        expected=f"model.py:function, a configuration's .json, or one of {', '.join(NAMED)}",
        remedy="give one of these",
    )


def tokens_like(batch: str) -> Tensor:
    """A batch of tokens without numbers, of samples by tokens.

    >>> tokens_like("8x2048").shape
    torch.Size([8, 2048])
    """
    found = re.fullmatch(r"(\d+)x(\d+)", batch)
    if found is None or not all(map(int, found.groups())):
        raise BatchError(f"a batch of {batch!r}", expected="samples by tokens, such as 8x2048",
                         remedy="write it so: --batch 8x2048")  # fmt: skip
    return torch.empty(*map(int, found.groups()), dtype=torch.int64, device="meta")


def _from_factory(file: Path, function: str, batch: str) -> Source:
    if not file.exists():
        raise ModelError(f"no file {file}", remedy="give the path of a Python file, then a colon and its function")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise ModelError(f"{file} has no function {function}", remedy="name a function that returns a model")
    with torch.device("meta"):
        made = build()
    given = made if isinstance(made, tuple) else (made,)
    if not isinstance(given[0], nn.Module) or len(given) > 3:
        raise ModelError(
            f"{function} returned {type(given[0]).__name__}",
            expected="a model; or a model and a batch; or a model, a loss function and a batch",
            remedy="return one of these",
        )
    if len(given) > 1:
        return Source(function, given[0], tuple(given[-1]), given[1] if len(given) == 3 else None)
    ids = tokens_like(batch)
    return Source(function, given[0], (ids, ids), next_token_loss)


def _from_configuration(name: str, plain: Mapping[str, Any], batch: str) -> Source:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as missing:
        raise ModelError(f"{name} needs the transformers library", remedy="pip install transformers, or give a "
                         "factory: model.py:function") from missing  # fmt: skip
    if "model_type" not in plain:
        raise ModelError(f"{name} has no model_type", expected="a configuration of the transformers library",
                         remedy="give its config.json")  # fmt: skip
    rest = {key: value for key, value in plain.items() if key != "model_type"}
    config = AutoConfig.for_model(plain["model_type"], **{**rest, "use_cache": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = tokens_like(batch)
    return Source(name, model, ({"input_ids": ids, "labels": ids},))


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy of a language model's logits."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
