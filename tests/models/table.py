"""`make models`: every architecture, static and dynamic, raw and decomposed, split over 2 and 4 ranks; as a table.

`python -m tests.models.table --breadth rows.json` writes the second table of the page instead, of architectures in
order of name, from what `python -m tests.models.breadth --every 8 --save rows.json` found. Either keeps the other's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from crossfade.ranks.local import Ranks
from tests.models import zoo
from tests.models.breadth import Breadth, summary
from tests.models.sharded import VARIANTS, Row, minimum, shard_on_ranks

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> None:
    """Run what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = ",".join(architecture.name for architecture in zoo.ARCHITECTURES)
    parser.add_argument("--names", default=every, help="architectures, by comma")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, by comma")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="forms of the exported program, by semicolon")
    parser.add_argument("--output", type=Path, default=DOCS, help="the file to write")
    parser.add_argument("--jobs", type=int, default=2, help="architectures at a time")
    parser.add_argument(
        "--breadth", type=Path, help="rows that tests.models.breadth saved: write the second table only"
    )
    options = parser.parse_args()
    known = options.output.read_text() if options.output.exists() else ""
    if options.breadth:
        options.output.write_text(first_part(known) + by_name(json.loads(options.breadth.read_text())))
        return
    counts, variants = [int(count) for count in options.ranks.split(",")], options.variants.split(";")
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as workers:
        pending = [workers.submit(rows_of, name, counts, variants) for name in options.names.split(",")]
        for done in track(as_completed(pending), description="architectures", total=len(pending)):
            rows += done.result()
            print(*map(line, done.result()), sep="\n", flush=True)
            options.output.write_text(page(rows) + second_part(known))
    print(f"written to {options.output.name}: {sum(not row.refused for row in rows)} of {len(rows)} run")


