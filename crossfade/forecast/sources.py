"""Where a model to forecast comes from: a factory in a file, a configuration of the transformers library, a name."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossfade.errors import BatchError, CrossfadeError, ModelError
from crossfade.files.plain import read_json
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


_GIVE_JSON = "give a config.json of the transformers library"


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
        plain = read_json(Path(what), ModelError, _GIVE_JSON)
        if not isinstance(plain, dict):
            raise ModelError(f"{what} holds a {type(plain).__name__}", expected="an object", remedy=_GIVE_JSON)
        return _from_configuration(what, plain, batch)
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
    with _named_errors(str(file)):
        spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise ModelError(f"{file} has no function {function}", remedy="name a function that returns a model")
    with _named_errors(f"{function} of {file}"), torch.device("meta"):
        made = build()
    given = made if isinstance(made, tuple) else (made,)
    is_model = len(given) in (1, 2, 3) and isinstance(given[0], nn.Module)
    is_batch = len(given) == 1 or (isinstance(given[-1], (tuple, list)) and _has_samples(given[-1]))
    if not is_model or not is_batch or (len(given) == 3 and not callable(given[1])):
        raise ModelError(
            f"{function} returned {', '.join(type(each).__name__ for each in given) or 'nothing'}",
            expected="a model; or a model and a batch; or a model, a loss function and a batch, a tuple with tensors",
            remedy="return one of these",
        )
    if len(given) > 1:
        return Source(function, given[0], tuple(given[-1]), given[1] if len(given) == 3 else None)
    ids = tokens_like(batch)
    return Source(function, given[0], (ids, ids), next_token_loss)


def _has_samples(batch: Sequence[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dim() and leaf.numel() for leaf in tree_flatten(tuple(batch))[0])


@contextlib.contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Whatever the code of a file raises, as an error of ours with its first line."""
    try:
        yield
    except CrossfadeError:
        raise
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise ModelError(f"{where} raised {type(error).__name__}: {said}",
                         remedy="run it by itself, and correct what that shows") from error  # fmt: skip


def _from_configuration(name: str, plain: Mapping[str, Any], batch: str) -> Source:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    except ImportError as missing:
        raise ModelError(f"{name} needs the transformers library", remedy="pip install transformers, or give a "
                         "factory: model.py:function") from missing  # fmt: skip
    if "model_type" not in plain:
        raise ModelError(f"{name} has no model_type", expected="a configuration of the transformers library",
                         remedy="give its config.json")  # fmt: skip
    rest = {key: value for key, value in plain.items() if key != "model_type"}
    ids = tokens_like(batch)
    try:
        config = AutoConfig.for_model(plain["model_type"], **{**rest, "use_cache": False})
        kind = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # the library checks configurations by errors of many kinds
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{name} of model_type {plain['model_type']!r}: {said}",
                         expected="a configuration of a language model that the transformers library can build",
                         remedy="correct it, or build the model yourself: model.py:function") from error  # fmt: skip
    return Source(name, model, ({"input_ids": ids, "labels": ids},))


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """The mean cross-entropy of a language model's logits."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
