"""A wheel and a source archive are built, hold everything, and work where the repository is not.

Nothing is downloaded: what the package depends on is taken from the environment that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

pytestmark = pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="setuptools 77 or later builds the package"
)


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    return into / run(sys.executable, "-c", BUILD, f"build_{kind}", str(into), cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source archive, which is built from the files that git knows."""
    base = tmp_path_factory.mktemp("distribution")
    clean = base / "clean"
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            (clean / name).write_bytes((ROOT / name).read_bytes())
    archive = build("sdist", clean, base)
    with tarfile.open(archive) as packed:
        packed.extractall(base / "unpacked", filter="data")
    (source,) = (base / "unpacked").iterdir()
    return build("wheel", source, base)


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("crossfade/")}
    kept = {".py", ".html", ".css", ".js", ".typed"}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "crossfade").rglob("*") if path.suffix in kept}
    assert held == files | {"crossfade/py.typed"}


def test_it_works_where_the_repository_is_not(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    run(*pip, str(wheel), cwd=tmp_path)
    where = run(sys.executable, "-c", "import crossfade; print(crossfade.__file__)", cwd=tmp_path, path=target)
    assert Path(where.strip()).is_relative_to(target)
    assert "passes" in run(str(target / "bin" / "crossfade"), "--help", cwd=tmp_path, path=target)


def test_versions_agree() -> None:
    import crossfade

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == crossfade.__version__
    assert f"\nversion: {crossfade.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {crossfade.__version__}" in (ROOT / "CHANGELOG.md").read_text()
