"""`python -m tests.models.compatibility`: trains every architecture on two ranks and in one process, keeps what became
of it in `trained.json`, and writes the section on Hugging Face architectures of docs/compatibility.md from that.

    python -m tests.models.compatibility --names bert,llama  # only these; the others stay as they were
    python -m tests.models.compatibility --missing           # go on where an earlier run was ended
    python -m tests.models.compatibility --names ""          # only the page
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from crossfade.errors import RankFailedError
from crossfade.ranks.local import Ranks
from tests.models import zoo
from tests.models.trained import Trained, Training, attentions, difference, train_compiled, train_eager

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
SAVED = Path(__file__).with_name("trained.json")
BEGIN, END = "<!-- hugging face architectures: begin -->", "<!-- hugging face architectures: end -->"
TITLE = "# What works with Crossfade\n\nEach section is written by the tests that it names.\n\n"


@dataclass(frozen=True)
class Row:
    """What became of one training: its difference from eager torch in one process; why it was refused, or what was
    warned of."""

    name: str
    attention: str
    checkpointed: str
    ranks: int
    difference: float | None
    refused: str
    torch: str
    transformers: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is one row of."""
        return self.name, self.attention, self.checkpointed, self.ranks


def main() -> None:
    """Train what is asked for, and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = ",".join(architecture.name for architecture in zoo.ARCHITECTURES)
    parser.add_argument("--names", default=every, help="architectures, by comma")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, by comma")
    parser.add_argument("--missing", action="store_true", help="only trainings of which nothing is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        pools = {
            count: stack.enter_context(Ranks(count, timeout=600.0)) for count in map(int, options.ranks.split(","))
        }
        for name in filter(None, options.names.split(",")):
            for training in forms(zoo.architecture(name)):
                known = {each.key for each in saved()} if options.missing else set()
                wanted = {
                    count: pool
                    for count, pool in pools.items()
                    if (training.name, training.attention, training.checkpointed, count) not in known
                }
                if not wanted:
                    continue
                rows = rows_of(training, wanted)
                print(
                    training, *(f"{row.ranks}: {row.refused or row.difference}" for row in rows), sep="; ", flush=True
                )
                save(rows)
    write(saved())


def forms(architecture: zoo.Architecture) -> list[Training]:
    """The trainings of one architecture: attention of each kind, and activations computed again."""
    kinds = attentions(architecture)
    plain = [Training(architecture.name, attention) for attention in kinds]
    return [*plain, Training(architecture.name, kinds[0], "non-reentrant")]


def rows_of(training: Training, pools: Mapping[int, Ranks]) -> list[Row]:
    """Train in both ways, on each number of ranks, and compare."""
    expected = train_eager(training)
    return [_row(training, pool, expected) for pool in pools.values()]


def _row(training: Training, pool: Ranks, expected: Trained) -> Row:
    different, refused = None, ""
    try:
        found = pool.run(train_compiled, training, pool.count)
        different = float(f"{max(difference(each, expected) for each in found):.1e}")
        refused = "".join(each.warned for each in found)
    except RankFailedError as error:  # the table says what happened; the pool starts others
        refused = str(error).strip().splitlines()[-1]
    versions = version("torch"), version("transformers")
    return Row(training.name, training.attention, training.checkpointed, pool.count, different, refused, *versions)


def saved() -> list[Row]:
    """What is known of all trainings."""
    return [Row(**fields) for fields in json.loads(SAVED.read_text())] if SAVED.exists() else []


def save(rows: Iterable[Row]) -> None:
    """Keep rows, in the place of earlier ones of the same training."""
    kept = {each.key: each for each in [*saved(), *rows]}
    place = [architecture.name for architecture in zoo.ARCHITECTURES].index
    ordered = sorted(kept.values(), key=lambda each: (place(each.name), each.key))
    lines = ",\n".join(json.dumps(dataclasses.asdict(each)) for each in ordered)
    SAVED.write_text(f"[\n{lines}\n]\n")


def write(rows: list[Row]) -> None:
    """Put the section in its place on the page, or below what is there."""
    text = PAGE.read_text() if PAGE.exists() else TITLE
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2].lstrip("\n") if found else ""
    PAGE.write_text("".join((before.rstrip("\n") + "\n\n", section(rows), after and "\n" + after)))


def section(rows: list[Row]) -> str:
    """The section on Hugging Face architectures."""
    known = {each.key: each for each in rows}
    versions = sorted({f"torch {each.torch} and transformers {each.transformers}" for each in rows})
    lines = [_HEADINGS, ("---",) * len(_HEADINGS)]
    lines += [_cells(architecture, known) for architecture in zoo.ARCHITECTURES]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{BEGIN}\n{_WORDS.format(versions=', '.join(versions))}\n{table}\n{END}\n"


_HEADINGS = ("architecture", "sdpa", "eager", "checkpointed", "what it has")
_WORDS = """
## Hugging Face architectures

Written by `python -m tests.models.compatibility` from `tests/models/trained.json`, with {versions}.

Small models with their library's defaults, in training mode: padded batches with a mask, labels of which some are -100,
dropout (of attention too), three steps of AdamW. **sdpa** and **eager** are attention's implementations, and
**checkpointed** is `gradient_checkpointing_enable()`. Figures are the largest difference of losses and parameters from
eager torch in one process, relative to the largest value, on two ranks; "bitwise" says that one process trained by
`compile_step` has the same bits. What is warned of or refused stands in the place of a figure.
"""


def _cells(architecture: zoo.Architecture, known: dict[tuple[str, str, str, int], Row]) -> tuple[str, ...]:
    name, kinds = architecture.name, attentions(architecture)
    plain = [_cell(known, name, kind, "") if kind in kinds else "has none" for kind in ("sdpa", "eager")]
    return name, *plain, _cell(known, name, kinds[0], "non-reentrant"), architecture.note


def _cell(known: dict[tuple[str, str, str, int], Row], name: str, attention: str, checkpointed: str) -> str:
    said = []
    alone, together = (known.get((name, attention, checkpointed, ranks)) for ranks in (1, 2))
    if together is not None:
        said.append(together.refused or f"{together.difference:.0e}")
    if alone is not None:
        equal = "bitwise" if alone.difference == 0 else f"{alone.difference:.0e}"
        said.append(alone.refused or (equal if together is not None else f"{equal} in one process"))
    return ", ".join(said).replace("|", "/") or "not tried"


if __name__ == "__main__":
    main()
