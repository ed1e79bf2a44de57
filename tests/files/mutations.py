"""Files made wrong: bytes flipped, cut, inserted and doubled; JSON, archives and pickles changed where it hurts."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS = [-1, 0, 1, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
WORDS = [
    "",
    "x",
    "0",
    "../../etc/passwd",
    "/etc/passwd",
    "\x00",
    "\ud800",
    "x" * 5000,
    "__import__('os').system('true')",
]
NESTED = [[], {}, [[]], [None], {"": None}, [0] * 50, [-1, "x", None]]
SIZES = [{"shard": -5}, {"shard": 10**12}, {"as_int": -3}, {"as_int": 10**15}]
VALUES: list[Any] = [None, True, False, *NUMBERS, *WORDS, *NESTED, *SIZES]


def mutated(data: bytes, name: str, dice: random.Random) -> bytes:
    """A file's bytes, changed in one or several ways that suit its kind."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [flipped, cut, inserted, doubled, overwritten, emptied]
    if name.endswith((".json", ".txt", ".yaml")):
        ways += [lettered, swapped_lines]
    if name.endswith(".json"):
        ways += [structured] * 8
    if name.endswith((".pt2", ".pt")):
        ways += [rearchived] * 8
    if name.endswith(".safetensors"):
        ways += [reheaded] * 6
    if name == ".metadata":
        ways += [repickled] * 8
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        data = dice.choice(ways)(data, dice)
    return data


def flipped(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 3, 20))):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data) + 1)
    return data[:start] if dice.random() < 0.5 else data[:start] + data[start + dice.randrange(1, 64) :]


def inserted(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data) + 1)
    return data[:start] + bytes(dice.randrange(256) for _ in range(dice.choice((1, 4, 100)))) + data[start:]


def doubled(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data) + 1)
    piece = data[start : start + dice.choice((1, 16, 400))]
    return data[:start] + piece * dice.choice((2, 3, 50)) + data[start:]


def overwritten(data: bytes, dice: random.Random) -> bytes:
    start, size = dice.randrange(len(data) + 1), dice.choice((1, 8, 64))
    return data[:start] + bytes([dice.choice((0, 255, 0x7F))]) * size + data[start + size :]


def emptied(data: bytes, dice: random.Random) -> bytes:
    return b"" if dice.random() < 0.1 else data[::-1] if dice.random() < 0.1 else flipped(data, dice)


def lettered(data: bytes, dice: random.Random) -> bytes:
    """A character of a text replaced by one that means something."""
    start = dice.randrange(len(data) + 1)
    word = dice.choice(
        [*"()[]{}\"'\\,:=.-*#&\n\t0987", "nan", "e400", "((((", "None", "**9", "\x00", "f32", "torch.load", "::"]
    )
    return data[:start] + word.encode() + data[start + dice.choice((0, 1)) :]


def swapped_lines(data: bytes, dice: random.Random) -> bytes:
    lines = data.split(b"\n")
    first, second = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"\n".join(lines[:first] + lines[first + 1 :] if dice.random() < 0.3 else lines)


def structured(data: bytes, dice: random.Random) -> bytes:
    """JSON with a value replaced, a key lost, renamed or doubled, or nested for ever."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return flipped(data, dice)
    try:
        for _ in range(dice.choice((1, 1, 2))):
            tree = _changed(tree, dice)
        text = json.dumps(tree, indent=dice.choice((None, 1)))
    except RecursionError:  # nested for ever by an earlier change
        return flipped(data, dice)
    if dice.random() < 0.03:
        text = text.replace("{", '{"a": ' + "[" * 5000 + "]" * 5000 + ", ", 1)
    if dice.random() < 0.05:
        text = text.replace('": ', '": 0, "x": ', 1).replace("{", '{"format": 1, "format": 1, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container with every key in it."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        found += [(node, key) for key in keys]
        left += [node[key] for key in keys]
    return found


def _changed(tree: Any, dice: random.Random) -> Any:
    places = _places(tree)
    if not places or dice.random() < 0.02:
        return copy.deepcopy(dice.choice(VALUES))
    node, key = dice.choice(places)
    what = dice.random()
    if what < 0.2:
        del node[key]
    elif what < 0.3 and isinstance(node, dict):
        node[dice.choice((f"{key}x", "", key.upper()))] = node.pop(key)
    elif what < 0.45:
        other, there = dice.choice(places)
        value = (
            json.loads(json.dumps(other[there]))
            if there in other or (isinstance(other, list) and there < len(other))
            else 0
        )
        node[key] = value
    elif what < 0.55 and isinstance(node[key], str):
        node[key] = lettered(node[key].encode("utf-8", "replace"), dice).decode("utf-8", "replace")
    elif what < 0.65 and isinstance(node[key], int) and abs(node[key]) < 2**60:
        node[key] = dice.choice((node[key] + 1, -node[key], node[key] * 1000, float(node[key]), str(node[key])))
    else:
        node[key] = copy.deepcopy(dice.choice(VALUES))
    return tree


def rearchived(data: bytes, dice: random.Random) -> bytes:
    """A zip archive with one entry changed inside, lost, renamed or compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        LookupError,
        zlib.error,
    ):
        return flipped(data, dice)
    if not entries:
        return data
    jsons = [name for name in entries if name.endswith(".json")]
    name = dice.choice(jsons) if jsons and dice.random() < 0.7 else dice.choice(list(entries))
    what, content = dice.random(), entries[name]
    if what < 0.05:
        del entries[name]
    elif what < 0.1:
        entries[dice.choice((f"{name}x", "model/data/aotinductor/model/x.so", "model/models/other.json"))] = content
    else:
        entries[name] = (
            mutated(content, Path(name).name, dice) if not name.endswith((".pt", ".pt2")) else flipped(content, dice)
        )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if dice.random() < 0.05 else zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return out.getvalue()


def reheaded(data: bytes, dice: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data):
        return flipped(data, dice)
    header = structured(data[8 : 8 + size], dice)
    length = len(header) if dice.random() < 0.9 else dice.choice((0, 2**62, len(header) * 2))
    return length.to_bytes(8, "little") + header + data[8 + size :]


def repickled(data: bytes, dice: random.Random) -> bytes:
    """Checkpoint metadata with an attribute of something in it replaced; the original is our own file."""
    try:
        found = pickle.loads(data)
        entries = [*found.state_dict_metadata.values(), *found.storage_data.values(), *found.storage_data, found]
        target = dice.choice(entries)
        target = dice.choice([target, getattr(target, "properties", target), *getattr(target, "chunks", ())])
        names = list(vars(target))
        object.__setattr__(target, dice.choice(names), dice.choice([*VALUES, (10**15, 4), (-1,), (2**62, 2**62), b"x"]))
        return pickle.dumps(found)
    except Exception:  # was changed before: any further change will do
        return flipped(data, dice)
