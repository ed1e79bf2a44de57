"""How much the plan finder splits of architectures that nobody chose: some in every run, a sample in `make models`."""

from __future__ import annotations

import pytest

from tests.models.breadth import ENOUGH, breadth_of, names
from tests.models.choice import some

SAMPLE = names()[3::40]
"""Every fortieth by name."""


@pytest.mark.parametrize("name", some(("resnet", "albert", *SAMPLE), often=("resnet", "albert")))
def test_most_of_the_bytes_are_split(name: str) -> None:
    found = breadth_of(name)
    if not found.exported:
        pytest.skip(found.refused)
    assert not found.refused
    assert found.share >= ENOUGH, found
