"""docs/torch_compile.md: its blocks run in order on two ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.forked import run_script

PAGE = Path(__file__).parents[2] / "docs" / "torch_compile.md"


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_the_blocks_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    codes = run_script(script, 2, tmp_path, timeout=400)
    assert codes == [0, 0], "\n".join((tmp_path / str(rank)).read_text()[-3000:] for rank in range(2))
