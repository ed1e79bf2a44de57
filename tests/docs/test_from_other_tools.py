"""Pages for people who come from other tools: every block runs on two ranks, and both of a pair train one model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import run_script

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?:^(Before|After):\n\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

FIRST, PAIRS = {first!r}, {pairs!r}


def weights(model):
    return {{
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }}


shared = {{"__name__": "page"}}
exec(compile(FIRST, "the first block", "exec"), shared)
for number, (before, after) in enumerate(PAIRS):
    found = []
    for block in (before, after):
        names = dict(shared)
        exec(compile(block, f"pair {{number}}", "exec"), names)
        found.append(weights(names["model"]))
        if "average" in names:
            found.append(dict(names["average"].module.state_dict()))
        if "averages" in names:
            found.append({{name: value.full_tensor() for name, value in names["averages"].items()}})
    half = len(found) // 2
    for left, right in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(left, right, rtol={rtol}, atol={atol})
    start = weights(shared["build_model"]())
    assert any(not torch.equal(start[name], value) for name, value in found[0].items()), "nothing was trained"
    print("pair", number, "agrees", flush=True)
dist.destroy_process_group()
"""


def blocks(page: str) -> tuple[str, list[tuple[str, str]]]:
    """The first block of a page, and the pairs of blocks that follow."""
    found = BLOCK.findall((DOCS / page).read_text())
    (label, first), rest = found[0], found[1:]
    assert not label and [kind for kind, _ in rest] == ["Before", "After"] * (len(rest) // 2)
    return first, [(rest[i][1], rest[i + 1][1]) for i in range(0, len(rest), 2)]


@pytest.mark.ranks
@pytest.mark.parametrize("page", ["from_ddp.md", "from_fsdp.md", "hugging_face.md", "frameworks.md"])
def test_before_and_after_train_the_same_model(page: str, tmp_path: Path) -> None:
    first, pairs = blocks(page)
    assert len(pairs) >= 3
    script = tmp_path / "page.py"
    script.write_text(SCRIPT.format(first=first, pairs=pairs, rtol=1e-4, atol=1e-5))
    codes = run_script(script, 2, tmp_path, timeout=400)
    printed = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in printed)
    assert all(text.count("agrees") == len(pairs) for text in printed)
