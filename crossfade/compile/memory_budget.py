"""A memory budget in the user's words, and which modules' values are computed again or kept in any case."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from crossfade.errors import CrossfadeError

Memory = float | str | None
"""Bytes, as a number or with a unit; or a share of what the device has."""

Recompute = Literal["auto"] | Mapping[str, str] | None
"""What to compute again: chosen also where the model is checkpointed by hand, or as told for some modules."""

Offload = bool | Literal["auto"] | Mapping[str, str] | None
"""What to move to the host: whatever is hidden, what is chosen within a budget, or as told for some modules."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WORDS = ("full", "never")
_EXPECTED = 'bytes (80e9), text with a unit ("70GB", "64GiB"), or a share of the device (0.8)'


def check_memory(given: Memory) -> float | None:
    """A budget as a number: bytes, or, up to 1, a share of what the device has.

    >>> check_memory("70GB"), check_memory("1.5 GiB"), check_memory("80e9"), check_memory(0.8)
    (70000000000.0, 1610612736.0, 80000000000.0, 0.8)
    >>> check_memory("70 gigs")
    Traceback (most recent call last):
    crossfade.errors.CrossfadeError: memory='70 gigs': expected bytes (80e9), text with a unit ("70GB", "64GiB")...
    """
    if given is None:
        return None
    if isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*", given, re.IGNORECASE)
        if found is not None and (found[2] or not found[3]):
            units = _BINARY if found[3] else _UNITS
            return float(found[1]) * units[(found[2] or "").upper()]
    elif isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < float("inf"):
        return float(given)
    raise CrossfadeError(f"memory={given!r}", expected=_EXPECTED, remedy='pass a number of bytes, like "70GB"')


def budget_in_bytes(budget: float, device: str) -> int:
    """The bytes of a budget on this device.

    >>> budget_in_bytes(70e9, "cpu"), budget_in_bytes(0.5, "cpu") > 2**20
    (70000000000, True)
    """
    if budget > 1:
        return int(budget)
    if device == "cuda":
        return int(budget * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    if device == "cpu" and hasattr(os, "sysconf"):
        return int(budget * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    raise CrossfadeError(
        f"memory={budget}, a share of what {device} has, which is not known",
        expected="a number of bytes there",
        remedy='pass one, like "70GB"',
    )


def check_recompute(
    given: Recompute, memory: Memory, model: nn.Module
) -> tuple[tuple[str, str], ...] | Literal["auto"]:
    """What is to be computed again, as pairs of a pattern and a word.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> check_recompute({"0": "full", "*": "never"}, None, model)
    (('0', 'full'), ('*', 'never'))
    >>> check_recompute({"2": "full"}, None, model)
    Traceback (most recent call last):
    crossfade.errors.CrossfadeError: recompute names '2', which matches no module: expected the name of a module...
    """
    if given is None:
        return ()
    if given == "auto":
        if memory is None:
            raise CrossfadeError(
                'recompute="auto" without a budget',
                expected="memory= too, by which values are kept or computed again",
                remedy="pass memory=, or leave recompute out: the model's own checkpoints then stay",
            )
        return "auto"
    if not isinstance(given, Mapping):
        raise CrossfadeError(
            f"recompute={given!r}",
            expected='"auto", or modules with what to do: {"blocks.*": "full", "head": "never"}',
            remedy='pass memory= and recompute="auto", or name modules',
        )
    return _checked_rules("recompute", given, "computed again", model)


def check_offload(
    given: Offload, memory: Memory, model: nn.Module
) -> tuple[tuple[str, str], ...] | Literal["auto", "all"]:
    """What is to move to the host, as pairs of a pattern and a word, or as one word; empty if nothing is.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> check_offload(None, None, model), check_offload(True, None, model), check_offload({"0": "full"}, None, model)
    ((), 'all', (('0', 'full'),))
    >>> check_offload("auto", None, model)
    Traceback (most recent call last):
    crossfade.errors.CrossfadeError: offload="auto" without a budget: expected memory= too...
    """
    if given is None or given is False:
        return ()
    if given is True:
        return "all"
    if given == "auto":
        if memory is None:
            raise CrossfadeError(
                'offload="auto" without a budget',
                expected="memory= too, by which values are kept, computed again or moved",
                remedy="pass memory=, or offload=True for whatever moves under computation",
            )
        return "auto"
    if not isinstance(given, Mapping):
        raise CrossfadeError(
            f"offload={given!r}",
            expected='True, "auto", or modules with what to do: {"blocks.*": "full", "head": "never"}',
            remedy='pass memory= and offload="auto", or name modules',
        )
    return _checked_rules("offload", given, "moved to the host", model)


def _checked_rules(option: str, given: Mapping[str, str], full: str, model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Rules as pairs, whose words are known and whose patterns match some module."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern, word in given.items():
        if word not in _WORDS:
            raise CrossfadeError(
                f"{option}={{{pattern!r}: {word!r}}}",
                expected=f'"full" ({full}) or "never" (kept)',
                remedy=_nearest(str(word), _WORDS, "pass one of the two"),
            )
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise CrossfadeError(
                f"{option} names {pattern!r}, which matches no module",
                expected="the name of a module, or a pattern with *",
                remedy=_nearest(pattern, names, "see model.named_modules()"),
            )
    return tuple(given.items())


def _nearest(given: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def rule_for(module: str, rules: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The word of the first rule that holds for a module or one around it, and the outermost module that it names.

    >>> rule_for("blocks.0.up", [("head", "never"), ("blocks.*", "full")])
    ('full', 'blocks.0')
    >>> rule_for("norm", [("head", "never")])
    ('', '')
    """
    parts = module.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    for pattern, word in rules:
        for path in around:
            if fnmatch.fnmatchcase(path, pattern):
                return word, path
    return "", ""


def in_words(size: float) -> str:
    """Bytes for people.

    >>> in_words(1500), in_words(70e9)
    ('1.50 kB', '70.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            value: Any = size / scale
            return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"
    return f"{size:.0f} B"
