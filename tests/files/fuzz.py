"""Reads thousands of wrong files, in a process that may neither start programs nor write outside of one folder.

python -m tests.files.fuzz --count 5000 [KIND ...]
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crossfade.errors import CrossfadeError
from tests.files.kinds import KINDS
from tests.files.mutations import mutated

SECONDS = 60
ROOM = 6 << 30
PROGRAMS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.", "ctypes.dlopen",
            "socket.connect", "webbrowser.", "os.startfile")  # fmt: skip
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "shutil.",
)
RESERVED = re.compile(r"can't allocate|not enough memory|MemoryError|Cannot allocate")


class Escaped(BaseException):
    """A file made the process start something, or write where it must not."""


class Stuck(BaseException):
    """A file took too long to read."""


class Watch:
    """An audit hook that is on while a file is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.active, self.escapes = str(folder), False, list[str]()
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and (event.startswith((*PROGRAMS, *CHANGES)) or self.writes(event, args)):
            self.escapes.append(f"{event} {args!r:.200}")
            raise Escaped(self.escapes[-1])

    def writes(self, event: str, args: tuple[Any, ...]) -> bool:
        if event != "open" or not isinstance(args[0], (str, bytes)) or not isinstance(args[2], int):
            return False
        wants = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        return bool(wants) and not os.fsdecode(args[0]).startswith(self.folder)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.active = True
        signal.alarm(SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)
            self.active = False


def wronged(right: Path, folder: Path, dice: random.Random) -> str:
    """Copy an example, and make one of its files wrong; says which."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(right, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = dice.choice(files)
    what = dice.random()
    if len(files) > 1 and what < 0.04:
        path.unlink()
    elif len(files) > 1 and what < 0.08:
        path.write_bytes(dice.choice(files).read_bytes())
    else:
        path.write_bytes(mutated(path.read_bytes(), path.name, dice))
    return str(path.relative_to(folder))


def outcome(kind: str, folder: Path, watch: Watch) -> tuple[str, str]:
    """What became of reading a folder: a word, and the trace where it is a bad one."""
    try:
        with watch.on():
            KINDS[kind].read(folder)
        return "read", ""
    except CrossfadeError as error:
        text = str(error)
        names = (str(folder), *(path.name for path in folder.rglob("*")))
        if not any(name in text for name in names):
            return "nameless", text
        return ("reserved", text) if RESERVED.search(text) and kind != "text" else ("refused", text)
    except (Escaped, Stuck) as error:
        return type(error).__name__.lower(), traceback.format_exc()
    except BaseException:
        return "foreign", traceback.format_exc()


def fuzz(kind: str, count: int, seed: int, home: Path, watch: Watch) -> Counter[str]:
    """Read so many wrong files of a kind; bad outcomes are printed with what reproduces them."""
    right, folder = home / f"{kind}-right", home / f"{kind}-wrong"
    right.mkdir()
    KINDS[kind].write(right)
    KINDS[kind].read(right)
    counts: Counter[str] = Counter()
    for number in range(count):
        (home / "now").write_text(f"{kind} {seed + number}")
        file = wronged(right, folder, random.Random(f"{kind} {seed + number}"))
        word, said = outcome(kind, folder, watch)
        if watch.escapes:
            word, said = "escaped", watch.escapes.pop()
        counts[word] += 1
        if word not in ("read", "refused"):
            print(f"{kind} --seed {seed + number} --count 1, {file}: {word}\n{said}", flush=True)
    return counts


def limited() -> None:
    """No more address space than is used now, and some room."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(Stuck(f"after {SECONDS} s")))
    bad = 0
    with tempfile.TemporaryDirectory() as home:
        watch = Watch(Path(home))
        for kind in chosen.kinds:
            before = Path(home) / f"warm-{kind}"
            before.mkdir()
            KINDS[kind].write(before)
            KINDS[kind].read(before)
        limited()
        for kind in chosen.kinds:
            counts = fuzz(kind, chosen.count, chosen.seed, Path(home), watch)
            bad += sum(count for word, count in counts.items() if word not in ("read", "refused"))
            print(f"{kind}: {', '.join(f'{word} {count}' for word, count in sorted(counts.items()))}", flush=True)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