def rows_of(name: str, counts: Sequence[int], variants: Sequence[str]) -> list[Row]:
    """One architecture in all forms, on ranks of its own."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for count in counts:
        pool = Ranks(count, timeout=300.0)
        for variant in variants:
            try:
                rows.append(shard_on_ranks(pool, zoo.architecture(name), variant))
            except Exception as error:  # the others are still of interest: the table says what happened
                rows.append(Row(name, count, variant, refused=f"{type(error).__name__}: {error}"[:300]))
                pool.close()
                pool = Ranks(count, timeout=300.0)
        pool.close()
    return rows


CAVEAT = (
    "What stays whole counts in full, so the FLOPs of vit, clip, whisper and deepseek_v3 depend on their "
    "configuration: with patches of 8x8, two encoder layers and low ranks of 32 and 16 their shares on 2 ranks were "
    "0.58, 0.55, 0.57 and 0.55. The least counts of olmo2, olmoe, mamba2, deepseek_v3, gpt_oss and falcon were written "
    "down after these were first run."
)
HEADINGS = ("architecture", "ranks", "plan", "difference", "weights split", "FLOPs", "collectives", "least", "forms")


def line(row: Row) -> str:
    """What is printed as soon as one form has run."""
    if row.refused:
        return f"{row.name} on {row.ranks} ranks, {row.variant}: {row.refused}"
    reduces, gathers = row.counts
    return (
        f"{row.name} on {row.ranks} ranks, {row.variant}: difference {row.error:.0e}, {row.split} of {row.planned} "
        f"weights split, {row.flops:.3f} of the FLOPs, {reduces} all-reduces, {gathers} all-gathers"
        + "".join(f"; {why}" for why in row.gathered[:2])
    )


def cells(forms: Sequence[Row]) -> tuple[object, ...]:
    """A line of the table: all forms of one architecture on so many ranks, each figure the worst of them."""
    first, ran = forms[0], [row for row in forms if not row.refused]
    if not ran:
        return first.name, first.ranks, "", "", "", "", "", "", first.refused
    counts = sorted({row.counts for row in ran})
    least = minimum(first.name, first.ranks)
    refused = [f"{row.variant}: {row.refused}" for row in forms if row.refused]
    return (
        first.name,
        first.ranks,
        ran[0].plan,
        f"{max(row.error for row in ran):.0e}",
        f"{min(row.split for row in ran)} of {max(row.planned for row in ran)}",
        f"{max(row.flops for row in ran):.2f}",
        " or ".join(f"{reduces} + {gathers}" for reduces, gathers in counts),
        f"{least[0]} + {least[1]}" if least else "",
        "; ".join([f"{len(ran)} of {len(forms)}", *refused]),
    )


def page(rows: Sequence[Row]) -> str:
    """docs/models.md."""
    today = datetime.date.today().isoformat()
    groups = [list(group) for _, group in groupby(sorted(rows, key=_place), key=lambda row: (row.name, row.ranks))]
    above = [row for row in rows if not row.refused and row.flops > 1 / row.ranks + 0.05]
    ran = sum(not row.refused for row in rows)
    head = (
        "# Architectures split over ranks\n\n"
        f"Written by `make models` on {today}, torch {torch.__version__}, transformers "
        f"{version('transformers')}, {platform.machine()}, gloo ranks on one machine. "
        "Tiny random configurations of that library (`tests/models/zoo.py`), each exported in "
        "four forms (static and dynamic sizes, raw and decomposed), saved, loaded by each rank and run.\n\n"
        "- **difference**: the largest between a rank's results and one device's, relative to the largest value.\n"
        "- **weights split**: those whose part is smaller than the whole, of those that the plan names.\n"
        "- **FLOPs**: of one rank's matmuls, convolutions and attention, of one device's.\n"
        "- **collectives**: all-reduces + all-gathers of a forward; **least**: counted by hand, for decoders.\n"
        "- **forms**: how many of those asked for ran; what was refused, and why.\n\n"
        f"{ran} of {len(rows)} ran; in {len(above)} a rank does more than 1/ranks + 5% of the FLOPs.\n\n{CAVEAT}\n\n"
    )
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, groups)]
    return head + "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


SECOND = "\n## Architectures in order of name\n"
"""Where the second table begins."""


def first_part(text: str) -> str:
    """A page without its second table."""
    return text.partition(SECOND)[0]


def second_part(text: str) -> str:
    """The second table of a page, with its heading; nothing where there is none."""
    _, heading, rest = text.partition(SECOND)
    return heading + rest


def by_name(found: Mapping[str, Any]) -> str:
    """The second table, of what `tests.models.breadth.saved` keeps."""
    rows = [Breadth(**{**row, "whole": tuple(row["whole"])}) for row in found["rows"]]
    first = f" --first {found['first']}" if found["first"] else ""
    head = (
        f"{SECOND}\nEvery {found['every']}th architecture of the transformers library's `AutoModel`, in order of name: "
        "nobody chose them for success. Each has the widths of its configuration's defaults, two layers, and small "
        "tables of words and positions; the plan is `Plan.megatron(..., vocab=True, singles=True)`, for "
        f"{found['ranks']} ranks. "
        f"`python -m tests.models.breadth --every {found['every']}{first} --save rows.json` on {found['date']}, torch "
        f"{found['torch']}, transformers {found['transformers']}.\n\n"
        "- **split**: the share of the bytes of all parameters that the program reads.\n"
        "- **whole, and why**: of parameters of more than one dim, those of more than 2% of the bytes. What is not "
        "exported could not be built or exported with the inputs that the command makes, for the reason that stands "
        "there; most of these need inputs of another kind or settings without defaults.\n\n"
        f"{summary(rows)}.\n\n"
    )
    table = [("architecture", "MB", "split", "whole, and why"), ("---",) * 4, *map(_breadth_cells, rows)]
    return head + "\n".join("| " + " | ".join(map(_cell, cells)) + " |" for cells in table) + "\n"


def _breadth_cells(row: Breadth) -> tuple[str, str, str, str]:
    if row.refused:
        return row.name, "", "", f"{'refused' if row.exported else 'not exported'}: {row.refused}"
    return row.name, f"{row.weights / 1e6:.1f}", f"{row.share:.1%}", "; ".join(row.whole)


def _place(row: Row) -> tuple[int, int]:
    return [architecture.name for architecture in zoo.ARCHITECTURES].index(row.name), row.ranks


def _cell(text: object) -> str:
    return str(text).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    main()
