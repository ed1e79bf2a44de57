"""`make models`: every architecture, static and dynamic, raw and decomposed, split over 2 and 4 ranks; as a table."""

from __future__ import annotations

import argparse
import datetime
import platform
from pathlib import Path

import torch
from rich.progress import track

from crossfade.run.ranks import Ranks
from tests.models import zoo
from tests.models.sharded import VARIANTS, Row, shard_on_ranks

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> None:
    """Run what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=",".join(one.name for one in zoo.ARCHITECTURES))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--variants", default=";".join(VARIANTS))
    parser.add_argument("--output", type=Path, default=DOCS)
    options = parser.parse_args()
    rows: list[Row] = []
    pools = {count: Ranks(count, timeout=300.0) for count in map(int, options.ranks.split(","))}
    try:
        for name in track(options.names.split(","), description="architectures"):
            for variant in options.variants.split(";"):
                for count, pool in pools.items():
                    try:
                        rows.append(shard_on_ranks(pool, zoo.architecture(name), variant))
                    except Exception as error:  # one architecture must not end the table
                        rows.append(Row(name, count, variant, refused=f"{type(error).__name__}: {error}"[:300]))
                        pool.close()
                        pools[count] = Ranks(count, timeout=300.0)
                    print(line(rows[-1]), flush=True)
            options.output.write_text(page(rows))
    finally:
        for pool in pools.values():
            pool.close()
    print(f"written to {options.output.name}: {sum(not row.refused for row in rows)} of {len(rows)} run")


HEADINGS = (
    "architecture",
    "ranks",
    "export",
    "plan",
    "difference",
    "weights split",
    "FLOPs a rank",
    "collectives",
    "note",
)


def line(row: Row) -> str:
    """A row of the table, as Markdown."""
    found = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items()) or "none"
    note = row.refused or "; ".join(row.gathered[:2])
    figures = (f"{row.error:.0e}", f"{row.split} of {row.planned}", f"{row.flops:.2f}", found)
    cells = (row.name, row.ranks, row.variant, row.plan, *(("-",) * 4 if row.refused else figures), note)
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    today = datetime.date.today().isoformat()
    head = (
        "# Architectures split over ranks\n\n"
        f"Printed by `make models` on {today}, torch {torch.__version__}, {platform.machine()}, gloo ranks on one "
        "machine. Tiny random configurations of the transformers library (`tests/models/zoo.py`). The difference is "
        "the largest between a rank's results and one device's, relative to the largest value; weights split are those "
        "whose part is smaller than the whole, of those that the plan names; FLOPs are of the matmuls of one rank "
        "against one device's; collectives are those of a forward.\n\n"
    )
    rule = "|" + "---|" * len(HEADINGS)
    return head + "\n".join(["| " + " | ".join(HEADINGS) + " |", rule, *map(line, rows)]) + "\n"


if __name__ == "__main__":
    main()
