"""The page of architectures: a table of each kind, written at different times."""

from __future__ import annotations

import json

from tests.models.breadth import Breadth, saved
from tests.models.table import by_name, first_part, second_part

ROWS = [
    Breadth("albert", 0.998, 47_200_000, ("2.5% table: it is |not| multiplied",)),
    Breadth("autoformer", refused="ValueError: no length", exported=False),
    Breadth("broken", refused="PlanError: no", exported=True),
]


def test_rows_in_order_of_name_make_a_table() -> None:
    section = by_name(json.loads(saved(ROWS, every=8, first=5, ranks=2)))
    assert "`python -m tests.models.breadth --every 8 --first 5 --save rows.json` on 20" in section
    assert "\n2 of 3 export; of 1 of them at least 80% of the weight bytes are split.\n" in section
    assert section.endswith(
        "| architecture | MB | split | whole, and why |\n"
        "| --- | --- | --- | --- |\n"
        "| albert | 47.2 | 99.8% | 2.5% table: it is /not/ multiplied |\n"
        "| autoformer |  |  | not exported: ValueError: no length |\n"
        "| broken |  |  | refused: PlanError: no |\n"
    )


def test_each_table_is_kept_when_the_other_is_written() -> None:
    section = by_name(json.loads(saved(ROWS, every=8, first=0, ranks=2)))
    page = "# Architectures\n\n| a |\n" + section
    assert first_part(page) == "# Architectures\n\n| a |\n"
    assert second_part(page) == section
    assert second_part("# Architectures\n") == ""
